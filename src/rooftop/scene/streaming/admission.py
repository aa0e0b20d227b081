"""Make arrived pages visible to the kernels, after a check that all offsets in a page stay inside the page.

A checksum shows that a page is unchanged, not that its content is valid. `Geometry.check_page` checks the structure in
NumPy, but holds the GIL for half a millisecond per page, which is as long as a frame. So the device makes the same
checks before it stores the page's position. An invalid page stays absent, and the device's next answer to the host
(`answers.py`) names the page. The host then calls `check_page`, which raises the error.
"""

import warp as wp

from rooftop.scene import layouts
from rooftop.scene.rendering.buffers import HAS_COLORS, HAS_NORMALS, HAS_UV
from rooftop.scene.rendering.clusters import (
    CLUSTER_COUNTS,
    CLUSTER_EXTENT,
    CLUSTER_MATERIAL,
    CLUSTER_SOURCE,
    CLUSTER_STREAMS,
    CLUSTER_UV_EXTENT,
    CLUSTER_WORDS,
    COLOR_BITS,
    FANS,
    FANS_AND_EXPLICIT,
    GROUP_WORDS,
    HEAD_BOX,
    HEAD_COUNTS,
    HEAD_EXPLICIT_AT,
    HEAD_NORMAL_WORDS,
    HEAD_REFERENCE_AT,
    HEAD_SOURCE,
    HEAD_STREAMS,
    HEAD_UV_WORDS,
    HEAD_WORDS,
    MATERIAL_BITS,
    MIXED,
    NEW_WORDS,
    NORMAL_BITS,
    NORMAL_WIDTH_BITS,
    PAGE_FIRST_CLUSTER,
    PAGE_GROUP_BITS,
    PAGE_GROUP_MASK,
    PAGE_GROUPS,
    PAGE_REPLACES,
    PAGE_WORDS,
    REPLACED_WORDS,
    SEPARATE,
    UV_WIDTH_BITS,
    bit_length,
    box_length,
    mask_words,
    whole_words,
    word_at,
)

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

LANES = wp.constant(128)  # threads that divide the clusters and groups of a page among them
# Each thread's vote is 1, or 1 + AGAINST if its part of the page is invalid. AGAINST is more than LANES, so the sum of
# votes modulo AGAINST is the number of votes.
AGAINST = wp.constant(2**16)
PAGE_CLUSTERS, PAGE_LENGTH = wp.constant(layouts.PAGE_CLUSTERS), wp.constant(layouts.PAGE_LENGTH)
CLUSTER_GROUP, SHORT_HEADS = wp.constant(layouts.CLUSTER_GROUP), wp.constant(layouts.SHORT_HEADS)
GROUP_FIRST, GROUP_COUNT = wp.constant(layouts.GROUP_FIRST), wp.constant(layouts.GROUP_COUNT)
MOST_TRIANGLES, MOST_BITS = wp.constant(layouts.MAX_TRIANGLES), wp.constant(layouts.MOST_REFERENCE_BITS)
MOST_CLUSTERS = wp.constant(layouts.MOST_CLUSTERS)

# Columns of a changed page: its number over all meshes, the index of its first word in the pool (-1 if the page is
# evicted), and its row of `PageGraph.limits`.
PAGE, PLACE, WORDS, REACH, ATTRIBUTES, ALL_GROUPS = (wp.constant(column) for column in range(6))
COLUMNS = 6


@wp.struct
class Sizes:
    """The numbers of triangles, vertices and references of a cluster, and the sizes of its streams, computed from its
    head."""

    fits: wp.bool  # whether the sizes are within the format's limits
    kind: wp.int32  # as `Cluster.kind`
    triangles: wp.int32  # number of triangles
    vertices: wp.int32
    references: wp.int32
    start: wp.int32  # words from the page's first word to the first stream
    needed: wp.int64  # number of words of all streams


@wp.func
def added_up(sizes: Sizes, reference_bits: wp.int32, position_bits: wp.int32, attribute_bits: wp.int32, mixed: wp.bool):
    """Complete the sizes of a cluster's streams: compute `needed`, the total number of 32-bit words of all streams. Set
    `fits` to False if the cluster has too many triangles, too many vertices for its triangles, or too long references.

    `reference_bits` is the number of bits of one reference. `position_bits` and `attribute_bits` are the numbers of
    bits of one vertex. `mixed` tells whether each triangle has its own material.
    """
    whole = sizes
    whole.needed = wp.int64(mask_words(sizes.kind)) + whole_words(wp.max(sizes.references, 0) * reference_bits)
    whole.needed += whole_words(sizes.vertices * position_bits) + whole_words(sizes.vertices * attribute_bits)
    if mixed:
        whole.needed += whole_words(MATERIAL_BITS * sizes.triangles)
    whole.fits = sizes.fits and sizes.triangles <= MOST_TRIANGLES and sizes.vertices <= 3 * sizes.triangles
    whole.fits = whole.fits and reference_bits <= MOST_BITS
    return whole


@wp.func
def old_sizes(words: wp.array(dtype=wp.int32), head: wp.int64, attributes: wp.int32):
    """Compute the sizes of a cluster's streams from a head of a file of versions 1 to 3. `head` is the index of the
    head's first word, and `attributes` tells which attributes the mesh has."""
    sizes = Sizes()
    counts = word_at(words, head + wp.int64(CLUSTER_COUNTS))
    sizes.fits = True
    sizes.kind = SEPARATE
    sizes.triangles = (counts & 255) + 1
    sizes.vertices = ((counts >> 8) & 255) + 1
    sizes.references = 3 * sizes.triangles - sizes.vertices
    sizes.start = word_at(words, head + wp.int64(CLUSTER_STREAMS))
    position_bits = wp.int32(0)
    attribute_bits = wp.where((attributes & HAS_NORMALS) != 0, 2 * NORMAL_BITS, 0)
    attribute_bits += wp.where((attributes & HAS_COLORS) != 0, 3 * COLOR_BITS, 0)
    for axis in range(3):
        extent = word_at(words, head + wp.int64(CLUSTER_EXTENT + axis))
        position_bits += bit_length(extent)
        sizes.fits = sizes.fits and extent >= 0
    for axis in range(2):
        extent = word_at(words, head + wp.int64(CLUSTER_UV_EXTENT + axis))
        attribute_bits += bit_length(extent)
        sizes.fits = sizes.fits and extent >= 0
    mixed = word_at(words, head + wp.int64(CLUSTER_MATERIAL)) == MIXED
    return added_up(sizes, (counts >> 16) & 255, position_bits, attribute_bits, mixed)


@wp.func
def short_sizes(words: wp.array(dtype=wp.int32), head: wp.int64, attributes: wp.int32, replaces: wp.bool):
    """Compute the sizes of a cluster's streams from a short head (version 4). `head` is the index of the head's first
    word, `attributes` tells which attributes the mesh has, and `replaces` whether the head names a replaced group."""
    sizes = Sizes()
    counts = word_at(words, head + wp.int64(HEAD_COUNTS))
    box = word_at(words, head + wp.int64(HEAD_BOX))
    streams = word_at(words, head + wp.int64(HEAD_STREAMS))
    sizes.fits = True
    sizes.kind = FANS + ((box >> HEAD_EXPLICIT_AT) & 1)
    sizes.triangles = (counts & 127) + 1
    sizes.vertices = ((counts >> 7) & 255) + 1
    sizes.references = (counts >> 23) & 511
    sizes.start = streams & 32767
    position_bits = box_length(box, 0) + box_length(box, 1) + box_length(box, 2)
    attribute_bits = wp.where((attributes & HAS_COLORS) != 0, 3 * COLOR_BITS, 0)
    at = head + wp.int64(HEAD_WORDS)
    if replaces:
        at += wp.int64(REPLACED_WORDS)
    if (attributes & HAS_NORMALS) != 0:
        widths = word_at(words, at) >> (2 * NORMAL_BITS)
        most = (1 << NORMAL_WIDTH_BITS) - 1
        attribute_bits += (widths & most) + ((widths >> NORMAL_WIDTH_BITS) & most)
        at += wp.int64(HEAD_NORMAL_WORDS)
    if (attributes & HAS_UV) != 0:
        widths = word_at(words, at + wp.int64(2))
        most = (1 << UV_WIDTH_BITS) - 1
        attribute_bits += (widths & most) + ((widths >> UV_WIDTH_BITS) & most)
    mixed = ((streams >> 15) & 1) != 0
    return added_up(sizes, ((box >> HEAD_REFERENCE_AT) & 7) + 1, position_bits, attribute_bits, mixed)


@wp.func
def masks_fit(words: wp.array(dtype=wp.int32), masks: wp.int64, sizes: Sizes):
    """Whether a cluster's masks imply as many vertices and references as the cluster's head states. If they do, no
    look-up of a reference leaves the stream of references. `masks` is the index of the masks' first word.
    """
    ones = wp.int32(0)
    twos = wp.int32(0)
    both = wp.int32(0)
    explicit = wp.int32(0)
    fits = wp.bool(True)
    left = sizes.triangles + 0
    for word in range(4):
        there = wp.clamp(left, 0, 32)
        left -= 32
        at = masks + wp.int64(word)
        low = wp.uint32(word_at(words, at))
        high = wp.uint32(word_at(words, at + wp.int64(4)))
        third = wp.uint32(0)
        if sizes.kind == FANS_AND_EXPLICIT:
            third = wp.uint32(word_at(words, at + wp.int64(NEW_WORDS)))
        beyond = ~wp.uint32((wp.uint64(1) << wp.uint64(there)) - wp.uint64(1))
        fits = fits and ((low | high | third) & beyond) == wp.uint32(0) and (third & ~(low & high)) == wp.uint32(0)
        ones += wp.int32(wp.bit_count(low))
        twos += wp.int32(wp.bit_count(high))
        both += wp.int32(wp.bit_count(low & high))
        explicit += wp.int32(wp.bit_count(third))
    vertices = ones + 2 * twos - 3 * explicit
    references = sizes.triangles + ones - 2 * both + 3 * explicit
    if sizes.kind == SEPARATE:
        references = 3 * sizes.triangles - vertices
    return fits and vertices == sizes.vertices and references == sizes.references


@wp.func
def cluster_fits(
    words: wp.array(dtype=wp.int32),
    place: wp.int64,
    head: wp.int64,
    before: wp.int64,
    length: wp.int64,
    attributes: wp.int32,
    replaces: wp.bool,
):
    """Whether the streams of a cluster lie within its page and refer to nothing outside the page.

    `place` and `head` are the indices of the first word of the page and of the cluster's head. `before` is the number
    of words of the page before its streams, and `length` the number of words of the whole page.
    """
    sizes = Sizes()
    if (attributes & SHORT_HEADS) != 0:
        sizes = short_sizes(words, head, attributes, replaces)
    else:
        sizes = old_sizes(words, head, attributes)
    start = wp.int64(sizes.start)
    fits = sizes.fits and start >= before and start + sizes.needed < length
    if fits:
        fits = masks_fit(words, place + start, sizes)
    return fits


@wp.func
def names_fit(
    words: wp.array(dtype=wp.int32),
    head: wp.int64,
    attributes: wp.int32,
    replaces: wp.bool,
    groups: wp.int32,
    all_groups: wp.int64,
):
    """Whether the groups of clusters to which a cluster's head refers exist: the cluster's own group, among the
    `groups` groups of the page, and the group that the cluster replaces, among the `all_groups` groups of the mesh."""
    fits = wp.bool(True)
    source = wp.int32(-1)
    if (attributes & SHORT_HEADS) == 0:
        group = word_at(words, head + wp.int64(CLUSTER_GROUP))
        fits = group >= 0 and group < groups
        source = word_at(words, head + wp.int64(CLUSTER_SOURCE))
    elif replaces:
        source = word_at(words, head + wp.int64(HEAD_SOURCE))
    return fits and source >= -1 and wp.int64(source) < all_groups


@wp.func
def page_fits(words: wp.array(dtype=wp.int32), arriving: wp.array2d(dtype=wp.int64), k: wp.int32, lane: wp.int32):
    """Whether the part of an arriving page that this thread checks is valid. `k` is the page's row in `arriving`, and
    `lane` the thread's number among the LANES threads of the page. An evicted page has no position, and counts as
    valid."""
    place = arriving[k, PLACE]
    if place < wp.int64(0):
        return wp.bool(True)
    clusters = word_at(words, place + wp.int64(PAGE_CLUSTERS))
    group_word = word_at(words, place + wp.int64(PAGE_GROUPS))
    attributes = wp.int32(arriving[k, ATTRIBUTES])
    groups = group_word & PAGE_GROUP_MASK
    expected = groups
    a_head = wp.int32(CLUSTER_WORDS)
    replaces = wp.bool(True)
    if (attributes & SHORT_HEADS) != 0:
        replaces = (group_word & PAGE_REPLACES) != 0
        a_head = HEAD_WORDS + wp.where(replaces, REPLACED_WORDS, 0)
        a_head += wp.where((attributes & HAS_NORMALS) != 0, HEAD_NORMAL_WORDS, 0)
        a_head += wp.where((attributes & HAS_UV) != 0, HEAD_UV_WORDS, 0)
        expected = groups | (a_head << PAGE_GROUP_BITS) | (group_word & PAGE_REPLACES)
    length = arriving[k, WORDS]
    heads = place + wp.int64(PAGE_WORDS) + wp.int64(groups) * wp.int64(GROUP_WORDS)
    before = heads - place + wp.int64(clusters) * wp.int64(a_head)
    fits = wp.int64(word_at(words, place + wp.int64(PAGE_LENGTH))) == length and before < length
    fits = fits and clusters >= 1 and clusters <= MOST_CLUSTERS and wp.int64(clusters) >= arriving[k, REACH]
    fits = fits and groups >= 1 and group_word == expected
    fits = fits and word_at(words, place + wp.int64(PAGE_FIRST_CLUSTER)) >= 0
    if fits:
        for index in range(lane, clusters, LANES):
            head = heads + wp.int64(index) * wp.int64(a_head)
            fits = fits and names_fit(words, head, attributes, replaces, groups, arriving[k, ALL_GROUPS])
            fits = fits and cluster_fits(words, place, head, before, length, attributes, replaces)
        for index in range(lane, groups, LANES):
            record = place + wp.int64(PAGE_WORDS) + wp.int64(index) * wp.int64(GROUP_WORDS)
            first = word_at(words, record + wp.int64(GROUP_FIRST))
            count = word_at(words, record + wp.int64(GROUP_COUNT))
            fits = fits and first >= 0 and count >= 1 and wp.int64(first) + wp.int64(count) <= wp.int64(clusters)
    return fits


@wp.kernel
def admit_pages(
    words: wp.array(dtype=wp.int32),
    arriving: wp.array2d(dtype=wp.int64),
    votes: wp.array(dtype=wp.int32),
    page_at: wp.array(dtype=wp.int64),
    refused: wp.array(dtype=wp.int32),
):
    """Store the position of each valid page in `page_at`. If a page is invalid, store its number plus one in `refused`,
    which keeps the highest such value.

    LANES threads check a page together. Each thread adds its vote to the page's element of `votes`. The thread that
    votes last decides, and resets the element to 0. Rows of `arriving` without a page are skipped.
    """
    k = wp.tid() // LANES
    page = arriving[k, PAGE]
    if page < wp.int64(0):
        return
    vote = wp.int32(1)
    if not page_fits(words, arriving, k, wp.tid() % LANES):
        vote += AGAINST
    total = wp.atomic_add(votes, k, vote) + vote
    if total % AGAINST == LANES:
        votes[k] = 0
        if total == LANES:
            page_at[page] = arriving[k, PLACE]
        else:
            wp.atomic_max(refused, 0, wp.int32(page) + 1)
