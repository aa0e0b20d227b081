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
from rooftop.scene.building.compiled import array, loop, output
from rooftop.scene.building.encoding import Encoded, encode
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import numbered_by_row, rows_of, starts_of, taken
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
    vertices, starts, local = numbered_by_row(corners, 3 * starts_of(counts), int(corners.max(initial=0)) + 1)
    return Local(vertices.astype(np.int64), starts, local)


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
    pieces, triangles, members, owned, own_corners = _meshlets(local, points, starts_of(counts))
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


def _meshlets(
    local: Local, points: npt.NDArray[np.float32], starts: Ints
) -> tuple[Ints, Ints, Ints, Ints, npt.NDArray[np.uint8]]:
    """The meshlets of all pieces: the piece, the number of triangles and the number of vertices of each; their
    vertices; their corners (T, 3)."""
    library = meshopt.library()
    count = len(local.corners)
    sizes = np.diff(starts)
    most = np.maximum(-(-3 * sizes // (layouts.MAX_VERTICES - 2)), -(-sizes // LEAST_TRIANGLES)).tolist()
    largest = max(most, default=0)
    found = np.empty((largest, 4), np.uint32)  # as meshopt.MESHLET
    owned = np.empty(largest * layouts.MAX_VERTICES, np.uint32)
    flat = np.empty(largest * layouts.MAX_TRIANGLES * 3, np.uint8)
    triangles, members = np.empty(sum(most), np.int64), np.empty(sum(most), np.int64)
    all_owned, all_corners = np.empty(3 * count, np.int64), np.empty((count, 3), np.uint8)
    ends = np.zeros(3, np.int64)
    pieces = []
    for a, b, c, d in zip(*_spans(starts), *_spans(local.starts), strict=True):
        made = library.meshopt_buildMeshletsFlex(
            meshopt.address(found), meshopt.address(owned), meshopt.address(flat),
            meshopt.address(local.corners[a:b]), 3 * (b - a), meshopt.address(points[c:d]), d - c, 12,
            layouts.MAX_VERTICES, LEAST_TRIANGLES, layouts.MAX_TRIANGLES, 0.0,
            SPLIT_FACTOR if b - a > SPLIT_FROM else 0.0,
        )  # fmt: skip
        pieces.append(made)
        _append(found[:made], owned, flat, local.vertices[c:d], triangles, members, all_owned, all_corners, ends)
    clusters, vertices, _ = ends.tolist()
    return rows_of(pieces), triangles[:clusters], members[:clusters], all_owned[:vertices], all_corners


def _spans(starts: Ints) -> tuple[Any, Any]:
    return starts[:-1].tolist(), starts[1:].tolist()


@loop(
    array("uint32", 2), array("uint32"), array("uint8"), array("int64"),
    output("int64"), output("int64"), output("int64"), output("uint8", 2), output("int64"),
)  # fmt: skip
def _append(found, owned, flat, vertices, triangles, members, all_owned, all_corners, ends):  # type: ignore[no-untyped-def]
    """Append the meshlets of a piece to those before it.

    Args:
        found: (M, 4) as meshopt.MESHLET. owned, flat: vertices and corners of the meshlets, with gaps.
        vertices: the piece's vertices, as numbers of the mesh.
        triangles, members, all_owned, all_corners: appended to. ends: numbers of clusters, of their vertices and of
            their triangles so far.
    """
    cluster, vertex, triangle = ends
    for meshlet in range(len(found)):
        triangles[cluster], members[cluster] = found[meshlet, 3], found[meshlet, 2]
        for at in range(found[meshlet, 0], found[meshlet, 0] + found[meshlet, 2]):
            all_owned[vertex] = vertices[owned[at]]
            vertex += 1
        place = np.int64(found[meshlet, 1])
        for _ in range(found[meshlet, 3]):
            for corner in range(3):
                all_corners[triangle, corner] = flat[place + corner]
            place += 3
            triangle += 1
        cluster += 1
    ends[0], ends[1], ends[2] = cluster, vertex, triangle


LEAST_TRIANGLES = 96  # triangles from which on a cluster may end early
SPLIT_FACTOR = 2.0  # it ends if its next triangle is farther away than this many times its radius
# only in a piece with more triangles than this; smaller pieces need as few clusters as possible
SPLIT_FROM = 2 * layouts.MAX_TRIANGLES
