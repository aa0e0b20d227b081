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
    extent = highest(points, first) - low
    axes = np.argsort(-extent, axis=1, kind="stable")
    rows = np.arange(len(points))
    along, across = ((points[rows, axes[:, axis][at]] - low[rows_of(members), axes[:, axis][at]]) for axis in range(2))
    scale = ((1 << KEY_BITS - 2) / np.maximum(extent.max(1), 1))[at]
    along, across = along * scale, across * scale
    base = corners.T.astype(np.int32) + first[:-1].astype(np.int32)[of_triangle]  # (3, T)
    place = within(members)
    cluster = at << (KEY_BITS + VERTEX_BITS) | place

    best, ranks = np.full(len(triangles), 255, np.uint8), np.zeros(base.shape, np.uint8)
    rank = np.empty(len(points), np.uint8)
    for share, other in WAYS:
        keys = (share * along + other * across).astype(np.int64) + (1 << KEY_BITS - 1)
        keys = np.sort(cluster | keys << VERTEX_BITS)
        rank[first[at] + (keys & (1 << VERTEX_BITS) - 1)] = place
        own = rank[base]
        width = np.maximum.reduceat(_most(own) - _least(own), starts[:-1])
        better = width < best
        best = np.where(better, width, best)
        ranks = np.where(better[of_triangle], own, ranks)
    least, most = _least(ranks), _most(ranks)
    middle = ranks[0] ^ ranks[1] ^ ranks[2] ^ least ^ most
    keys = of_triangle
    for corner in (most, middle, least):  # a triangle comes with its last vertex
        keys = keys << VERTEX_BITS | corner
    keys = np.sort(keys << TRIANGLE_BITS | within(triangles))
    return starts[of_triangle] + (keys & (1 << TRIANGLE_BITS) - 1)


def _least(ranks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.minimum(np.minimum(ranks[0], ranks[1]), ranks[2])


def _most(ranks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.maximum(np.maximum(ranks[0], ranks[1]), ranks[2])
