"""Order a cluster's triangles along a sweep through the cluster, so that references are few and short.

A corner whose vertex occurred before is stored as a reference: the distance of its vertex from the newest vertex. If
triangles are visited along a sweep, a reference is at most the number of vertices along the sweep's front line: about
ten in a cluster of eighty vertices. All references of a cluster have as many bits as the longest reference needs: 4.3
bits on average, compared with 5.8 bits if triangles stay in the order in which the cluster grew.

A triangle is visited when the sweep reaches the last of its vertices. Triangles with the same last vertex follow one
another around that vertex, as a fan. First come the triangles whose other two vertices occurred in earlier fans. Each
run of adjacent ones is visited counterclockwise, from end to end. Then come the other triangles, each run clockwise. In
a fan, a triangle that shares an edge with the triangle before it and has no new vertex needs only one reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.compiled import array, loop, output
from rooftop.scene.building.ragged import starts_of

Ints = npt.NDArray[np.int64]

# Sweep directions, as factors of the two longest axes of the box around a cluster. For each cluster, `_rank` chooses
# the direction that minimizes the largest difference between the ranks of a triangle's corners.
WAYS = np.array([(1.0, 0.1), (1.0, 0.5), (1.0, -0.5), (0.1, 1.0)])
KEY_BITS, VERTEX_BITS, TRIANGLE_BITS = 28, 8, 7
LAST_PLACE = (1 << TRIANGLE_BITS) - 1


def swept(
    points: npt.NDArray[np.int32], triangles: Ints, members: Ints, corners: npt.NDArray[np.uint8]
) -> tuple[Ints, Ints]:
    """Order the triangles of all clusters. Return two orders (T,) of triangle indices. They differ only among
    triangles with the same last vertex: the first sorts these by their other two vertices; in the second, they follow
    one another around the shared vertex, as a fan.

    Args:
        points: positions of the clusters' vertices, cluster by cluster.
        triangles, members: (C,) number of triangles and of vertices of each cluster.
        corners: (T, 3): for each corner, the index of its vertex among the vertices of the triangle's cluster.
    """
    first, starts = starts_of(members), starts_of(triangles)
    vertex_keys = np.empty((len(WAYS), len(points)), np.int64)
    _sweep(points, first, vertex_keys)
    vertex_keys.sort(axis=1)
    ranks = np.empty((len(corners), 3), np.uint8)
    triangle_keys = np.empty(len(corners), np.int64)
    _rank(vertex_keys, first, starts, corners, ranks, triangle_keys)
    triangle_keys.sort()
    order, in_fans = np.empty(len(corners), np.int64), np.empty(len(corners), np.int64)
    _fan(triangle_keys, starts, ranks, order, in_fans)
    return order, in_fans


@loop(array("int32", 2), array("int64"), output("int64", 2))
def _sweep(points, first, keys):  # type: ignore[no-untyped-def]
    """Compute for each direction the keys by which vertices are sorted: cluster, distance along the sweep, vertex.

    Args:
        points: positions of the clusters' vertices.
        first: start of each cluster's vertices.
        keys: output (WAYS, N).
    """
    low, extent = np.empty(3, np.int64), np.empty(3, np.int64)
    for cluster in range(len(first) - 1):
        begin, end = first[cluster], first[cluster + 1]
        for axis in range(3):
            least = most = np.int64(points[begin, axis])
            for vertex in range(begin + 1, end):
                least, most = min(least, points[vertex, axis]), max(most, points[vertex, axis])
            low[axis], extent[axis] = least, most - least
        longest = 0
        for axis in range(1, 3):
            if extent[axis] > extent[longest]:
                longest = axis
        second = 1 if longest == 0 else 0
        for axis in range(second + 1, 3):
            if axis != longest and extent[axis] > extent[second]:
                second = axis
        scale = (1 << KEY_BITS - 2) / max(extent[longest], 1)
        for vertex in range(begin, end):
            along = (points[vertex, longest] - low[longest]) * scale
            across = (points[vertex, second] - low[second]) * scale
            for way in range(len(WAYS)):
                key = np.int64(WAYS[way, 0] * along + WAYS[way, 1] * across) + (1 << KEY_BITS - 1)
                keys[way, vertex] = (cluster << KEY_BITS | key) << VERTEX_BITS | (vertex - begin)


@loop(array("int64", 2), array("int64"), array("int64"), array("uint8", 2), output("uint8", 2), output("int64"))
def _rank(vertex_keys, first, starts, corners, ranks, keys):  # type: ignore[no-untyped-def]
    """Choose each cluster's sweep direction. Compute the ranks of the triangles' corners along it, and the keys by
    which triangles are sorted: cluster, ranks from the last vertex to the first, triangle.

    Args:
        vertex_keys: (WAYS, N), sorted.
        first: where each cluster's vertices begin.
        starts: where each cluster's triangles begin.
        corners: (T, 3).
        ranks: output (T, 3).
        keys: output (T,).
    """
    rank, best_rank = np.empty(1 << VERTEX_BITS, np.uint8), np.empty(1 << VERTEX_BITS, np.uint8)
    for cluster in range(len(first) - 1):
        begin, end = starts[cluster], starts[cluster + 1]
        best: Any = 1 << VERTEX_BITS
        for way in range(len(WAYS)):
            for vertex in range(first[cluster], first[cluster + 1]):
                rank[vertex_keys[way, vertex] & (1 << VERTEX_BITS) - 1] = vertex - first[cluster]
            width: Any = 0
            for triangle in range(begin, end):
                a, b, c = rank[corners[triangle, 0]], rank[corners[triangle, 1]], rank[corners[triangle, 2]]
                width = max(width, np.int64(max(a, b, c)) - np.int64(min(a, b, c)))
            if width < best:
                best = width
                rank, best_rank = best_rank, rank
        for triangle in range(begin, end):
            a, b, c = (
                np.int64(best_rank[corners[triangle, 0]]),
                np.int64(best_rank[corners[triangle, 1]]),
                np.int64(best_rank[corners[triangle, 2]]),
            )
            ranks[triangle, 0], ranks[triangle, 1], ranks[triangle, 2] = a, b, c
            least, most = min(a, b, c), max(a, b, c)
            key = (cluster << VERTEX_BITS | most) << VERTEX_BITS | (a + b + c - least - most)
            keys[triangle] = (key << VERTEX_BITS | least) << TRIANGLE_BITS | (triangle - begin)


@loop(array("int64"), array("int64"), array("uint8", 2), output("int64"), output("int64"))
def _fan(keys, starts, ranks, order, in_fans):  # type: ignore[no-untyped-def]
    """Compute the order of the triangles along the sweep, and an order in which triangles with the same last vertex
    follow one another around that vertex.

    Args:
        keys: (T,) of `_rank`, sorted.
        starts: where the triangles of each cluster begin.
        ranks: (T, 3).
        order, in_fans: outputs (T,).
    """
    most, before, after = np.empty((3, layouts.MAX_TRIANGLES), np.int64)
    late = np.empty(layouts.MAX_TRIANGLES, np.bool_)
    previous, head, place = np.empty((3, layouts.MAX_TRIANGLES), np.int64)
    left, via, via_head, via_place = np.empty((4, layouts.MAX_TRIANGLES), np.int64)
    fan_keys = np.empty(layouts.MAX_TRIANGLES, np.int64)
    appears = np.empty(1 << VERTEX_BITS, np.int64)
    for cluster in range(len(starts) - 1):
        start = starts[cluster]
        count = starts[cluster + 1] - start
        appears[:] = -1
        for row in range(count):
            triangle = start + (keys[start + row] & LAST_PLACE)
            order[start + row] = triangle
            a, b, c = np.int64(ranks[triangle, 0]), np.int64(ranks[triangle, 1]), np.int64(ranks[triangle, 2])
            last = max(a, b, c)
            most[row] = last
            # the other two corners, counterclockwise around the last vertex
            if b == last:
                before[row], after[row] = c, a
            elif c == last:
                before[row], after[row] = a, b
            else:
                before[row], after[row] = b, c
            for corner in (a, b, c):
                if appears[corner] < 0:
                    appears[corner] = last
        begin = 0
        while begin < count:
            end = begin + 1
            while end < count and most[end] == most[begin]:
                end += 1
            # A fan is the triangles with the same last vertex, the fan's centre. A corner other than the centre is new
            # if no earlier fan has it. Triangles without a new corner come first, counterclockwise around the centre.
            # Triangles with a new corner (`late`) come last, clockwise around the centre: the first of them introduces
            # a new corner, and the next continues from this corner.
            for row in range(begin, end):
                late[row] = appears[before[row]] == most[row] or appears[after[row]] == most[row]
                previous[row], head[row], place[row] = -1, row, 0
            for distance in range(1, end - begin):
                for near in range(begin, end - distance):
                    there = near + distance
                    if late[near] == late[there]:
                        if after[near] == before[there]:
                            previous[there] = near
                        if after[there] == before[near]:
                            previous[near] = there
            closed = True
            for row in range(begin, end):
                closed = closed and previous[row] >= 0
            if closed:
                previous[begin] = -1  # a closed fan around a vertex can begin with any triangle
            many = 0
            for row in range(begin, end):
                if previous[row] >= 0:
                    place[row], head[row] = 1, previous[row]
                    left[many] = row
                    many += 1
            # the number of steps is limited, because duplicate faces would follow each other forever
            for _ in range(TRIANGLE_BITS):
                for index in range(many):
                    via[index] = head[left[index]]
                    via_head[index], via_place[index] = head[via[index]], place[via[index]]
                for index in range(many):
                    head[left[index]] = via_head[index]
                    place[left[index]] += via_place[index]
                still = 0
                for index in range(many):
                    if head[via[index]] != via[index]:
                        left[still] = left[index]
                        still += 1
                many = still
            for row in range(begin, end):
                along = min(place[row], LAST_PLACE)
                key = late[row] << TRIANGLE_BITS | (head[row] - begin)
                key = key << TRIANGLE_BITS | (LAST_PLACE - along if late[row] else along)
                key = key << TRIANGLE_BITS | (row - begin)
                at = row
                while at > begin and fan_keys[at - 1] > key:
                    fan_keys[at] = fan_keys[at - 1]
                    at -= 1
                fan_keys[at] = key
            for row in range(begin, end):
                in_fans[start + row] = order[start + begin + (fan_keys[row] & LAST_PLACE)]
            begin = end
