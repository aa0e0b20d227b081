"""Equal vertices made one, and faces that are there twice: on all cores, in memory that is a small part of the mesh's.

Rows are divided by a hash of what is in them: equal ones are in one part, each part is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building import meshopt
from rooftop.scene.building.ragged import starts_of
from rooftop.scene.building.workers import ALONE, Stage, Workers, chunks, shared

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]

PART = 1 << 17  # rows of a part, about


def equal_to(rows: npt.NDArray[Any], workers: Workers, before: Sequence[Stage] = ()) -> Numbers:
    """The first row that is equal to each (N,), by its bytes.

    Args:
        rows: (N, K), of 32 or 64 bits a number.
        workers: that look.
        before: stages that fill the rows, if these are in memory that workers share.
    """
    if not len(rows):
        return np.empty(0, np.uint32)
    rows = np.ascontiguousarray(rows)
    words = rows.view(np.uint32).reshape(len(rows), -1)
    found = np.arange(len(rows), dtype=np.uint32)
    bits = max(0, (len(rows) // PART).bit_length())
    pieces = chunks(len(rows))
    order = shared(len(rows) if bits else 0, np.uint32)  # of the rows of a chunk, part by part

    starts = shared((len(pieces), (1 << bits) + 1), np.int64)  # of the parts, in each chunk

    def divide(number: int) -> None:
        piece = pieces[number]
        parts = (_hashed(words[piece]) >> np.uint32(32 - bits)).astype(np.uint16)
        order[piece] = np.argsort(parts, kind="stable") + piece.start
        starts[number] = starts_of(np.bincount(parts, minlength=1 << bits)) + piece.start

    def look(part: int) -> tuple[Numbers, Numbers]:
        if bits:
            own = np.concatenate([order[each[part] : each[part + 1]] for each in starts])
            differing, number = meshopt.same_rows(np.ascontiguousarray(words[own]))
        else:
            own = found
            differing, number = meshopt.same_rows(words)
        if differing == len(own):
            return own[:0], own[:0]
        before = np.maximum.accumulate(np.concatenate([[-1], number.astype(np.int64)]))[:-1]
        is_first = number > before
        first = own[is_first]
        return own[~is_first], first[number[~is_first]]

    stages = [*before, (divide, range(len(pieces)) if bits else [])]
    for later, first in workers.run(look, range(1 << bits), "welding", before=stages):
        found[later] = first
    return found


def _hashed(words: Numbers) -> Numbers:
    """A number of 32 bits for each row, whose upper bits depend on all that is in it."""
    found = np.zeros(len(words), np.uint32)
    for column in words.T:
        found ^= column
        found *= np.uint32(0x9E3779B1)
        found ^= found >> np.uint32(15)
        found *= np.uint32(0x85EBCA77)
    return found


@dataclass(frozen=True)
class Welded:
    """A mesh whose vertices are each there once.

    Attributes:
        kept: (V,) the rows that its vertices are, ascending.
        places: (V,) equal for vertices at the same place, from 0 without gaps.
        faces: (F, 3), each once, those without area left out.
        flat: of the faces given, whether two corners are at one place.
        duplicate_faces, equal_vertices, unused_vertices: that were left out.
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
        places: (V, 3) of vertices.
        rows: (V, K) with all their attributes; None where they have none.
        faces: (F, 3).
        workers: that do it.
    """
    at = equal_to(places, workers)
    same = at if rows is None else equal_to(rows, workers)
    flat = shared(len(faces), np.bool_)
    corners = shared(faces.shape, np.uint32)
    known, used, drawn = (shared(len(places), np.bool_) for _ in range(3))

    def look(piece: slice) -> None:
        own = faces[piece]
        known[own] = True
        flat[piece] = repeats(at[own])
        corners[piece] = same[own]
        left = ~flat[piece]
        drawn[own[left]] = True
        used[corners[piece][left]] = True

    pieces = chunks(len(faces))
    workers.run(look, pieces, "welding")
    number = np.cumsum(used, dtype=np.uint32)
    number -= np.uint32(1)
    kept = np.flatnonzero(used).astype(np.uint32)
    if flat.any():
        left = corners[~flat]
        corners = shared(left.shape, np.uint32)
        corners[:] = left
        pieces = chunks(len(corners))

    first = _same_faces(corners, number, pieces, workers)
    once = first == np.arange(len(first), dtype=np.uint32)
    duplicates = len(once) - int(once.sum())
    if duplicates:
        corners = np.ascontiguousarray(corners[once])
    own = at[kept]
    there = np.zeros(len(places), bool)
    there[own] = True
    return Welded(
        kept=kept,
        places=(np.cumsum(there, dtype=np.uint32) - np.uint32(1))[own],
        faces=corners,
        flat=flat,
        duplicate_faces=duplicates,
        equal_vertices=int(drawn.sum()) - len(kept),
        unused_vertices=len(known) - int(known.sum()),
    )


def _same_faces(corners: Numbers, number: Numbers, pieces: list[slice], workers: Workers) -> Numbers:
    """Renumber the corners (F, 3), and find the first face that is the same as each."""
    turned = shared(corners.shape, np.uint32)

    def renumber(piece: slice) -> None:
        corners[piece] = number[corners[piece]]
        turned[piece] = lowest_first(corners[piece])

    return equal_to(turned, workers, [(renumber, pieces)])


def repeats(corners: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether two of a triangle's corners (T, 3) are equal."""
    a, b, c = corners.T
    return (a == b) | (b == c) | (c == a)


def lowest_first(faces: Numbers) -> Numbers:
    """Each face (F, 3) turned, not mirrored, so that its lowest corner comes first."""
    a, b, c = faces.T
    turned = np.where(((b < a) & (b < c))[:, None], faces[:, [1, 2, 0]], faces)
    return np.where(((c < a) & (c < b))[:, None], faces[:, [2, 0, 1]], turned)


def without_repetition(faces: Numbers) -> Numbers:
    """Each face (F, 3) once: those with the same corners the same way round are one."""
    first = equal_to(lowest_first(faces), ALONE)
    return faces[first == np.arange(len(first))]
