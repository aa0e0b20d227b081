"""Enclosing spheres of points or of spheres, rounded to float32 such that they still enclose everything.

The centre is rounded first. The radius is measured from the rounded centre in float64, and enlarged by the factor
SPARE. SPARE - 1 exceeds the relative rounding error of the radius (6e-8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import highest, lowest, starts_of

Spheres = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

SPARE = 1 + 1e-5


def around_points(points: npt.NDArray[Any], starts: Ints) -> Spheres:
    """Compute a sphere around each of N sets of points; return (N, 4): centre and radius. The centre is the middle of
    the box around the set.

    Args:
        points: (P, 3), set by set.
        starts: (N + 1,) start of each set in `points`, followed by P.
    """
    if len(starts) == 1:
        return np.empty((0, 4), np.float32)
    centres = ((lowest(points, starts) + highest(points, starts)) / 2).astype(np.float32)
    away = points - np.repeat(centres.astype(np.float64), np.diff(starts), axis=0)
    radii = np.sqrt(highest(np.einsum("ij,ij->i", away, away), starts))
    return _stored(centres, radii)


def around_spheres(spheres: Spheres, counts: Ints) -> Spheres:
    """Compute a sphere around each of N sets of spheres; return (N, 4).

    Args:
        spheres: spheres (centre and radius), set by set.
        counts: (N,) number of spheres of each set.
    """
    starts = starts_of(counts)
    wide = spheres.astype(np.float64)
    centres, radii = wide[:, :3], wide[:, 3:]
    middle = ((lowest(centres - radii, starts) + highest(centres + radii, starts)) / 2).astype(np.float32)
    away = centres - np.repeat(middle.astype(np.float64), counts, axis=0)
    reach = highest(np.sqrt(np.einsum("ij,ij->i", away, away)) + radii[:, 0], starts)
    return _stored(middle, reach)


def _stored(centres: npt.NDArray[np.float32], radii: npt.NDArray[np.float64]) -> Spheres:
    return np.column_stack([centres, (radii * SPARE).astype(np.float32)])
