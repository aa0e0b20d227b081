"""Convert the heads of clusters between the words that pages store and rows of CLUSTER_COLUMNS words, which have the
same columns for all versions of the file. A head is the record of a cluster: its counts, its box, its error, and where
its streams of vertices and triangles begin.

Version 4 packs heads: heads have no words about replaced groups in a page whose clusters are all of the finest level,
no words for normals in a mesh without normals, and no words for texture coordinates in a mesh without them.
docs/scene-format.md and `layouts.py` describe the fields of a head.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts

Words = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]

_LENGTH_BITS = layouts.BOX_BITS - layouts.MANTISSA_BITS


def head_words(replaces: bool, normals: bool, uv: bool) -> int:
    """Number of words of a short head (from version 4 on) with these optional fields."""
    return (
        layouts.HEAD_WORDS + layouts.REPLACED_WORDS * replaces + layouts.NORMAL_WORDS * normals + layouts.UV_WORDS * uv
    )


def bit_lengths(values: npt.NDArray[np.integer]) -> Ints:
    """The number of significant bits of each integer from 0 to 2^32 - 1. The integer 0 has 0 bits."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def packed(rows: Words, replaces: bool, normals: bool, uv: bool) -> Words:
    """Pack rows (C, CLUSTER_COLUMNS) to short heads (C, head_words)."""
    counts = rows[:, layouts.CLUSTER_COUNTS]
    box = np.zeros(len(rows), np.int64)
    for axis in range(3):
        box |= _rounded_up(rows[:, layouts.CLUSTER_EXTENT + axis].astype(np.int64)) << layouts.BOX_BITS * axis
    box |= ((counts >> 16 & 255).astype(np.int64) - 1) << layouts.HEAD_REFERENCE_AT
    has_explicit = rows[:, layouts.CLUSTER_MASKS] == layouts.FANS_AND_EXPLICIT
    box |= has_explicit.astype(np.int64) << layouts.HEAD_EXPLICIT_AT
    mixed = rows[:, layouts.CLUSTER_MATERIAL].view(np.int32) == layouts.MIXED
    material = np.where(mixed, 0, rows[:, layouts.CLUSTER_MATERIAL])

    heads = np.zeros((len(rows), head_words(replaces, normals, uv)), np.uint32)
    heads[:, layouts.HEAD_BASE : layouts.HEAD_BASE + 3] = rows[:, layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3]
    heads[:, layouts.HEAD_COUNTS] = (
        (counts & 127) | (counts >> 8 & 255) << 7 | counts >> 24 << 15 | rows[:, layouts.CLUSTER_REFERENCES] << 23
    )
    heads[:, layouts.HEAD_BOX] = box
    heads[:, layouts.HEAD_STREAMS] = rows[:, layouts.CLUSTER_STREAMS] | mixed.astype(np.uint32) << 15 | material << 16
    at = layouts.HEAD_WORDS
    if replaces:
        heads[:, layouts.HEAD_SPHERE : layouts.HEAD_SPHERE + 5] = rows[
            :, layouts.CLUSTER_SPHERE : layouts.CLUSTER_SPHERE + 5
        ]
        heads[:, layouts.HEAD_SOURCE] = rows[:, layouts.CLUSTER_SOURCE]
        at += layouts.REPLACED_WORDS
    if normals:
        base, widths = rows[:, layouts.CLUSTER_NORMAL_BASE :], bit_lengths(rows[:, layouts.CLUSTER_NORMAL_EXTENT :])
        heads[:, at] = (
            base[:, 0]
            | base[:, 1] << layouts.NORMAL_BITS
            | widths[:, 0] << 2 * layouts.NORMAL_BITS
            | widths[:, 1] << 2 * layouts.NORMAL_BITS + layouts.NORMAL_WIDTH_BITS
        )
        at += layouts.NORMAL_WORDS
    if uv:
        widths = bit_lengths(rows[:, layouts.CLUSTER_UV_EXTENT : layouts.CLUSTER_UV_EXTENT + 2])
        heads[:, at : at + 2] = rows[:, layouts.CLUSTER_UV_BASE : layouts.CLUSTER_UV_BASE + 2]
        heads[:, at + 2] = widths[:, 0] | widths[:, 1] << layouts.UV_WIDTH_BITS
    return heads


def unpacked(heads: Words, replaces: bool, normals: bool, uv: bool) -> Words:
    """Unpack short heads to rows (C, CLUSTER_COLUMNS). A short head has only the leading bits of an extent. The
    unpacked extent is the largest with these bits, so it is at least the original extent.
    """
    rows = np.zeros((len(heads), layouts.CLUSTER_COLUMNS), np.uint32)
    counts, box, streams = (
        heads[:, word].astype(np.int64) for word in (layouts.HEAD_COUNTS, layouts.HEAD_BOX, layouts.HEAD_STREAMS)
    )
    rows[:, layouts.CLUSTER_BASE : layouts.CLUSTER_BASE + 3] = heads[:, layouts.HEAD_BASE : layouts.HEAD_BASE + 3]
    for axis in range(3):
        rows[:, layouts.CLUSTER_EXTENT + axis] = _extents(box >> layouts.BOX_BITS * axis)
    reference_bits = (box >> layouts.HEAD_REFERENCE_AT & 7) + 1
    rows[:, layouts.CLUSTER_COUNTS] = (
        (counts & 127) | (counts >> 7 & 255) << 8 | reference_bits << 16 | (counts >> 15 & 255) << 24
    )
    rows[:, layouts.CLUSTER_REFERENCES] = counts >> 23
    rows[:, layouts.CLUSTER_MASKS] = layouts.FANS + (box >> layouts.HEAD_EXPLICIT_AT & 1)
    rows[:, layouts.CLUSTER_STREAMS] = streams & 0x7FFF
    rows[:, layouts.CLUSTER_MATERIAL] = np.where(streams >> 15 & 1, layouts.MIXED & 0xFFFFFFFF, streams >> 16)
    at = layouts.HEAD_WORDS
    if replaces:
        rows[:, layouts.CLUSTER_SPHERE : layouts.CLUSTER_SPHERE + 5] = heads[
            :, layouts.HEAD_SPHERE : layouts.HEAD_SPHERE + 5
        ]
        rows[:, layouts.CLUSTER_SOURCE] = heads[:, layouts.HEAD_SOURCE]
        at += layouts.REPLACED_WORDS
    else:
        rows.view(np.int32)[:, layouts.CLUSTER_SOURCE] = -1
    if normals:
        word = heads[:, at].astype(np.int64)
        for axis in range(2):
            base = word >> layouts.NORMAL_BITS * axis & (1 << layouts.NORMAL_BITS) - 1
            width = word >> 2 * layouts.NORMAL_BITS + layouts.NORMAL_WIDTH_BITS * axis
            width &= (1 << layouts.NORMAL_WIDTH_BITS) - 1
            rows[:, layouts.CLUSTER_NORMAL_BASE + axis] = base
            rows[:, layouts.CLUSTER_NORMAL_EXTENT + axis] = (1 << width) - 1
        at += layouts.NORMAL_WORDS
    if uv:
        rows[:, layouts.CLUSTER_UV_BASE : layouts.CLUSTER_UV_BASE + 2] = heads[:, at : at + 2]
        widths = heads[:, at + 2].astype(np.int64)
        for axis in range(2):
            width = widths >> layouts.UV_WIDTH_BITS * axis & (1 << layouts.UV_WIDTH_BITS) - 1
            rows[:, layouts.CLUSTER_UV_EXTENT + axis] = (1 << width) - 1
    return rows


def unpacked_old(heads: Words, normals: bool) -> Words:
    """Unpack heads (C, CLUSTER_WORDS) from before version 4 to rows (C, CLUSTER_COLUMNS). The number of references is
    computed from the other fields."""
    rows = np.zeros((len(heads), layouts.CLUSTER_COLUMNS), np.uint32)
    rows[:, : layouts.CLUSTER_WORDS] = heads
    counts = heads[:, layouts.CLUSTER_COUNTS].astype(np.int64)
    references = 3 * ((counts & 255) + 1) - ((counts >> 8 & 255) + 1)
    rows[:, layouts.CLUSTER_REFERENCES] = np.maximum(references, 0)
    rows[:, layouts.CLUSTER_MASKS] = layouts.SEPARATE
    if normals:
        rows[:, layouts.CLUSTER_NORMAL_EXTENT : layouts.CLUSTER_NORMAL_EXTENT + 2] = (1 << layouts.NORMAL_BITS) - 1
    return rows


def _rounded_up(extents: Ints) -> Ints:
    """Encode extents below 2^31, each as its number of bits and the mantissa bits after its leading bit. Decoded
    extents are rounded up."""
    lengths = bit_lengths(extents)
    leading = 1 << np.maximum(lengths - 1, 0)
    below = np.maximum(lengths - 1 - layouts.MANTISSA_BITS, 0)
    return lengths | np.where(lengths > 0, (extents - leading) >> below, 0) << _LENGTH_BITS


def _extents(words: Ints) -> Ints:
    """Decode words that `_rounded_up` encoded: return the largest extent that has each word. Bits above BOX_BITS are
    ignored."""
    lengths = words & (1 << _LENGTH_BITS) - 1
    mantissas = words >> _LENGTH_BITS & (1 << layouts.MANTISSA_BITS) - 1
    below = np.maximum(lengths - 1 - layouts.MANTISSA_BITS, 0)
    extents = (1 << np.maximum(lengths - 1, 0)) + ((mantissas + 1) << below) - 1
    return np.minimum(np.where(lengths > 0, extents, 0), (1 << lengths) - 1)  # a damaged page may contain anything
