"""Morton order: points that are close in space are mostly close in this order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import starts_of
from rooftop.scene.building.workers import CHUNK, Stage, chunks, give_back, shared

BITS = 20  # bits of a Morton code for each axis
HALF = 15  # `ordering` sorts twice; each sort uses this many bits of the key
PARTS = 1 << HALF
MOST_PIECES = 64  # maximum number of pieces into which the list of faces is cut


def morton_codes(points: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Compute the position of each point (N, 3) on Morton's curve through the cube around all points."""
    return _codes(points, *_cube(points))


def _cube(points: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], float]:
    """The lowest corner and the edge length of the cube around points."""
    low = np.array([column.min() for column in points.T], np.float64)
    high = np.array([column.max() for column in points.T], np.float64)
    return low, float((high - low).max()) or 1.0


def _codes(points: npt.NDArray[Any], low: npt.NDArray[np.float64], extent: float) -> npt.NDArray[np.uint64]:
    cells = np.minimum((points - low) * ((1 << BITS) / extent), (1 << BITS) - 1).astype(np.uint64)
    codes = np.zeros(len(points), np.uint64)
    for axis in range(3):
        codes |= _spread(cells[:, axis]) << np.uint64(axis)
    return codes


def ordering(points: npt.NDArray[Any], faces: npt.NDArray[np.uint32], ordered: npt.NDArray[np.uint32]) -> list[Stage]:
    """Return the stages that sort faces (F, 3) along Morton's curve into the shared array `ordered`, by the points of
    their first corners.

    The sort key is the upper 30 bits of the codes. The upper half of these bits divides faces into parts; each part is
    sorted by the lower half. Both halves have 15 bits, which NumPy sorts by counting. Equal codes keep their order.
    """
    low, extent = _cube(points)
    size = max(CHUNK, -(-len(faces) // MOST_PIECES))
    pieces = chunks(len(faces), size)
    codes = shared(len(points), np.uint32)
    rows = shared(len(faces), np.uint32)  # indices of faces, sorted by the upper half of the key
    counts = shared((len(pieces), PARTS), np.uint32)  # for each piece of `faces`, number of faces in each part

    def encode(piece: slice) -> None:
        codes[piece] = _codes(points[piece], low, extent) >> np.uint64(3 * BITS - 30)

    def count(number: int) -> None:
        counts[number] = np.bincount(codes[faces[pieces[number], 0]] >> HALF, minlength=PARTS)

    def divide(number: int) -> None:
        piece = pieces[number]
        parts = (codes[faces[piece, 0]] >> HALF).astype(np.uint16)
        order = np.argsort(parts, kind="stable")
        first = starts_of(counts.sum(0))[:-1] + counts[:number].sum(0, dtype=np.int64)
        first -= starts_of(counts[number])[:-1]
        rows[first[parts[order]] + np.arange(len(order))] = order + piece.start

    def sort(piece: slice) -> None:
        """Sort, by Morton code, the faces of each part (range of codes) whose rows begin in this slice of all rows."""
        starts = starts_of(counts.sum(0))
        begin, end = starts[np.searchsorted(starts, [piece.start, piece.stop])]
        own = rows[begin:end]
        own_codes = codes[faces[own, 0]]
        order = np.argsort((own_codes & PARTS - 1).astype(np.uint16), kind="stable")
        order = order[np.argsort((own_codes >> HALF).astype(np.uint16)[order], kind="stable")]
        ordered[begin:end] = faces[own[order]]

    numbers = range(len(pieces))
    return [
        (encode, chunks(len(points))),
        (count, numbers),
        (divide, numbers),
        (sort, pieces),
        (give_back, [codes, rows, counts]),
    ]


def _spread(cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Move each bit i of numbers below 2^21 to bit 3 i."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        cells = (cells | cells << np.uint64(shift)) & np.uint64(mask)
    return cells
