"""Cut pieces of a mesh into clusters of at most 128 triangles, and encode the clusters.

A piece is a run of consecutive triangles of the given mesh or of a simplified group. Clusters grow triangle by triangle
(see `growing`), and never extend from one piece into another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.encoding import Encoded, encode
from rooftop.scene.building.growing import grown
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import numbered_by_row, starts_of, taken
from rooftop.scene.building.spheres import around_points
from rooftop.scene.building.sweeps import swept

Ints = npt.NDArray[np.int64]
Corners = npt.NDArray[np.uint32]

LEAST_TRIANGLES = 96  # with this many triangles, a cluster may end before it is full
# A cluster that no free triangle touches ends early if the nearest free triangle is farther from its centre than this
# many radii. The radius is an estimate for a full cluster of triangles of the piece's mean area. Free triangles are in
# no cluster yet.
SPLIT_FACTOR = 2.0
# Clusters end early only in pieces (runs of the triangles to cut) with more triangles than this. Smaller pieces must
# get as few clusters as possible.
SPLIT_FROM = 2 * layouts.MAX_TRIANGLES


@dataclass(frozen=True)
class Clusters:
    """Clusters of triangles, as `cut` returns them.

    Attributes:
        corners: (T, 3) corners of all triangles, cluster by cluster, as indices of the mesh's vertices.
        triangles: (C,) number of triangles of each cluster.
        pieces: (C,) the piece of each cluster, in non-decreasing order.
        spheres: (C, 4) float32, around each cluster's vertices, in object units.
        encoded: the clusters as words of the file.
    """

    corners: Corners
    triangles: Ints
    pieces: Ints
    spheres: npt.NDArray[np.float32]
    encoded: Encoded

    def part(self, chosen: Ints) -> Clusters:
        """Only the clusters with the indices `chosen`, which are in ascending order."""
        if len(chosen) == len(self.triangles):
            return self
        rows = taken(starts_of(self.triangles)[chosen], self.triangles[chosen])
        return Clusters(
            self.corners[rows], self.triangles[chosen], self.pieces[chosen], self.spheres[chosen],
            self.encoded.part(chosen),
        )  # fmt: skip


@dataclass(frozen=True)
class Local:
    """Pieces whose vertices are numbered within each piece.

    Attributes:
        vertices: the mesh's vertices that each piece uses, piece by piece.
        starts: (P + 1,) where each piece's vertices start.
        corners: (T, 3) uint32, as indices of the piece's vertices.
    """

    vertices: Ints
    starts: Ints
    corners: Corners


def localized(corners: Corners, counts: Ints) -> Local:
    """Number the vertices of each piece from 0.

    Args:
        corners: (T, 3) corners of all pieces, piece by piece, as indices of the mesh's vertices.
        counts: (P,) number of triangles of each piece.
    """
    vertices, starts, local = numbered_by_row(corners, 3 * starts_of(counts), int(corners.max(initial=0)) + 1)
    return Local(vertices.astype(np.int64), starts, local)


def local_points(vertices: Vertices, local: Local) -> npt.NDArray[np.float32]:
    """Compute the positions of the vertices of pieces of a mesh, in steps of the grid. The positions are exact, and
    relative to the first vertex of each piece."""
    grid = vertices.grid[local.vertices]
    counts = np.diff(local.starts)
    first = grid[np.minimum(local.starts[:-1], max(len(grid) - 1, 0))]
    return (grid - np.repeat(first, counts, axis=0)).astype(np.float32)


def cut(vertices: Vertices, corners: Corners, counts: Ints, levels: Ints) -> Clusters:
    """Cut P pieces (runs of triangles) into clusters.

    Args:
        vertices: vertices of the mesh.
        corners: (T, 3) corners of the triangles of all pieces, piece by piece, as indices of `vertices`.
        counts: (P,) number of triangles of each piece.
        levels: (P,) level of detail of the clusters of each piece.
    """
    local = localized(corners, counts)
    points = local_points(vertices, local)
    splits = np.where(counts > SPLIT_FROM, SPLIT_FACTOR, 0.0)
    pieces, triangles, members, owned, own_corners = grown(
        local.corners, points, starts_of(counts), local.starts, LEAST_TRIANGLES, splits
    )
    owned = local.vertices[owned]
    grid = vertices.grid[owned]
    order, in_fans = swept(grid, triangles, members, own_corners)
    starts = starts_of(members)
    used = owned[own_corners[order] + np.repeat(starts[:-1], triangles)[:, None]].astype(np.uint32)
    step = math.ldexp(1.0, vertices.exponent)
    spheres = around_points(grid * step, starts)
    return Clusters(
        used,
        triangles,
        pieces,
        spheres,
        encode(vertices, triangles, members, own_corners[in_fans], owned, levels[pieces]),
    )
