"""Clusters as words: heads and streams, as in docs/scene-format.md, for many clusters at once.

Nothing here loops over triangles or vertices. The streams of all clusters are written by shifting every value to its
bit and adding up the values of each word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import highest, lowest, rows_of, starts_of, taken, within
from rooftop.scene.heads import bit_lengths

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Shorts = npt.NDArray[np.int16]  # numbers of a cluster's vertices, and their count

# For each set of new corners (bits 0, 1, 2): the corner with which a triangle begins so that its new corners come last.
_BEGIN = np.array([0, 1, 2, 2, 0, 1, 0, 0], np.int32)
_TURN = (_BEGIN[:, None] + np.arange(3, dtype=np.int32)) % 3
_NEW = np.array([0, 1, 1, 2, 1, 2, 2, 3], np.int16)
_IS_NEW = np.arange(3) >= 3 - np.arange(4)[:, None]  # for each number of new corners: which corners are new
# For each number of new corners, or EXPLICIT: which corners of a triangle are stored, and what is subtracted from them.
_EXPLICIT = 4
_STORED = np.array([[0, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)
_OFF = np.array([[1, 1, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 2, 2]], np.int16)
_REFERENCES = _STORED.sum(1)


@dataclass(frozen=True)
class Encoded:
    """Clusters in the form of pages, except for the parts that depend on their page.

    Attributes:
        heads: (C, CLUSTER_COLUMNS) uint32; spheres, errors, sources and stream positions are not filled in yet.
        streams: the words of all streams, cluster by cluster.
        counts: (C,) number of words of each.
    """

    heads: Words
    streams: Words
    counts: Ints

    def part(self, chosen: Ints) -> Encoded:
        """A selection of these clusters, in the given order."""
        words = taken(starts_of(self.counts)[chosen], self.counts[chosen])
        return Encoded(self.heads[chosen], self.streams[words], self.counts[chosen])


def encode(
    vertices: Vertices, triangles: Ints, members: Ints, corners: npt.NDArray[np.uint8], owned: npt.NDArray[np.uint32],
    levels: Ints,
) -> Encoded:  # fmt: skip
    """Encode clusters.

    Args:
        vertices: of the mesh.
        triangles: (C,) number of triangles of each cluster, at least 1.
        members: (C,) number of vertices.
        corners: (T, 3) of all triangles, cluster by cluster: which of the cluster's vertices.
        owned: the clusters' vertices as indices into `vertices`, cluster by cluster.
        levels: (C,) of each cluster.
    """
    clusters = len(triangles)
    starts, first = starts_of(triangles), starts_of(members)
    of_triangle = rows_of(triangles)

    # Number the vertices by first use; turn triangles so that new corners are last.
    flat = (corners + (of_triangle.astype(np.int32) * 256)[:, None]).ravel()
    place_of_corner = np.arange(len(flat), dtype=np.int32)
    seen = np.empty(clusters * 256, np.int32)
    seen[flat[::-1]] = place_of_corner[::-1]  # for equal keys the last assignment wins: the first use
    uses_first = (seen[flat] == place_of_corner).reshape(-1, 3).view(np.uint8)
    pattern = uses_first[:, 0] | uses_first[:, 1] << 1 | uses_first[:, 2] << 2
    keys = flat[_TURN[pattern] + place_of_corner[::3, None]]
    new = _NEW[pattern]
    sums = np.cumsum(new, dtype=np.int32)
    sums -= new
    before = (sums - np.repeat(sums[starts[:-1]], triangles)).astype(np.int16)  # vertices before this triangle
    fresh = keys[_IS_NEW[new]]
    at, in_cluster = rows_of(members), within(members)
    numbers = np.empty(clusters * 256, np.int16)
    numbers[fresh] = in_cluster
    kind, local = _kinds(new, numbers[keys], before)  # local: (T, 3)
    ordered = owned[first[at] + (fresh & 255)]

    # The sizes that each cluster needs.
    stored = _STORED[kind]
    references = (before[:, None] - _OFF[kind] - local)[stored]
    reference_counts = np.add.reduceat(_REFERENCES[kind], starts[:-1])
    reference_starts = starts_of(reference_counts)
    most = np.zeros(clusters, np.int64)
    some = reference_counts > 0
    if some.any():
        most[some] = np.maximum.reduceat(references, reference_starts[:-1][some])
    reference_bits = np.maximum(bit_lengths(most), 1)
    explicit = np.logical_or.reduceat(kind == _EXPLICIT, starts[:-1])

    heads = np.zeros((clusters, layouts.CLUSTER_COLUMNS), np.uint32)
    columns, base, extent = _boxed(vertices.grid, ordered, first, at)
    heads[:, layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3] = base.view(np.uint32)
    heads[:, layouts.CLUSTER_EXTENT : layouts.CLUSTER_EXTENT + 3] = extent
    heads[:, layouts.CLUSTER_COUNTS] = (triangles - 1) | (members - 1) << 8 | reference_bits << 16 | levels << 24
    heads[:, layouts.CLUSTER_REFERENCES] = reference_counts
    heads[:, layouts.CLUSTER_MASKS] = np.where(explicit, layouts.FANS_AND_EXPLICIT, layouts.FANS)
    position_bits = bit_lengths(extent)

    attribute_columns: list[Words] = []
    attribute_bits: list[Ints] = []
    if vertices.normals is not None:
        pair, base, extent = _boxed(vertices.normals, ordered, first, at)
        heads[:, layouts.CLUSTER_NORMAL_BASE : layouts.CLUSTER_NORMAL_BASE + 2] = base.view(np.uint32)
        heads[:, layouts.CLUSTER_NORMAL_EXTENT : layouts.CLUSTER_NORMAL_EXTENT + 2] = extent
        attribute_columns += pair
        attribute_bits += list(bit_lengths(extent).T)
    if vertices.uv is not None:
        uv, base, extent = _boxed(vertices.uv, ordered, first, at)
        heads[:, layouts.CLUSTER_UV_BASE : layouts.CLUSTER_UV_BASE + 2] = base.view(np.uint32)
        heads[:, layouts.CLUSTER_UV_EXTENT : layouts.CLUSTER_UV_EXTENT + 2] = extent
        attribute_columns += uv
        attribute_bits += list(bit_lengths(extent).T)
    if vertices.colors is not None:
        attribute_columns += list(vertices.colors[ordered].astype(np.uint32).T)
        attribute_bits += [np.full(clusters, layouts.COLOR_BITS)] * 3

    materials, mixed = None, np.zeros(clusters, bool)
    if vertices.materials is not None:
        materials = vertices.materials[ordered[first[of_triangle] + local[:, 0]]].astype(np.int64)
        least, greatest = lowest(materials, starts), highest(materials, starts)
        mixed = least != greatest
        heads[:, layouts.CLUSTER_MATERIAL] = np.where(mixed, layouts.MIXED, least).astype(np.int32).view(np.uint32)

    # The streams, one after the other.
    widths = np.zeros(clusters, np.int64)
    for bits in attribute_bits:
        widths += bits
    lengths = [
        layouts.NEW_WORDS + np.where(explicit, layouts.EXPLICIT_WORDS, 0),
        words_of(reference_bits * reference_counts),
        words_of(position_bits.sum(1) * members),
        words_of(widths * members),
        np.where(mixed, words_of(layouts.MATERIAL_BITS * triangles), 0),
    ]
    counts = np.sum(lengths, axis=0)
    ends = np.cumsum(np.concatenate([starts_of(counts)[None, :-1], lengths]), axis=0)  # (6, C): the start of each
    streams = np.zeros(int(counts.sum()) + 2, np.uint32)  # a value's upper half may reach into the next word

    place = within(triangles)
    _put_masks(streams, kind, of_triangle, place, ends[0], explicit)
    of_reference = rows_of(reference_counts)
    pack(streams, references, (ends[1] * 32)[of_reference] + reference_bits[of_reference] * within(reference_counts))
    _pack_columns(streams, columns, list(position_bits.T), ends[2], at, in_cluster)
    _pack_columns(streams, attribute_columns, attribute_bits, ends[3], at, in_cluster)
    if materials is not None and mixed.any():
        chosen = mixed[of_triangle]
        pack(streams, materials[chosen], ((ends[4] * 32)[of_triangle] + layouts.MATERIAL_BITS * place)[chosen])
    return Encoded(heads, streams[:-2], counts)


def _kinds(new: Shorts, local: Shorts, before: Shorts) -> tuple[Shorts, Shorts]:
    """The kind of each triangle (T,), which says how it gets its corners, and the corners (T, 3), rotated to match.

    Args:
        new: (T,) number of new corners. before: (T,) vertices of the cluster before the triangle.
        local: (T, 3) the corners, new ones last.
    """
    kind = new.copy()
    old = np.flatnonzero(new == 0)
    newest = local[old] == before[old, None] - 1
    turned = _TURN[newest[:, 1] + 2 * newest[:, 2]]
    local[old] = np.take_along_axis(local[old], turned, 1)
    goes_on = np.ones(len(new), bool)  # whether a later triangle may continue around the newest vertex
    goes_on[old] = newest.any(1)
    last = np.where(new > 0, local[:, 1], local[:, 2])
    fan = goes_on[old] & goes_on[old - 1] & (last[old - 1] == local[old, 1])
    kind[old[~fan]] = _EXPLICIT
    return kind, local


def words_of(bits: Ints) -> Ints:
    """Number of words for that many bits."""
    return (bits + 31) // 32


def pack(words: Words, values: npt.NDArray[np.integer], bits: Ints) -> None:
    """Write `values` (below 2^32) into `words`, each beginning at its bit; bits must not decrease."""
    if not len(values):
        return
    at = bits >> 5
    shifted = values.astype(np.uint64) << (bits & 31).astype(np.uint64)
    begin = np.concatenate([[0], np.flatnonzero(at[1:] != at[:-1]) + 1])
    sums = np.add.reduceat(shifted, begin)
    words[at[begin]] |= (sums & 0xFFFFFFFF).astype(np.uint32)
    words[at[begin] + 1] |= (sums >> np.uint64(32)).astype(np.uint32)


def _pack_columns(words: Words, columns: list[Words], bits: list[Ints], begin: Ints, at: Ints, place: Ints) -> None:
    """Interleaved values of each vertex: column after column, with the bits of the vertex's cluster."""
    if not columns:
        return
    width = np.sum(bits, axis=0)
    offset = begin * 32
    for column, bit in _joined(columns, bits, at):
        pack(words, column, offset[at] + width[at] * place)
        offset = offset + bit


def _joined(columns: list[Words], bits: list[Ints], at: Ints) -> Iterator[tuple[Words, Ints]]:
    """Combine consecutive columns into one, as long as 32 bits hold them in every cluster, so that fewer need
    packing."""
    column, width = columns[0], bits[0]
    for more, bit in zip(columns[1:], bits[1:], strict=True):
        if int((width + bit).max(initial=0)) <= 32:
            column = column | more << width.astype(np.uint32)[at]
            width = width + bit
        else:
            yield column, width
            column, width = more, bit
    yield column, width


def _put_masks(
    words: Words, kind: Shorts, of_triangle: Ints, place: Ints, begin: Ints, explicit: npt.NDArray[np.bool_]
) -> None:
    """Write the masks of each cluster: bits of its triangles' kinds and, if it has EXPLICIT triangles, which they
    are."""
    dense = np.zeros((len(begin), layouts.MAX_TRIANGLES), np.uint8)
    dense[of_triangle, place] = kind
    marked = dense == _EXPLICIT
    dense[marked] = 3
    for mask in range(2):
        packed = np.packbits(dense >> mask & 1, axis=1, bitorder="little").view(np.uint32)
        words[begin[:, None] + np.arange(4 * mask, 4 * mask + 4)] = packed
    third = np.packbits(marked[explicit], axis=1, bitorder="little").view(np.uint32)
    words[begin[explicit, None] + layouts.NEW_WORDS + np.arange(layouts.EXPLICIT_WORDS)] = third


def _boxed(
    values: npt.NDArray[np.integer], chosen: npt.NDArray[np.uint32], starts: Ints, at: Ints
) -> tuple[list[Words], npt.NDArray[np.int32], Words]:
    """The columns of the chosen rows, relative to the lowest value in the row's cluster; the lowest corners (C, N); the
    boxes' extents.
    """
    columns, bases, extents = [], [], []
    for axis in range(values.shape[1]):
        column = values[chosen, axis].astype(np.int32)
        base = lowest(column, starts)
        above = (column - base[at]).view(np.uint32)  # correct even beyond 2^31
        columns.append(above)
        bases.append(base)
        extents.append(highest(above, starts))
    return columns, np.stack(bases, 1), np.stack(extents, 1)
