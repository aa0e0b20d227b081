"""An order along which neighbours in space are mostly neighbours: Morton's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BITS = 20  # of each axis


def morton_codes(points: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The place of each point (N, 3) on the curve through the cube around all of them."""
    points = points.astype(np.float64)
    low = points.min(0)
    extent = float((points.max(0) - low).max()) or 1.0
    cells = np.minimum((points - low) * ((1 << BITS) / extent), (1 << BITS) - 1).astype(np.uint64)
    codes = np.zeros(len(points), np.uint64)
    for axis in range(3):
        codes |= _spread(cells[:, axis]) << np.uint64(axis)
    return codes


def order_along_curve(points: npt.NDArray[Any], of: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The order (N,) of things along the curve, each at one of the points; of equal ones, as they are.

    By the upper 30 bits of the codes, 16 at a time, which NumPy sorts by counting.
    """
    codes = (morton_codes(points) >> np.uint64(3 * BITS - 30)).astype(np.uint32)[of]
    order: npt.NDArray[np.int64] = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    upper = (codes >> 16).astype(np.uint16)
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
