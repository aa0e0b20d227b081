"""The loops of the python ladder that Numba compiles. Importing this file imports Numba.

Each loop releases the GIL. Numba caches the compiled loops on disk, so that worker processes load what their parent has
compiled.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rooftop.ladder.nearest import Array
from rooftop.launch.numba_loops import kept_loop

BLOCK = 1024  # points of a block, so that its four arrays (16 KB) stay in a core's L1


@kept_loop
def as_written(points: Any, centres: Any, nearest: Any, first: Any, last: Any) -> None:
    """Run the loops of the plain Python rung, in the same order: points (3, n), centres (k, 3), nearest (n,)."""
    for i in range(first, last):
        x, y, z = points[0, i], points[1, i], points[2, i]
        best = np.float32(np.inf)
        for j in range(centres.shape[0]):
            dx, dy, dz = x - centres[j, 0], y - centres[j, 1], z - centres[j, 2]
            distance = dx * dx + dy * dy + dz * dz
            if distance < best:
                best = distance
        nearest[i] = best


@kept_loop
def for_vectors(points: Any, centres: Any, nearest: Any, first: Any, last: Any) -> None:
    """The inner loop runs over points, which are neighbours in memory, so the compiler uses vector instructions.

    The loop takes four centres at a time, so that each loaded point serves four distances. The number of centres must
    be a multiple of four.
    """
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        xs, ys, zs, best = points[0, begin:end], points[1, begin:end], points[2, begin:end], nearest[begin:end]
        for i in range(end - begin):
            best[i] = np.float32(np.inf)
        for j in range(0, centres.shape[0], 4):
            ax, ay, az = centres[j, 0], centres[j, 1], centres[j, 2]
            bx, by, bz = centres[j + 1, 0], centres[j + 1, 1], centres[j + 1, 2]
            cx, cy, cz = centres[j + 2, 0], centres[j + 2, 1], centres[j + 2, 2]
            dx, dy, dz = centres[j + 3, 0], centres[j + 3, 1], centres[j + 3, 2]
            for i in range(end - begin):
                x, y, z = xs[i], ys[i], zs[i]
                a = (x - ax) * (x - ax) + (y - ay) * (y - ay) + (z - az) * (z - az)
                b = (x - bx) * (x - bx) + (y - by) * (y - by) + (z - bz) * (z - bz)
                c = (x - cx) * (x - cx) + (y - cy) * (y - cy) + (z - cz) * (z - cz)
                d = (x - dx) * (x - dx) + (y - dy) * (y - dy) + (z - dz) * (z - dz)
                ab = a if a < b else b
                cd = c if c < d else d
                least = ab if ab < cd else cd
                best[i] = least if least < best[i] else best[i]


def of_part(points: Array, centres: Array) -> Array:
    """The squared distance of each point (3, n) from the nearest of the centres (k, 3), computed by `for_vectors`.
    Returns (n,).
    """
    nearest = np.empty(points.shape[1], np.float32)
    for_vectors(points, centres, nearest, 0, nearest.size)
    return nearest


def parallel_loop() -> Any:
    """A function that runs `for_vectors(points, centres, nearest)` by blocks on all of Numba's threads. Numba compiles
    the function at its first call.
    """
    inner = for_vectors

    @numba.njit(parallel=True, nogil=True)  # type: ignore[untyped-decorator]
    def in_parallel(points: Any, centres: Any, nearest: Any) -> None:
        blocks = (nearest.size + BLOCK - 1) // BLOCK
        for block in numba.prange(blocks):
            inner(points, centres, nearest, block * BLOCK, min((block + 1) * BLOCK, nearest.size))

    return in_parallel
