"""Cut pieces of a mesh into clusters of at most 128 triangles, and encode each cluster at once.

A piece is a run of triangles: of the given mesh, or of a simplified group. Clusters grow triangle by triangle over
shared edges (meshoptimizer's meshlets), never from one piece into another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building import meshopt
from rooftop.scene.building.encoding import Encoded, encode
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import numbered, rows_of, starts_of, taken
from rooftop.scene.building.spheres import around_points
from rooftop.scene.building.sweeps import swept

Ints = npt.NDArray[np.int64]
Corners = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Clusters:
    """The resulting clusters.

    Attributes:
        corners: (T, 3) of all triangles, cluster by cluster, as numbers of the mesh's vertices.
        triangles: (C,) number of triangles of each cluster.
        pieces: (C,) the piece of each, not decreasing.
        spheres: (C, 4) float32, around each cluster's vertices, in object units.
        encoded: the words to write.
    """

    corners: Corners
    triangles: Ints
    pieces: Ints
    spheres: npt.NDArray[np.float32]
    encoded: Encoded

    def part(self, chosen: Ints) -> Clusters:
        """A selection of these clusters, in ascending order."""
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
        corners: (T, 3) uint32.
    """

    vertices: Ints
    starts: Ints
    corners: Corners


def localized(corners: Corners, counts: Ints) -> Local:
    """Number the vertices of pieces.

    Args:
        corners: (T, 3) of all pieces, one after another, as numbers of the mesh's vertices.
        counts: (P,) number of triangles of each piece.
    """
    if len(counts) == 1:
        vertices, local = numbered(corners, int(corners.max(initial=0)) + 1)
        return Local(vertices.astype(np.int64), np.array([0, len(vertices)]), local)
    below = int(corners.max(initial=0)) + 1
    keys = corners + (rows_of(counts) * below)[:, None]
    ordered, number = numbered(keys, below * len(counts))
    starts = np.searchsorted(ordered, np.arange(len(counts) + 1) * below)
    local = number - np.repeat(starts[:-1], counts)[:, None].astype(np.uint32)
    return Local(ordered - np.repeat(np.arange(len(counts)) * below, np.diff(starts)), starts, local)


def local_points(vertices: Vertices, local: Local) -> npt.NDArray[np.float32]:
    """Exact positions of the pieces' vertices, in steps of the grid, relative to each piece's first vertex."""
    grid = vertices.grid[local.vertices]
    counts = np.diff(local.starts)
    first = grid[np.minimum(local.starts[:-1], max(len(grid) - 1, 0))]
    return (grid - np.repeat(first, counts, axis=0)).astype(np.float32)


def cut(vertices: Vertices, corners: Corners, counts: Ints, levels: Ints) -> Clusters:
    """Cut pieces into clusters.

    Args:
        vertices: of the mesh.
        corners: (T, 3), piece by piece.
        counts: (P,) number of triangles of each piece.
        levels: (P,) of the clusters.
    """
    local = localized(corners, counts)
    points = local_points(vertices, local)
    cut_pieces = [
        _meshlets(local.corners[a:b], points[c:d])
        for a, b, c, d in zip(*_spans(starts_of(counts)), *_spans(local.starts), strict=True)
    ]
    meshlets = np.concatenate([each[0] for each in cut_pieces])
    pieces = rows_of([len(each[0]) for each in cut_pieces])
    triangles, members = meshlets["triangles"].astype(np.int64), meshlets["vertices"].astype(np.int64)

    offsets = starts_of([len(each[1]) for each in cut_pieces])[pieces]
    owned = np.concatenate([each[1] for each in cut_pieces])[taken(offsets + meshlets["vertex"], members)]
    owned = local.vertices[owned + np.repeat(local.starts[pieces], members)]
    offsets = starts_of([len(each[2]) for each in cut_pieces])[pieces]
    flat = np.concatenate([each[2] for each in cut_pieces])[taken(offsets + meshlets["triangle"], 3 * triangles)]
    own_corners = flat.reshape(-1, 3)

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


def _spans(starts: Ints) -> tuple[Any, Any]:
    return starts[:-1].tolist(), starts[1:].tolist()


def _meshlets(
    corners: Corners, points: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Meshlets of one piece (as meshopt.MESHLET), their vertices, and their corners."""
    library = meshopt.library()
    most = max(-(-corners.size // (layouts.MAX_VERTICES - 2)), -(-len(corners) // LEAST_TRIANGLES))
    found = np.empty(most, meshopt.MESHLET)
    owned = np.empty(most * layouts.MAX_VERTICES, np.uint32)
    flat = np.empty(most * layouts.MAX_TRIANGLES * 3, np.uint8)
    count = library.meshopt_buildMeshletsFlex(
        meshopt.address(found), meshopt.address(owned), meshopt.address(flat), meshopt.address(corners), corners.size,
        meshopt.address(points), len(points), 12, layouts.MAX_VERTICES, LEAST_TRIANGLES, layouts.MAX_TRIANGLES, 0.0,
        SPLIT_FACTOR if len(corners) > SPLIT_FROM else 0.0,
    )  # fmt: skip
    found = found[:count]
    if not count:
        return found, owned[:0], flat[:0]
    last = found[-1]
    return found, owned[: last["vertex"] + last["vertices"]], flat[: last["triangle"] + 3 * last["triangles"]]


LEAST_TRIANGLES = 96  # triangles from which on a cluster may end early
SPLIT_FACTOR = 2.0  # it ends if its next triangle is farther away than this many times its radius
# only in a piece with more triangles than this; smaller pieces need as few clusters as possible
SPLIT_FROM = 2 * layouts.MAX_TRIANGLES
