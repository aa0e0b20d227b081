"""The work of the python ladder: the squared distance of each point to the nearest of some centres.

This computation is the inner loop of k-means, of reducing a picture to a palette, and of finding the nearest station.
Points and centres have integer coordinates from 0 to 255, so float32 holds every squared distance exactly. Every order
of the sums, with or without fused multiply-add, gives the same bits. This file needs neither torch nor Numba, because
worker processes import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FLOPS_PER_PAIR = 9  # for each pair: three differences, three products, two sums, one minimum
INSTRUCTIONS_PER_PAIR = 7  # with fused multiply-adds: three differences, a product, two multiply-adds, a minimum
CENTRES = 64
LARGEST = 255

Array = np.ndarray[Any, np.dtype[Any]]
Point = tuple[float, float, float]


def made_points(count: int) -> tuple[Array, Array]:
    """Draw random points (3, count) and centres (CENTRES, 3) in float32. Each call with the same count draws the same
    numbers.
    """
    drawn = np.random.default_rng(0)
    points = drawn.integers(0, LARGEST + 1, (3, count)).astype(np.float32)
    return points, drawn.integers(0, LARGEST + 1, (CENTRES, 3)).astype(np.float32)


def in_python(points: Sequence[Point], centres: Sequence[Point]) -> list[float]:
    """The straightforward version in plain Python."""
    nearest = []
    for x, y, z in points:
        best = float("inf")
        for cx, cy, cz in centres:
            dx, dy, dz = x - cx, y - cy, z - cz
            distance = dx * dx + dy * dy + dz * dz
            if distance < best:
                best = distance
        nearest.append(best)
    return nearest


def broadcast(points: Array, centres: Array) -> Array:
    """One NumPy expression, which stores several arrays of all pairs: points (3, n), centres (k, 3) -> (n,)."""
    differences = points.T[:, None, :] - centres[None, :, :]  # (n, k, 3)
    smallest: Array = (differences**2).sum(axis=2).min(axis=1)
    return smallest


BLOCK = 4096  # points of a block, so that its five arrays (80 KB) stay in a core's L2


def in_place(points: Array, centres: Array) -> Array:
    """Compare a block of points with one centre at a time, and reuse arrays: points (3, n), centres (k, 3) -> (n,)."""
    nearest = np.empty(points.shape[1], np.float32)
    differences, distances = np.empty((2, BLOCK), np.float32)
    for first in range(0, nearest.size, BLOCK):
        best = nearest[first : first + BLOCK]
        best.fill(np.inf)
        difference, distance = differences[: best.size], distances[: best.size]
        for centre in centres:
            for axis in range(3):
                np.subtract(points[axis, first : first + BLOCK], centre[axis], out=difference)
                if axis == 0:
                    np.multiply(difference, difference, out=distance)
                else:
                    np.multiply(difference, difference, out=difference)
                    np.add(distance, difference, out=distance)
            np.minimum(best, distance, out=best)
    return nearest
