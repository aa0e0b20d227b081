"""The order of a cluster's triangles: along a sweep through it, so that references are short.

A corner that is not new is stored as how far its vertex is before the newest one. Where a front sweeps through the
cluster, that is no more than what the front is wide: about ten vertices of eighty. All references of a cluster take as
many bits as its longest: 4.3 on average, where the order in which triangles were collected takes 5.8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import highest, lowest, rows_of, starts_of, within

Ints = npt.NDArray[np.int64]

# Ways to sweep, as shares of the two longest axes of the box around a cluster. Of each cluster the best is taken.
WAYS = ((1.0, 0.1), (1.0, 0.5), (1.0, -0.5), (0.1, 1.0))
KEY_BITS, VERTEX_BITS, TRIANGLE_BITS = 28, 8, 7


def swept(
    points: npt.NDArray[np.int32], triangles: Ints, members: Ints, corners: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64]:
    """The order (T,) of the triangles of all clusters, cluster by cluster.

    Args:
        points: of the clusters' vertices, cluster by cluster.
        triangles, members: (C,) how many triangles and vertices each cluster has.
        corners: (T, 3): which of the cluster's vertices.
    """
    first, starts = starts_of(members), starts_of(triangles)
    at, of_triangle = rows_of(members), rows_of(triangles)
    low = lowest(points, first)
    extent = highest(points, first).astype(np.int64) - low
    axes = np.argsort(-extent, axis=1, kind="stable")[:, :2].astype(np.int64)
    rows = np.arange(len(points))
    along, across = ((points[rows, axis[at]] - low[rows_of(members), axis[at]]).astype(np.float64) for axis in axes.T)
    scale = (1 << KEY_BITS - 2) / np.maximum(extent.max(1), 1)
    base = (first[:-1])[of_triangle][:, None] + corners
    place, vertex = within(members), at << (KEY_BITS + VERTEX_BITS)

    best = np.full(len(triangles), 256)
    ranks = np.zeros(corners.shape, np.int64)
    for share, other in WAYS:
        keys = ((share * along + other * across) * scale[at]).astype(np.int64) + (1 << KEY_BITS - 1)
        keys = np.sort(vertex | keys << VERTEX_BITS | place)
        rank = np.empty(len(points), np.int64)
        rank[first[at] + (keys & (1 << VERTEX_BITS) - 1)] = place
        own = rank[base]
        width = highest(own.max(1) - own.min(1), starts)
        better = width < best
        best = np.where(better, width, best)
        ranks = np.where(better[of_triangle][:, None], own, ranks)
    ranks.sort(axis=1)
    keys = of_triangle
    for corner in (2, 1, 0):  # a triangle comes with its last vertex
        keys = keys << VERTEX_BITS | ranks[:, corner]
    keys = np.sort(keys << TRIANGLE_BITS | within(triangles))
    return starts[of_triangle] + (keys & (1 << TRIANGLE_BITS) - 1)
