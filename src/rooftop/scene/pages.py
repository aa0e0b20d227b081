"""Read the groups of a page and the heads of its clusters from the page's words, and check pages.

`geometry.py` checks each page with `wrong_in_page` before other code reads it. No offset in a checked page points
outside the page. docs/scene-format.md describes a page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.heads import bit_lengths, head_words, unpacked, unpacked_old

Words = npt.NDArray[np.int32]


def groups_in(page: Words) -> int:
    """The number of groups in a page. From version 4 on, the word PAGE_GROUPS contains other values too."""
    return int(page[layouts.PAGE_GROUPS]) & (1 << layouts.PAGE_GROUP_BITS) - 1


def groups_of(page: Words) -> Words:
    """The records of a page's groups, (G, GROUP_WORDS) int32."""
    return page[layouts.PAGE_WORDS :][: groups_in(page) * layouts.GROUP_WORDS].reshape(-1, layouts.GROUP_WORDS)


def page_head_words(page: Words, attributes: int) -> int:
    """The number of words of each head in the page; all heads of a page have the same length."""
    if not attributes & layouts.SHORT_HEADS:
        return layouts.CLUSTER_WORDS
    replaces = bool(page[layouts.PAGE_GROUPS] & layouts.PAGE_REPLACES)
    return head_words(replaces, bool(attributes & layouts.HAS_NORMALS), bool(attributes & layouts.HAS_UV))


def heads_of(page: Words, attributes: int) -> Words:
    """The heads of a page, unpacked: (C, CLUSTER_COLUMNS) int32."""
    begin = layouts.PAGE_WORDS + groups_in(page) * layouts.GROUP_WORDS
    words = page_head_words(page, attributes)
    heads = page[begin : begin + int(page[layouts.PAGE_CLUSTERS]) * words].reshape(-1, words).view(np.uint32)
    normals, uv = bool(attributes & layouts.HAS_NORMALS), bool(attributes & layouts.HAS_UV)
    if not attributes & layouts.SHORT_HEADS:
        return unpacked_old(heads, normals).view(np.int32)
    return unpacked(heads, bool(page[layouts.PAGE_GROUPS] & layouts.PAGE_REPLACES), normals, uv).view(np.int32)


def wrong_in_page(page: Words, attributes: int, all_groups: int) -> str | None:
    """Describe what is wrong with a page, or return None. If the result is None, code that reads the page's clusters
    stays inside the page.

    Args:
        attributes: attributes of the file, see `Geometry.attributes`.
        all_groups: number of groups in the file.
    """
    clusters, group_word, first, length = (int(word) for word in page[: layouts.PAGE_WORDS])
    groups, a_head = groups_in(page), page_head_words(page, attributes)
    expected = groups
    if attributes & layouts.SHORT_HEADS:
        expected |= a_head << layouts.PAGE_GROUP_BITS | group_word & layouts.PAGE_REPLACES
    before = layouts.PAGE_WORDS + groups * layouts.GROUP_WORDS + clusters * a_head
    fits = group_word == expected and length == len(page) and groups >= 1 and first >= 0 and before < length
    if not fits or not 1 <= clusters <= layouts.MOST_CLUSTERS:
        return "its header is wrong"
    heads = heads_of(page, attributes).astype(np.int64)
    counts = heads[:, layouts.CLUSTER_COUNTS] & 0xFFFFFFFF
    triangles, vertices, reference_bits = (counts & 255) + 1, (counts >> 8 & 255) + 1, counts >> 16 & 255
    references = heads[:, layouts.CLUSTER_REFERENCES]
    extent = heads[:, layouts.CLUSTER_EXTENT : layouts.CLUSTER_EXTENT + 3] & 0xFFFFFFFF
    uv_extent = heads[:, layouts.CLUSTER_UV_EXTENT : layouts.CLUSTER_UV_EXTENT + 2] & 0xFFFFFFFF
    normal_extent = heads[:, layouts.CLUSTER_NORMAL_EXTENT : layouts.CLUSTER_NORMAL_EXTENT + 2]
    of_vertex = bit_lengths(uv_extent).sum(1) + bit_lengths(normal_extent).sum(1)
    of_vertex += 3 * layouts.COLOR_BITS * bool(attributes & layouts.HAS_COLORS)
    mixed = heads[:, layouts.CLUSTER_MATERIAL] == layouts.MIXED
    has_explicit = heads[:, layouts.CLUSTER_MASKS] == layouts.FANS_AND_EXPLICIT
    bits = [references * reference_bits, vertices * bit_lengths(extent).sum(1), vertices * of_vertex]
    needed = layouts.NEW_WORDS + layouts.EXPLICIT_WORDS * has_explicit + sum((each + 31) // 32 for each in bits)
    needed = needed + np.where(mixed, (layouts.MATERIAL_BITS * triangles + 31) // 32, 0)
    start = heads[:, layouts.CLUSTER_STREAMS]
    if (triangles > layouts.MAX_TRIANGLES).any() or (start < before).any() or (start + needed >= length).any():
        return "the streams of a cluster would lie outside of the page"
    if (extent >= 1 << 31).any() or (uv_extent >= 1 << 31).any():
        return "the extent of a cluster needs more than 31 bits"
    if (vertices > 3 * triangles).any() or (reference_bits > layouts.MOST_REFERENCE_BITS).any():
        return "a cluster has more vertices than corners, or its references have too many bits"
    if not _masks_fit(page, heads, triangles, vertices, references):
        return "the masks of a cluster do not match its vertices and references"
    if not attributes & layouts.SHORT_HEADS:
        owner = heads[:, layouts.CLUSTER_GROUP]
        if (owner < 0).any() or (owner >= groups).any():
            return "a cluster belongs to a group that is not in the page"
    source = heads[:, layouts.CLUSTER_SOURCE]
    if (source < -1).any() or (source >= all_groups).any():
        return "a cluster replaces a group that is not in the file"
    records = groups_of(page).astype(np.int64)
    group_first, group_count = records[:, layouts.GROUP_FIRST], records[:, layouts.GROUP_COUNT]
    if (group_first < 0).any() or (group_count < 1).any() or (group_first + group_count > clusters).any():
        return "a group has clusters that are not in the page"
    return None


def _masks_fit(
    page: Words,
    heads: npt.NDArray[np.int64],
    triangles: npt.NDArray[np.int64],
    vertices: npt.NDArray[np.int64],
    references: npt.NDArray[np.int64],
) -> bool:
    """Whether the masks of each cluster imply the numbers of vertices and references that the cluster's head states. If
    they do, a reader that follows the masks stays within the cluster's streams.
    """
    kind = heads[:, layouts.CLUSTER_MASKS]
    places = heads[:, layouts.CLUSTER_STREAMS, None] + np.arange(layouts.NEW_WORDS)
    low, high = page[places].view(np.uint32).reshape(-1, 2, 4).transpose(1, 0, 2)
    third = np.zeros_like(low)
    has_third = kind == layouts.FANS_AND_EXPLICIT
    third[has_third] = page[places[has_third, :4] + layouts.NEW_WORDS].view(np.uint32)
    there = np.clip(triangles[:, None] - 32 * np.arange(4), 0, 32)
    beyond = (low | high | third) & ~((1 << there) - 1).astype(np.uint32)
    ones, twos, both, explicit = (
        np.bitwise_count(mask).sum(1, dtype=np.int64) for mask in (low, high, low & high, third)
    )
    found = ones + 2 * twos - 3 * explicit
    wanted = np.where(kind == layouts.SEPARATE, 3 * triangles - found, triangles + ones - 2 * both + 3 * explicit)
    fits = (found == vertices) & (wanted == references) & ~beyond.any(1) & ~(third & ~(low & high)).any(1)
    return bool(fits.all())
