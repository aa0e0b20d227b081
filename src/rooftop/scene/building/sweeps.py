"""The order of a cluster's triangles: along a sweep through the cluster, so that references are few and short.

A corner that is not new is stored as a reference: the distance of its vertex from the newest one. If a front sweeps
through the
cluster, that is at most the width of the front: about ten vertices of eighty. All references of a cluster have as many
bits as its longest one: 4.3 on average, compared with 5.8 in the order in which triangles were collected.

A triangle is visited with the last of its vertices along the sweep. Triangles with the same last vertex follow one
another around that vertex, counterclockwise. So each but the first needs only one reference.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import highest, lowest, rows_of, starts_of, within

Ints = npt.NDArray[np.int64]

# Sweep directions, as shares of the two longest axes of the box around a cluster. The best direction is used for each
# cluster.
WAYS = ((1.0, 0.1), (1.0, 0.5), (1.0, -0.5), (0.1, 1.0))
KEY_BITS, VERTEX_BITS, TRIANGLE_BITS = 28, 8, 7


def swept(
    points: npt.NDArray[np.int32], triangles: Ints, members: Ints, corners: npt.NDArray[np.uint8]
) -> tuple[Ints, Ints]:
    """The order (T,) of the triangles of all clusters, cluster by cluster: along the sweep alone, and in fans.

    Args:
        points: points of the clusters' vertices, cluster by cluster. triangles, members: (C,) number of triangles and
        vertices of each cluster.
        corners: (T, 3): indices among the cluster's vertices.
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
    for corner in (most, middle, least):  # a triangle is visited with its last vertex
        keys = keys << VERTEX_BITS | corner
    keys = np.sort(keys << TRIANGLE_BITS | within(triangles))
    order = starts[of_triangle] + (keys & (1 << TRIANGLE_BITS) - 1)
    return order, order[_in_fans(ranks[:, order], of_triangle)]


def _in_fans(ranks: npt.NDArray[np.uint8], of_triangle: Ints) -> Ints:
    """An order (T,) in which triangles with the same last vertex follow one another around it.

    Args:
        ranks: (3, T) along the sweep, for triangles in the order of their last vertices.
        of_triangle: (T,) the cluster of each.
    """
    count = len(of_triangle)
    most = _most(ranks)
    a, b, c = ranks
    is_b, is_c = b == most, c == most
    # the other two corners, in their order around the last one
    before, after = np.where(is_b, c, np.where(is_c, a, b)), np.where(is_b, a, np.where(is_c, b, c))
    rows = np.arange(count, dtype=np.int32)
    own = of_triangle.astype(np.int32) << VERTEX_BITS
    fan = own | most
    begins = np.flatnonzero(np.concatenate([[True], fan[1:] != fan[:-1]]))
    sizes = np.diff(begins, append=count)
    first = np.repeat(begins.astype(np.int32), sizes)

    # A vertex whose triangles are all visited later appears first with the earliest of them. Triangles with such a
    # vertex come last, the other way around: the first introduces it, and the next continues around it.
    appears = np.empty(int(own[-1]) + (1 << VERTEX_BITS), np.uint8)
    corners = np.stack([before, after, most], 1)
    appears[(own[:, None] | corners).ravel()[::-1]] = np.repeat(
        most[::-1], 3
    )  # for equal places the last assignment wins
    late = (appears[own | before] == most) | (appears[own | after] == most)

    # The predecessor of each triangle.
    previous = np.full(count, -1, np.int32)
    left = np.repeat(sizes.astype(np.int32), sizes) - (rows - first)  # triangles of the fan from this one on
    near = rows
    for distance in range(1, 1 << TRIANGLE_BITS):
        near = near[left[near] > distance]
        if not len(near):
            break
        there = near + distance
        alike = late[near] == late[there]
        follows = alike & (after[near] == before[there])
        previous[there[follows]] = near[follows]
        follows = alike & (after[there] == before[near])
        previous[near[follows]] = there[follows]
    closed = np.logical_and.reduceat(previous >= 0, begins)
    previous[begins[closed]] = -1  # a closed fan around a vertex can begin with any triangle
    head, place = rows.copy(), np.zeros(count, np.int32)
    left = np.flatnonzero(previous >= 0)
    place[left] = 1
    head[left] = previous[left]
    for _ in range(TRIANGLE_BITS):
        if not len(left):
            break
        via = head[left]
        place[left], head[left] = place[left] + place[via], head[via]
        left = left[head[via] != via]
    # limited, because duplicate faces would follow each other forever
    place = np.minimum(place, (1 << TRIANGLE_BITS) - 1)
    keys = first.astype(np.int64) << 1 | late
    keys = keys << TRIANGLE_BITS | (head - first)
    keys = keys << TRIANGLE_BITS | np.where(late, (1 << TRIANGLE_BITS) - 1 - place, place)
    keys = np.sort(keys << TRIANGLE_BITS | (rows - first))
    return first + (keys & (1 << TRIANGLE_BITS) - 1)


def _least(ranks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.minimum(np.minimum(ranks[0], ranks[1]), ranks[2])


def _most(ranks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.maximum(np.maximum(ranks[0], ranks[1]), ranks[2])
