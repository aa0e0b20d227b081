"""Compute normals for a mesh that has none, and encode normals as two integers on an octahedron."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import numbered
from rooftop.scene.building.welding import equal_to
from rooftop.scene.building.workers import ALONE, Workers, chunks
from rooftop.scene.layouts import NORMAL_MIDDLE

Floats = npt.NDArray[np.float64]

FACES = 1 << 16  # faces per batch; fixed, so that sums do not depend on the number of workers


def unit_vectors(vectors: npt.NDArray[Any]) -> Floats:
    """Scale vectors (N, 3) to length 1; vectors of length 0 become (0, 0, 1)."""
    x, y, z = vectors.T.astype(np.float64)
    largest = np.maximum(np.maximum(np.abs(x), np.abs(y)), np.abs(z))
    none = largest == 0
    largest[none] = 1
    # scale first, so that squares neither underflow nor overflow
    x, y, z = x / largest, y / largest, np.where(none, 1.0, z / largest)
    lengths = np.sqrt(x * x + y * y + z * z)
    return np.column_stack([x / lengths, y / lengths, z / lengths])


def smooth_normals(points: Floats, faces: npt.NDArray[np.int64], workers: Workers = ALONE) -> Floats:
    """Compute a normal for each vertex (V, 3): the mean of its faces' normals, weighted by their angles at the vertex.

    Vertices at the same place share one normal, even along seams. (Thuermer and Wuethrich, Computing Vertex Normals
    from Polygonal Facets, 1998.)
    """
    place = equal_to(points + 0.0, workers)  # adding 0.0 turns -0.0 into 0.0

    def of_faces(rows: slice) -> tuple[npt.NDArray[np.uint32], Floats]:
        """For each vertex of these faces, sum the weighted normals of the faces that use it."""
        used, local = numbered(place[faces[rows]], len(points))
        corners = points[used][local]  # (F, 3, 3)
        edges = unit_vectors((np.roll(corners, -1, 1) - corners).reshape(-1, 3)).reshape(-1, 3, 3)
        across = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        has_area = (across[:, 0] != 0) | (across[:, 1] != 0) | (across[:, 2] != 0)
        across = unit_vectors(across) * has_area[:, None]  # a face without area has no normal
        sums = np.zeros((len(used), 3))
        for corner in range(3):
            cosines = -np.einsum("ij,ij->i", edges[:, corner], edges[:, corner - 1])
            angles = np.arccos(np.clip(cosines, -1, 1))
            for axis in range(3):
                sums[:, axis] += np.bincount(local[:, corner], angles * across[:, axis], len(used))
        return used, sums

    total = np.zeros(points.shape)
    for used, sums in workers.run(of_faces, chunks(len(faces), FACES), "computing normals"):
        total[used] += sums
    for rows in chunks(len(points)):
        total[rows] = unit_vectors(total[rows])
    return total if len(place) == 0 or (place == np.arange(len(place))).all() else total[place]


def octahedral(directions: Floats) -> npt.NDArray[np.uint16]:
    """Encode unit vectors (N, 3) as two integers (N, 2) from 0 to 2 * NORMAL_MIDDLE. (Cigolle et al., JCGT
    3(2), 2014.)"""
    flat = directions[:, :2] / np.abs(directions).sum(1, keepdims=True)
    folded = (1 - np.abs(flat[:, ::-1])) * np.where(flat < 0, -1.0, 1.0)
    flat = np.where(directions[:, 2:] < 0, folded, flat)
    return (np.rint(flat * NORMAL_MIDDLE) + NORMAL_MIDDLE).astype(np.uint16)


def from_octahedral(numbers: npt.NDArray[Any]) -> Floats:
    """Decode unit vectors (N, 3) from two integers each."""
    flat = (numbers.astype(np.float64) - NORMAL_MIDDLE) / NORMAL_MIDDLE
    z = 1 - np.abs(flat).sum(1)
    folded = (1 - np.abs(flat[:, ::-1])) * np.where(flat < 0, -1.0, 1.0)
    return unit_vectors(np.column_stack([np.where(z[:, None] < 0, folded, flat), z]))
