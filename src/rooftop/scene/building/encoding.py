"""Encode clusters as words: heads and streams, as in docs/scene-format.md, for many clusters at once.

One loop numbers the vertices of each cluster and measures its streams. A second loop writes the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.compiled import array, loop, output
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import highest, lowest, starts_of, taken
from rooftop.scene.heads import bit_lengths

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

# The kind of a triangle that stores all three corners. The kind of any other triangle is its number of new corners:
# those whose vertex no earlier triangle of the cluster has.
_EXPLICIT = 4
# For each kind of triangle and each of its three corners: whether the corner is stored as a reference (_STORED), and
# the offset of this reference (_OFF). A reference is n - offset - v, where v is the corner's vertex, and n counts the
# vertices of the cluster's earlier triangles.
_STORED = np.array([[0, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], np.bool_)
_OFF = np.array([[1, 1, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 2, 2]], np.int64)
# For each set of new corners (bits 0, 1, 2): the corner with which the triangle must begin so that new corners come
# last (_BEGIN), and the number of new corners (_NEW).
_BEGIN = np.array([0, 1, 2, 2, 0, 1, 0, 0])
_NEW = np.array([0, 1, 1, 2, 1, 2, 2, 3])
_GRID = 3  # number of columns of a vertex's position


@dataclass(frozen=True)
class Encoded:
    """Clusters encoded as pages store them, except for the fields that depend on the page.

    Attributes:
        heads: (C, CLUSTER_COLUMNS) uint32; spheres, errors, sources and stream positions are not filled in yet.
        streams: the words of all streams, cluster by cluster.
        counts: (C,) number of stream words of each cluster.
    """

    heads: Words
    streams: Words
    counts: Ints

    def part(self, chosen: Ints) -> Encoded:
        """Select the clusters with the indices `chosen`, in this order."""
        words = taken(starts_of(self.counts)[chosen], self.counts[chosen])
        return Encoded(self.heads[chosen], self.streams[words], self.counts[chosen])


def encode(
    vertices: Vertices, triangles: Ints, members: Ints, corners: npt.NDArray[np.uint8], owned: npt.NDArray[np.integer],
    levels: Ints,
) -> Encoded:  # fmt: skip
    """Encode clusters.

    Args:
        vertices: vertices of the mesh.
        triangles: (C,) number of triangles of each cluster, at least 1.
        members: (C,) number of vertices of each cluster.
        corners: (T, 3) corners of all triangles, cluster by cluster, as indices of the cluster's vertices.
        owned: the clusters' vertices as indices into `vertices`, cluster by cluster.
        levels: (C,) level of each cluster.
    """
    clusters = len(triangles)
    starts, first = starts_of(triangles), starts_of(members)
    local, kinds = np.empty((len(corners), 3), np.uint8), np.empty(len(corners), np.uint8)
    ordered = np.empty(len(owned), np.int64)
    reference_counts, most = np.empty(clusters, np.int64), np.empty(clusters, np.int64)
    explicit = np.empty(clusters, np.bool_)
    owned = np.ascontiguousarray(owned, np.int64)
    _number(corners, starts, first, owned, local, kinds, ordered, reference_counts, most, explicit)
    reference_bits = np.maximum(bit_lengths(most), 1)

    columns, boxed = _columns(vertices)
    values = columns[ordered]
    base, extent = lowest(values, first), highest(values, first)
    extent = (extent - base).view(np.uint32)  # as uint32, differences beyond 2^31 are correct too
    base[:, boxed:], extent[:, boxed:] = 0, (1 << layouts.COLOR_BITS) - 1
    bits = bit_lengths(extent)

    heads = np.zeros((clusters, layouts.CLUSTER_COLUMNS), np.uint32)
    heads[:, layouts.CLUSTER_COUNTS] = (triangles - 1) | (members - 1) << 8 | reference_bits << 16 | levels << 24
    heads[:, layouts.CLUSTER_REFERENCES] = reference_counts
    heads[:, layouts.CLUSTER_MASKS] = np.where(explicit, layouts.FANS_AND_EXPLICIT, layouts.FANS)
    at = 0
    for column, at_base, at_extent in (
        (vertices.grid, layouts.CLUSTER_BASE, layouts.CLUSTER_EXTENT),
        (vertices.normals, layouts.CLUSTER_NORMAL_BASE, layouts.CLUSTER_NORMAL_EXTENT),
        (vertices.uv, layouts.CLUSTER_UV_BASE, layouts.CLUSTER_UV_EXTENT),
    ):
        if column is not None:
            width = column.shape[1]
            heads[:, at_base : at_base + width] = base[:, at : at + width].view(np.uint32)
            heads[:, at_extent : at_extent + width] = extent[:, at : at + width]
            at += width

    materials, mixed = np.empty(0, np.uint16), np.zeros(clusters, np.bool_)
    if vertices.materials is not None:
        materials = vertices.materials[ordered[np.repeat(first[:-1], triangles) + local[:, 0]]]
        least, greatest = lowest(materials, starts).astype(np.int64), highest(materials, starts)
        mixed = least != greatest
        heads[:, layouts.CLUSTER_MATERIAL] = np.where(mixed, layouts.MIXED, least).astype(np.int32).view(np.uint32)

    lengths = [
        layouts.NEW_WORDS + np.where(explicit, layouts.EXPLICIT_WORDS, 0),
        words_of(reference_bits * reference_counts),
        words_of(bits[:, :_GRID].sum(1) * members),
        words_of(bits[:, _GRID:].sum(1) * members),
        np.where(mixed, words_of(layouts.MATERIAL_BITS * triangles), 0),
    ]
    counts = np.sum(lengths, axis=0)
    begin = np.cumsum([starts_of(counts)[:-1], *lengths[:-1]], axis=0)  # (5, C): the start of each stream
    streams = np.zeros(int(counts.sum()), np.uint32)
    _write(streams, begin, starts, first, local, kinds, reference_bits, values, base, bits, materials, mixed)
    return Encoded(heads, streams, counts)


def _columns(vertices: Vertices) -> tuple[npt.NDArray[np.int32], int]:
    """Return all data of each vertex as integer columns (V, K): position, normal, uv and colour. Also return the number
    of columns before the colours."""
    columns: list[npt.NDArray[Any] | None] = [vertices.grid, vertices.normals, vertices.uv]
    present = [each.astype(np.int32, copy=False) for each in columns if each is not None]
    boxed = sum(each.shape[1] for each in present)
    if vertices.colors is not None:
        present.append(vertices.colors.astype(np.int32))
    return np.concatenate(present, axis=1), boxed


@loop(
    array("uint8", 2), array("int64"), array("int64"), array("int64"),
    output("uint8", 2), output("uint8"), output("int64"), output("int64"), output("int64"), output("bool_"),
)  # fmt: skip
def _number(corners, starts, first, owned, local, kinds, ordered, references, most, explicit):  # type: ignore[no-untyped-def]
    """Number the vertices of each cluster by their first use, rotate the corners of triangles so that new corners come
    last, and find the kind of each triangle (see `_EXPLICIT`).

    Args:
        corners: (T, 3), each corner's vertex, as an index among the cluster's vertices in `owned`.
        starts: (C + 1,), where each cluster's triangles begin.
        first: (C + 1,), where each cluster's vertices begin in `owned`.
        owned: (N,) the clusters' vertices, as indices of the mesh's vertices.
        local: output (T, 3), corners in the new numbers.
        kinds: output (T,), the kind of each triangle.
        ordered: output (N,), vertices in the new order.
        references: output (C,), number of stored corners (see `_STORED`).
        most: output (C,), the largest stored reference.
        explicit: output (C,), whether the cluster has triangles that store all their corners.
    """
    number = np.empty(256, np.int64)
    for cluster in range(len(starts) - 1):
        number[:] = -1
        begin = first[cluster]
        count, stored, largest, has_explicit = 0, 0, 0, False
        # whether the next triangle may continue a fan around the newest vertex, and the other vertex of the edge that
        # it must then share with the fan
        goes_on, last = False, np.int64(-1)
        for triangle in range(starts[cluster], starts[cluster + 1]):
            a, b, c = corners[triangle, 0], corners[triangle, 1], corners[triangle, 2]
            pattern = (number[a] < 0) | (number[b] < 0) << 1 | (number[c] < 0) << 2
            if _BEGIN[pattern] == 1:
                a, b, c = b, c, a
            elif _BEGIN[pattern] == 2:
                a, b, c = c, a, b
            new = _NEW[pattern]
            if new == 3:
                number[a] = count
                ordered[begin + count] = owned[begin + a]
            if new >= 2:
                number[b] = count + new - 2
                ordered[begin + count + new - 2] = owned[begin + b]
            if new >= 1:
                number[c] = count + new - 1
                ordered[begin + count + new - 1] = owned[begin + c]
            x, y, z = number[a], number[b], number[c]
            kind = new
            if new == 0:
                if y == count - 1:
                    x, y, z = y, z, x
                elif z == count - 1:
                    x, y, z = z, x, y
                if not (x == count - 1 and goes_on and last == y):
                    kind = _EXPLICIT
                    has_explicit = True
                goes_on, last = x == count - 1, z
            else:
                goes_on, last = True, y
            local[triangle, 0], local[triangle, 1], local[triangle, 2] = x, y, z
            for corner, value in enumerate((x, y, z)):
                if _STORED[kind, corner]:
                    stored += 1
                    largest = max(largest, count - _OFF[kind, corner] - value)
            kinds[triangle] = kind
            count += new
        references[cluster], most[cluster], explicit[cluster] = stored, largest, has_explicit


@loop(
    output("uint32"), array("int64", 2), array("int64"), array("int64"), array("uint8", 2), array("uint8"),
    array("int64"), array("int32", 2), array("int32", 2), array("int64", 2), array("uint16"), array("bool_"),
)  # fmt: skip
def _write(words, begin, starts, first, local, kinds, reference_bits, values, base, bits, materials, mixed):  # type: ignore[no-untyped-def]
    """Write the streams of each cluster.

    Args:
        words: output, initially zeros.
        begin: (5, C) the word at which each stream begins.
        starts: where each cluster's triangles begin.
        first: where each cluster's vertices begin.
        local, kinds: from `_number`.
        reference_bits: (C,) number of bits of a reference.
        values: (N, K) columns of the vertices.
        base, bits: (C, K), the number subtracted from a value, and the number of bits of the difference.
        materials: (T,), for the clusters that are `mixed` (C,).
    """
    for cluster in range(len(starts) - 1):
        masks = begin[0, cluster]
        word = begin[1, cluster]
        width = reference_bits[cluster]
        held = np.int64(0)  # bits that are not written to words yet
        filled = 0  # number of bits in `held`
        count = np.int64(0)
        for triangle in range(starts[cluster], starts[cluster + 1]):
            kind = np.int64(kinds[triangle])
            place = triangle - starts[cluster]
            mask = 3 if kind == _EXPLICIT else kind
            at, bit = masks + (place >> 5), place & 31
            words[at] |= np.uint32((mask & 1) << bit)
            words[at + 4] |= np.uint32((mask >> 1) << bit)
            if kind == _EXPLICIT:
                words[at + layouts.NEW_WORDS] |= np.uint32(1 << bit)
            for corner in range(3):
                if _STORED[kind, corner]:
                    held |= (count - _OFF[kind, corner] - local[triangle, corner]) << filled
                    filled += width
                    if filled >= 32:
                        words[word] = np.uint32(held)
                        word, held, filled = word + 1, held >> 32, filled - 32
            if kind != _EXPLICIT:
                count += kind
        if filled:
            words[word] = np.uint32(held)
        for part in range(2):
            word = begin[2 + part, cluster]
            held = np.int64(0)
            filled = 0
            columns = range(_GRID) if part == 0 else range(_GRID, values.shape[1])
            for vertex in range(first[cluster], first[cluster + 1]):
                for column in columns:
                    held |= (np.int64(values[vertex, column]) - base[cluster, column]) << filled
                    filled += bits[cluster, column]
                    if filled >= 32:
                        words[word] = np.uint32(held & 0xFFFFFFFF)
                        word, held, filled = word + 1, held >> 32 & 0xFFFFFFFF, filled - 32
            if filled:
                words[word] = np.uint32(held)
        if mixed[cluster]:
            for place in range(starts[cluster + 1] - starts[cluster]):
                shift = layouts.MATERIAL_BITS * (place & 1)
                words[begin[4, cluster] + (place >> 1)] |= np.uint32(materials[starts[cluster] + place]) << shift


def words_of(bits: Ints) -> Ints:
    """Number of 32-bit words needed for `bits` bits."""
    return (bits + 31) // 32
