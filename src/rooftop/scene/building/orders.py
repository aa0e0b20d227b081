"""An order along which neighbours in space are mostly neighbours: Morton's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.workers import Workers, chunks, shared

BITS = 20  # of each axis


def morton_codes(points: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The place of each point (N, 3) on the curve through the cube around all of them."""
    return _codes(points, *_cube(points))


def _cube(points: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], float]:
    """The lowest corner of the cube around points, and how long it is."""
    low = np.array([column.min() for column in points.T], np.float64)
    high = np.array([column.max() for column in points.T], np.float64)
    return low, float((high - low).max()) or 1.0


def _codes(points: npt.NDArray[Any], low: npt.NDArray[np.float64], extent: float) -> npt.NDArray[np.uint64]:
    cells = np.minimum((points - low) * ((1 << BITS) / extent), (1 << BITS) - 1).astype(np.uint64)
    codes = np.zeros(len(points), np.uint64)
    for axis in range(3):
        codes |= _spread(cells[:, axis]) << np.uint64(axis)
    return codes


def order_along_curve(points: npt.NDArray[Any], of: npt.NDArray[Any], workers: Workers) -> npt.NDArray[np.int64]:
    """The order (N,) of things along the curve, each at one of the points; of equal ones, as they are.

    By the upper 30 bits of the codes, 16 at a time, which NumPy sorts by counting.
    """
    low, extent = _cube(points)
    codes = shared(len(points), np.uint32)
    lower, upper = shared(len(of), np.uint16), shared(len(of), np.uint16)

    def encode(rows: slice) -> None:
        codes[rows] = _codes(points[rows], low, extent) >> np.uint64(3 * BITS - 30)

    def take(rows: slice) -> None:
        own = codes[of[rows]]
        lower[rows], upper[rows] = own & 0xFFFF, own >> 16

    workers.run(take, chunks(len(of)), "sorting triangles", before=[(encode, chunks(len(points)))])
    order: npt.NDArray[np.int64] = np.argsort(lower, kind="stable")
    return order[np.argsort(upper[order], kind="stable")]


def _spread(cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each bit i of numbers below 2^21 moved to bit 3 i."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        cells = (cells | cells << np.uint64(shift)) & np.uint64(mask)
    return cells
