"""Merge equal vertices and remove duplicate faces, on all cores.

Rows are divided into parts by a hash of their contents. So equal rows are in the same part, and each part is processed
separately, by one worker. A worker needs memory only for its part. The arrays that workers share take about as much
memory as the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building import meshopt
from rooftop.scene.building.ragged import starts_of
from rooftop.scene.building.workers import ALONE, Stage, Workers, chunks, shared

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]

PART = 1 << 17  # rows are divided by their hashes into parts: the approximate number of rows of a part
NO_CORNER = (1 << 32) - 1


def equal_to(rows: npt.NDArray[Any], workers: Workers) -> Numbers:
    """For each row, find the first row with equal bytes: indices (N,).

    Args:
        rows: (N, K) numbers of 32 or 64 bits.
        workers: the processes that share the work.
    """
    if not len(rows):
        return np.empty(0, np.uint32)
    found, stages = _looking_for_equals(rows)
    workers.run(*stages[-1], "welding", before=stages[:-1])
    return found


def _looking_for_equals(rows: npt.NDArray[Any]) -> tuple[Numbers, list[Stage]]:
    """Prepare `equal_to`: return its result array, in shared memory, and the stages that fill this array. Before these
    stages, the caller may run stages that fill `rows`."""
    rows = np.ascontiguousarray(rows)
    words = rows.view(np.uint32).reshape(len(rows), -1)
    found = shared(len(rows), np.uint32)
    bits = max(0, (len(rows) // PART).bit_length())
    pieces = chunks(len(rows))
    order = shared(len(rows) if bits else 0, np.uint32)  # rows of each chunk, ordered by part
    starts = shared((len(pieces), (1 << bits) + 1), np.int64)  # start of each part's rows in each chunk

    def divide(number: int) -> None:
        piece = pieces[number]
        parts = (_hashed(words[piece]) >> np.uint32(32 - bits)).astype(np.uint16)
        order[piece] = np.argsort(parts, kind="stable") + piece.start
        starts[number] = starts_of(np.bincount(parts, minlength=1 << bits)) + piece.start

    def look(part: int) -> None:
        if bits:
            own = np.concatenate([order[each[part] : each[part + 1]] for each in starts])
            differing, number = meshopt.same_rows(np.ascontiguousarray(words[own]))
        else:
            own = np.arange(len(rows), dtype=np.uint32)
            differing, number = meshopt.same_rows(words)
        if differing == len(own):
            found[own] = own
            return
        before = np.maximum.accumulate(np.concatenate([[-1], number.astype(np.int64)]))[:-1]
        found[own] = own[number > before][number]

    return found, [(divide, range(len(pieces)) if bits else []), (look, range(1 << bits))]


def _hashed(words: Numbers) -> Numbers:
    """Hash each row to a 32-bit number whose upper bits depend on the whole row."""
    found = np.zeros(len(words), np.uint32)
    for column in words.T:
        found ^= column
        found *= np.uint32(0x9E3779B1)
        found ^= found >> np.uint32(15)
        found *= np.uint32(0x85EBCA77)
    return found


@dataclass(frozen=True)
class Welded:
    """A welded mesh, in which all vertices differ.

    Attributes:
        kept: (V,) the input rows of the vertices that are kept, ascending.
        places: (V,) number of each vertex's place, from 0 without gaps; equal for vertices at the same place.
        faces: (F, 3) faces without duplicates, and without faces of no area.
        flat: for each input face, whether two of its corners are at the same place.
        duplicate_faces, equal_vertices, unused_vertices: numbers of duplicate faces, equal vertices and unused vertices
            that were removed.
    """

    kept: Numbers
    places: Numbers
    faces: Numbers
    flat: npt.NDArray[np.bool_]
    duplicate_faces: int
    equal_vertices: int
    unused_vertices: int


def weld(
    places: npt.NDArray[np.int32], rows: npt.NDArray[np.int32] | None, faces: npt.NDArray[np.int64], workers: Workers
) -> Welded:
    """Weld a mesh.

    Args:
        places: (V, 3) positions of vertices.
        rows: (V, K) position and all attributes of each vertex; None if the mesh has no attributes.
        faces: (F, 3).
        workers: the processes that share the work.
    """
    at, stages = _looking_for_equals(places)
    same = at
    if rows is not None:
        same, more = _looking_for_equals(rows)
        stages += more
    flat = shared(len(faces), np.bool_)
    corners, turned = shared(faces.shape, np.uint32), shared(faces.shape, np.uint32)
    # for each vertex, whether a face uses it (known), and whether a face with an area uses it after vertices are merged
    # (used) and before (drawn)
    known, used, drawn = (shared(len(places), np.bool_) for _ in range(3))
    number = shared(len(places), np.uint32)

    def look(piece: slice) -> None:
        own = faces[piece]
        known[own] = True
        flat[piece] = repeats(at[own])
        corners[piece] = same[own]
        left = ~flat[piece]
        drawn[own[left]] = True
        used[corners[piece][left]] = True

    def count(_: int) -> None:
        np.cumsum(used, dtype=np.uint32, out=number)
        number[:] -= np.uint32(1)

    def renumber(piece: slice) -> None:
        corners[piece] = number[corners[piece]]
        turned[piece] = lowest_first(corners[piece])
        turned[piece][flat[piece]] = NO_CORNER  # a row that equals no remaining face

    first, more = _looking_for_equals(turned)
    pieces = chunks(len(faces))
    stages += [(look, pieces), (count, [0]), (renumber, pieces), *more]
    workers.run(*stages[-1], "welding", before=stages[:-1])
    kept = np.flatnonzero(used).astype(np.uint32)
    once = first == np.arange(len(first), dtype=np.uint32)
    once &= ~flat
    left = int(once.sum())
    duplicates = len(once) - int(flat.sum()) - left
    if left < len(once):
        corners = np.ascontiguousarray(corners[once])
    own = at[kept] if len(kept) < len(at) else at
    there = np.zeros(len(places), bool)
    there[own] = True
    return Welded(
        kept=kept,
        places=own if there.all() else (np.cumsum(there, dtype=np.uint32) - np.uint32(1))[own],
        faces=corners,
        flat=flat,
        duplicate_faces=duplicates,
        equal_vertices=int(drawn.sum()) - len(kept),
        unused_vertices=len(known) - int(known.sum()),
    )


def repeats(corners: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether two of a triangle's corners (T, 3) are equal."""
    a, b, c = corners.T
    return (a == b) | (b == c) | (c == a)


def lowest_first(faces: Numbers) -> Numbers:
    """Rotate each face's corners (F, 3) so that the lowest comes first; the orientation stays."""
    a, b, c = faces.T
    turned = np.where(((b < a) & (b < c))[:, None], faces[:, [1, 2, 0]], faces)
    return np.where(((c < a) & (c < b))[:, None], faces[:, [2, 0, 1]], turned)


def without_repetition(faces: Numbers) -> Numbers:
    """Remove duplicate faces (F, 3): faces with the same corners in the same orientation."""
    first = equal_to(lowest_first(faces), ALONE)
    return faces[first == np.arange(len(first))]
