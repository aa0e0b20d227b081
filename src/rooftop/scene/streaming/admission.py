"""Makes arrived pages visible to the kernels, if all offsets in them stay inside the page.

A checksum says that a page is what was written, not that it was written right. `Geometry.check_page` looks at the
structure in NumPy, which takes half a millisecond of Python's lock for a page: as long as a frame. So the device looks,
at the same things, before it writes where the page is. A page that is wrong stays absent, and the next answer names it;
the host then has `check_page` say what is wrong.
"""

import warp as wp

from rooftop.scene import layouts
from rooftop.scene.geometry import MOST_REFERENCE_BITS
from rooftop.scene.rendering.clusters import (
    CLUSTER_COUNTS,
    CLUSTER_EXTENT,
    CLUSTER_MATERIAL,
    CLUSTER_STREAMS,
    CLUSTER_UV_EXTENT,
    CLUSTER_WORDS,
    GROUP_WORDS,
    MATERIAL_BITS,
    MIXED,
    NEW_WORDS,
    PAGE_FIRST_CLUSTER,
    PAGE_GROUPS,
    PAGE_WORDS,
    bit_length,
    whole_words,
    word_at,
)

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

LANES = wp.constant(128)  # threads that go through the clusters and groups of a page
PAGE_CLUSTERS, PAGE_LENGTH = wp.constant(layouts.PAGE_CLUSTERS), wp.constant(layouts.PAGE_LENGTH)
CLUSTER_GROUP, CLUSTER_SOURCE = wp.constant(layouts.CLUSTER_GROUP), wp.constant(layouts.CLUSTER_SOURCE)
GROUP_FIRST, GROUP_COUNT = wp.constant(layouts.GROUP_FIRST), wp.constant(layouts.GROUP_COUNT)
MOST_TRIANGLES, MOST_BITS = wp.constant(layouts.MAX_TRIANGLES), wp.constant(MOST_REFERENCE_BITS)

# Of a page that arrives, columns: its number over all meshes, its place, and what its mesh's file says.
PAGE, PLACE, WORDS, REACH, FIXED_BITS, ALL_GROUPS = (wp.constant(column) for column in range(6))
COLUMNS = 6


@wp.func
def cluster_fits(
    words: wp.array(dtype=wp.int32),
    place: wp.int64,
    head: wp.int64,
    before: wp.int64,
    length: wp.int64,
    fixed_bits: wp.int32,
):
    """Whether the streams of a cluster are within its page."""
    counts = word_at(words, head + wp.int64(CLUSTER_COUNTS))
    triangles = (counts & 255) + 1
    vertices = ((counts >> 8) & 255) + 1
    reference_bits = (counts >> 16) & 255
    position_bits = wp.int32(0)
    attribute_bits = fixed_bits
    fits = triangles <= MOST_TRIANGLES and vertices <= 3 * triangles and reference_bits <= MOST_BITS
    for axis in range(3):
        extent = word_at(words, head + wp.int64(CLUSTER_EXTENT + axis))
        position_bits += bit_length(extent)
        fits = fits and extent >= 0
    for axis in range(2):
        extent = word_at(words, head + wp.int64(CLUSTER_UV_EXTENT + axis))
        attribute_bits += bit_length(extent)
        fits = fits and extent >= 0
    needed = wp.int64(NEW_WORDS)
    needed += whole_words(wp.max(3 * triangles - vertices, 0) * reference_bits)
    needed += whole_words(vertices * position_bits) + whole_words(vertices * attribute_bits)
    if word_at(words, head + wp.int64(CLUSTER_MATERIAL)) == MIXED:
        needed += whole_words(MATERIAL_BITS * triangles)
    start = wp.int64(word_at(words, head + wp.int64(CLUSTER_STREAMS)))
    return fits and start >= before and start + needed < length


@wp.kernel
def check_pages(words: wp.array(dtype=wp.int32), arriving: wp.array2d(dtype=wp.int64), wrong: wp.array(dtype=wp.int32)):
    """`wrong` of each page that arrives; LANES threads have a page."""
    k = wp.tid() // LANES
    lane = wp.tid() % LANES
    place = arriving[k, PLACE]
    clusters = word_at(words, place + wp.int64(PAGE_CLUSTERS))
    groups = word_at(words, place + wp.int64(PAGE_GROUPS))
    length = arriving[k, WORDS]
    heads = place + wp.int64(PAGE_WORDS) + wp.int64(groups) * wp.int64(GROUP_WORDS)
    before = heads - place + wp.int64(clusters) * wp.int64(CLUSTER_WORDS)
    fits = wp.int64(word_at(words, place + wp.int64(PAGE_LENGTH))) == length and before < length
    fits = fits and clusters >= 1 and groups >= 1 and wp.int64(clusters) >= arriving[k, REACH]
    fits = fits and word_at(words, place + wp.int64(PAGE_FIRST_CLUSTER)) >= 0
    if fits:
        fixed_bits = wp.int32(arriving[k, FIXED_BITS])
        for index in range(lane, clusters, LANES):
            head = heads + wp.int64(index) * wp.int64(CLUSTER_WORDS)
            group = word_at(words, head + wp.int64(CLUSTER_GROUP))
            source = word_at(words, head + wp.int64(CLUSTER_SOURCE))
            fits = fits and group >= 0 and group < groups
            fits = fits and source >= -1 and wp.int64(source) < arriving[k, ALL_GROUPS]
            fits = fits and cluster_fits(words, place, head, before, length, fixed_bits)
        for index in range(lane, groups, LANES):
            record = place + wp.int64(PAGE_WORDS) + wp.int64(index) * wp.int64(GROUP_WORDS)
            first = word_at(words, record + wp.int64(GROUP_FIRST))
            count = word_at(words, record + wp.int64(GROUP_COUNT))
            fits = fits and first >= 0 and count >= 1 and wp.int64(first) + wp.int64(count) <= wp.int64(clusters)
    if not fits:
        wrong[k] = 1


@wp.kernel
def admit_pages(
    arriving: wp.array2d(dtype=wp.int64),
    wrong: wp.array(dtype=wp.int32),
    page_at: wp.array(dtype=wp.int64),
    refused: wp.array(dtype=wp.int32),
):
    """A page's place, if nothing is wrong with it; else the highest number of such a page, plus one."""
    k = wp.tid()
    page = arriving[k, PAGE]
    if wrong[k] == 0:
        page_at[page] = arriving[k, PLACE]
    else:
        wp.atomic_max(refused, 0, wp.int32(page) + 1)
