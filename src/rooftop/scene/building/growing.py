"""Grow clusters triangle by triangle, like meshoptimizer's meshlets, but in half the time.

The next triangle of a cluster is a neighbour that shares a vertex with the cluster. Topology decides first: triangles
that add no vertex to the cluster come first, then triangles that would otherwise become isolated, so that few triangles
are left behind. On a tie, the triangle nearest to the cluster's middle is added. If there is no neighbour, the nearest
triangle of the piece is added. A new cluster begins at a triangle beside earlier clusters: the one with the fewest
remaining triangles around it, and on a tie the nearest to the lowest corner of the piece's bounding box.

The cluster's neighbours are in a list with their priorities. A step updates only the neighbours of the triangle just
added; meshoptimizer updates all neighbours. The tree for nearest-triangle searches is built only for a piece that needs
many searches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.compiled import INT, array, helper, loop, output

Ints = npt.NDArray[np.int64]

# maximum number of seeds (triangles beside earlier clusters at which the next cluster may begin): in total, and added
# per cluster
MOST_SEEDS, NEW_SEEDS = 256, 4
LEAF = 8  # maximum number of triangles of a leaf of the tree
SEARCHES = 64  # finding the nearest triangle this many times without the tree takes as long as building the tree
NONE = -1
MANY = 1 << 62
# State of a vertex as one number: NEW if the vertex is not in the cluster yet, plus TWO_LEFT or ONE_LEFT if exactly two
# triangles or one triangle of the vertex are in no cluster yet. The sum over a triangle's corners determines the
# triangle's priority.
NEW, TWO_LEFT, ONE_LEFT = 1, 4, 16


def _priorities() -> npt.NDArray[np.float64]:
    found = np.zeros(4 * ONE_LEFT)
    for state in range(len(found)):
        new, two, one = state % TWO_LEFT, state % ONE_LEFT // TWO_LEFT, state // ONE_LEFT
        if new == 0:
            found[state] = 0
        elif one:
            found[state] = 1  # an isolated triangle would cost much if it were left for another cluster
        elif two >= 2:
            found[state] = 1 + new  # adding this triangle would isolate another
        else:
            found[state] = 2 + new
    return found


PRIORITIES = _priorities()


def grown(
    corners: npt.NDArray[np.uint32], points: npt.NDArray[np.float32], starts: Ints, firsts: Ints, least: int,
    splits: npt.NDArray[np.float64],
) -> tuple[Ints, Ints, Ints, Ints, npt.NDArray[np.uint8]]:  # fmt: skip
    """Cut pieces into clusters of at most MAX_TRIANGLES triangles and MAX_VERTICES vertices.

    Args:
        corners: (T, 3) corners of the triangles of all pieces, piece by piece, as indices of each piece's vertices.
        points: (V, 3) positions of the vertices of all pieces, piece by piece.
        starts, firsts: (P + 1,) where the triangles and vertices of each piece start.
        least: with this many triangles, a cluster may end before it is full.
        splits: (P,) for each piece: a cluster that no free triangle touches ends early if the nearest free triangle is
            farther from its centre than this many radii, which `_middles` estimates for a full cluster; 0 means never.
            Free triangles are in no cluster yet.

    Returns:
        the piece, the number of triangles and the number of vertices of each cluster; the clusters' vertices, cluster
        by cluster, as rows of `points`; the corners (T, 3), as indices of each cluster's vertices.
    """
    sizes = np.diff(starts)
    # minimum number of triangles of a cluster that ends because it has the maximum number of vertices
    fewest = (layouts.MAX_VERTICES - 2) // 3
    most = int(np.maximum(-(-sizes // fewest), -(-sizes // least)).sum())
    pieces, triangles, members = (np.empty(most, np.int64) for _ in range(3))
    owned, own_corners = np.empty(corners.size, np.int64), np.empty(corners.shape, np.uint8)
    ends = np.zeros(2, np.int64)
    _grow(corners, points, starts, firsts, least, splits, pieces, triangles, members, owned, own_corners, ends)
    clusters, vertices = ends.tolist()
    return pieces[:clusters], triangles[:clusters], members[:clusters], owned[:vertices], own_corners


@helper
def _triangles_around(corners: Any, vertices: Any) -> Any:
    """For each vertex, list the triangles that use it. Return the start of each vertex's list, the length of each list,
    and all lists in one array."""
    live = np.zeros(vertices, np.int32)
    for triangle in range(len(corners)):
        for corner in range(3):
            live[corners[triangle, corner]] += 1
    offsets = np.empty(vertices, np.int32)
    total = 0
    for vertex in range(vertices):
        offsets[vertex] = total
        total += live[vertex]
    around = np.empty(total, np.int32)
    filled = offsets.copy()
    for triangle in range(len(corners)):
        for corner in range(3):
            vertex = corners[triangle, corner]
            around[filled[vertex]] = triangle
            filled[vertex] += 1
    return offsets, live, around


@helper
def _middles(corners: Any, points: Any) -> Any:
    """Return the centroid of each triangle, and the approximate radius of a full cluster of triangles of the mean
    area."""
    middles = np.empty(corners.shape, np.float64)
    area = 0.0
    edges = np.empty((2, 3))
    for triangle in range(len(corners)):
        a, b, c = corners[triangle, 0], corners[triangle, 1], corners[triangle, 2]
        for axis in range(3):
            p, q, r = np.float64(points[a, axis]), np.float64(points[b, axis]), np.float64(points[c, axis])
            middles[triangle, axis] = (p + q + r) / 3
            edges[0, axis], edges[1, axis] = q - p, r - p
        nx = edges[0, 1] * edges[1, 2] - edges[0, 2] * edges[1, 1]
        ny = edges[0, 2] * edges[1, 0] - edges[0, 0] * edges[1, 2]
        nz = edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0]
        area += np.sqrt(nx * nx + ny * ny + nz * nz) / 2
    return middles, np.sqrt(area / len(corners) * layouts.MAX_TRIANGLES) / 2


@helper
def _squared(middles: Any, triangle: Any, x: Any, y: Any, z: Any) -> Any:
    """The squared distance of a triangle's middle from a point."""
    dx, dy, dz = middles[triangle, 0] - x, middles[triangle, 1] - y, middles[triangle, 2] - z
    return dx * dx + dy * dy + dz * dz


@helper
def _nearest_of_all(middles: Any, emitted: Any, x: Any, y: Any, z: Any) -> Any:
    """Return the triangle that is in no cluster yet and whose middle is nearest to the point (x, y, z), and the squared
    distance."""
    best, nearest = NONE, np.inf
    for triangle in range(len(middles)):
        distance = _squared(middles, triangle, x, y, z)
        if distance < nearest and not emitted[triangle]:
            best, nearest = triangle, distance
    return best, nearest


@helper
def _add_seeds(
    seeds: Any, seed_count: Any, emitted: Any, own: Any, first: Any, corners: Any, offsets: Any, live: Any,
    around: Any, middles: Any, low: Any,
) -> Any:  # fmt: skip
    """Drop the seeds (possible first triangles of the next cluster) that are in a cluster by now. Then add at most
    NEW_SEEDS triangles next to the finished cluster with the vertices `own`, preferably those with the fewest
    unclustered triangles around them. Return the new number of seeds."""
    kept = 0
    for at in range(seed_count):
        if not emitted[seeds[at]]:
            seeds[kept] = seeds[at]
            kept += 1
    kept = min(kept, MOST_SEEDS - NEW_SEEDS)
    found, found_live = np.full(NEW_SEEDS, NONE, np.int64), np.full(NEW_SEEDS, MANY, np.int64)
    found_distance = np.full(NEW_SEEDS, np.inf)
    for row in range(len(own)):
        vertex = own[row] - first
        best, fewest = NONE, MANY
        for at in range(offsets[vertex], offsets[vertex] + live[vertex]):
            other = around[at]
            left = live[corners[other, 0]] + live[corners[other, 1]] + live[corners[other, 2]]
            if left < fewest:
                best, fewest = other, left
        if best == NONE:
            continue
        distance = _squared(middles, best, low[0], low[1], low[2])
        for at in range(NEW_SEEDS):
            # On a tie the later triangle wins. So a triangle found again, at another vertex, usually replaces itself.
            if fewest < found_live[at] or (fewest == found_live[at] and distance <= found_distance[at]):
                found[at], found_live[at], found_distance[at] = best, fewest, distance
                break
    for at in range(NEW_SEEDS):
        if found[at] != NONE:
            seeds[kept] = found[at]
            kept += 1
    return kept


@helper
def _best_seed(seeds: Any, seed_count: Any, corners: Any, live: Any, middles: Any, low: Any) -> Any:
    """Return the seed (possible first triangle of the next cluster) with the fewest unclustered triangles around it. On
    a tie, return the nearest to the piece's lowest corner."""
    best, fewest, nearest = NONE, MANY, np.inf
    for at in range(seed_count):
        seed = seeds[at]
        left = live[corners[seed, 0]] + live[corners[seed, 1]] + live[corners[seed, 2]]
        distance = _squared(middles, seed, low[0], low[1], low[2])
        if left < fewest or (left == fewest and distance < nearest):
            best, fewest, nearest = seed, left, distance
    return best


@helper
def _tree(middles: Any, emitted: Any) -> Any:
    """Build a k-d tree over the triangles that are in no cluster yet. Node n has the children 2 n and 2 n + 1.

    Returns:
        the triangles, leaf by leaf; the leaf of each triangle; and four values of each node: the number of its
        triangles, the start of its triangles, the axis of the plane between its children (-1: a leaf), and the plane's
        position.
    """
    order = np.flatnonzero(~emitted)
    depth = 0
    while len(order) >> depth > LEAF:
        depth += 1
    size = 2 << depth
    counts, bounds, axes = np.zeros(size, np.int64), np.zeros(size, np.int64), np.full(size, NONE, np.int64)
    planes = np.zeros(size, np.float64)
    leaf_of = np.zeros(len(middles), np.int64)
    counts[1] = len(order)
    for node in range(1, size):
        begin, end = bounds[node], bounds[node] + counts[node]
        if 2 * node >= size:
            for at in range(begin, end):
                leaf_of[order[at]] = node
            continue
        axis, widest = 0, -1.0
        for each in range(3):
            least, most = np.inf, -np.inf
            for at in range(begin, end):
                least, most = min(least, middles[order[at], each]), max(most, middles[order[at], each])
            if most - least > widest:
                axis, widest = each, most - least
        half = (begin + end) // 2
        _divide(order, middles, axis, begin, end, half)
        axes[node], planes[node] = axis, middles[order[half], axis]
        bounds[2 * node], counts[2 * node] = begin, half - begin
        bounds[2 * node + 1], counts[2 * node + 1] = half, end - half
    return order, leaf_of, counts, bounds, axes, planes


@helper
def _divide(order: Any, middles: Any, axis: Any, begin: Any, end: Any, half: Any) -> None:
    """Partition triangles along an axis: no triangle before index `half` lies beyond a triangle from `half` on."""
    low, high = begin, end - 1
    while low < high:
        pivot = middles[order[(low + high) // 2], axis]
        i, j = low, high
        while i <= j:
            while middles[order[i], axis] < pivot:
                i += 1
            while middles[order[j], axis] > pivot:
                j -= 1
            if i <= j:
                order[i], order[j] = order[j], order[i]
                i, j = i + 1, j - 1
        if half <= j:
            high = j
        elif half >= i:
            low = i
        else:
            return


@helper
def _nearest(
    middles: Any, emitted: Any, order: Any, counts: Any, bounds: Any, axes: Any, planes: Any, x: Any, y: Any, z: Any
) -> Any:
    """The nearest triangle that is in no cluster yet, and its squared distance.

    `counts` includes only triangles that are in no cluster yet, so it does not determine the end of a leaf. A leaf ends
    where the next leaf starts.
    """
    best, nearest = NONE, np.inf
    nodes, distances = np.empty(64, np.int64), np.empty(64)
    nodes[0], distances[0] = 1, 0.0
    left = 1
    while left:
        left -= 1
        node = nodes[left]
        if not counts[node] or distances[left] >= nearest:
            continue
        if axes[node] == NONE:
            end = bounds[node + 1] if node + 1 < len(bounds) else len(order)
            for at in range(bounds[node], end):
                if not emitted[order[at]]:
                    distance = _squared(middles, order[at], x, y, z)
                    if distance < nearest:
                        best, nearest = order[at], distance
            continue
        beyond = (x, y, z)[axes[node]] - planes[node]
        child = 2 * node + (beyond >= 0)
        nodes[left + 1], distances[left + 1] = child, distances[left]
        nodes[left], distances[left] = child ^ 1, max(distances[left], beyond * beyond)
        left += 2
    return best, nearest


@loop(
    array("uint32", 2), array("float32", 2), array("int64"), array("int64"), INT, array("float64"),
    output("int64"), output("int64"), output("int64"), output("int64"), output("uint8", 2), output("int64"),
)  # fmt: skip
def _grow(
    all_corners: Any, all_points: Any, starts: Any, firsts: Any, least: Any, splits: Any, pieces: Any, triangles: Any,
    members: Any, owned: Any, own_corners: Any, ends: Any,
) -> None:  # fmt: skip
    """The loop of `grown`. Arguments from `pieces` on are outputs; `ends` gets the number of clusters and of their
    vertices."""
    cluster, first_owned = 0, 0
    for piece in range(len(starts) - 1):
        corners, points = all_corners[starts[piece] : starts[piece + 1]], all_points[firsts[piece] : firsts[piece + 1]]
        count = len(corners)
        if not count:
            continue
        offsets, live, around = _triangles_around(corners, len(points))
        middles, radius = _middles(corners, points)
        low = np.array([middles[:, 0].min(), middles[:, 1].min(), middles[:, 2].min()])
        emitted = np.zeros(count, np.bool_)
        place = np.empty(len(points), np.uint8)  # a vertex's number in the cluster
        state = np.full(len(points), NEW, np.int8)
        for vertex in range(len(points)):
            state[vertex] += TWO_LEFT * (live[vertex] == 2) + ONE_LEFT * (live[vertex] == 1)
        near = np.empty(count, np.int64)  # neighbours of the cluster
        near_x, near_y, near_z = np.empty(count), np.empty(count), np.empty(count)  # the neighbours' middles
        base, keys = np.empty(count), np.empty(count)  # priorities of the neighbours, without and with their distances
        position = np.full(count, NONE, np.int32)  # index of a triangle in the list of neighbours
        many = 0
        above = 0.0  # becomes greater than any squared distance
        for axis in range(3):
            above += 2 * (middles[:, axis].max() - low[axis]) ** 2
        above += 1
        seeds, seed_count = np.empty(MOST_SEEDS, np.int64), 0
        nodes = np.empty(0, np.int64)  # number of remaining triangles of each node of the tree
        order, bounds, axes, planes = nodes, nodes, nodes, np.empty(0, np.float64)
        leaf_of = nodes
        searches = 0
        used, held = 0, 0  # number of vertices and triangles of the cluster
        x = y = z = 0.0  # sums of the middles of the cluster's triangles

        for step in range(count):
            best, is_split = NONE, False
            if step == 0:
                best, _ = _nearest_of_all(middles, emitted, low[0], low[1], low[2])
            elif many:
                px, py, pz = x / held, y / held, z / held
                for at in range(many):
                    dx, dy, dz = near_x[at] - px, near_y[at] - py, near_z[at] - pz
                    keys[at] = base[at] + (dx * dx + dy * dy + dz * dz)
                first = 0
                for at in range(1, many):
                    if keys[at] < keys[first]:
                        first = at
                best = near[first]
            else:
                searches += 1
                if searches == SEARCHES:
                    order, leaf_of, nodes, bounds, axes, planes = _tree(middles, emitted)
                px, py, pz = x / held, y / held, z / held
                if searches < SEARCHES:
                    best, distance = _nearest_of_all(middles, emitted, px, py, pz)
                else:
                    best, distance = _nearest(middles, emitted, order, nodes, bounds, axes, planes, px, py, pz)
                is_split = splits[piece] > 0 and held >= least and np.sqrt(distance) > radius * splits[piece]
            a, b, c = corners[best, 0], corners[best, 1], corners[best, 2]
            extra = (state[a] & NEW) + (state[b] & NEW) + (state[c] & NEW)
            if is_split or used + extra > layouts.MAX_VERTICES or held >= layouts.MAX_TRIANGLES:
                seed_count = _add_seeds(
                    seeds, seed_count, emitted, owned[first_owned : first_owned + used], firsts[piece], corners,
                    offsets, live, around, middles, low,
                )  # fmt: skip
                seed = _best_seed(seeds, seed_count, corners, live, middles, low)
                if seed >= 0:
                    best = seed
                pieces[cluster], triangles[cluster], members[cluster] = piece, held, used
                for row in range(first_owned, first_owned + used):
                    state[owned[row] - firsts[piece]] |= NEW
                cluster, first_owned = cluster + 1, first_owned + used
                used, held, x, y, z = 0, 0, 0.0, 0.0, 0.0
                for at in range(many):
                    position[near[at]] = NONE
                many = 0

            emitted[best] = True
            held += 1
            x, y, z = x + middles[best, 0], y + middles[best, 1], z + middles[best, 2]
            if position[best] >= 0:
                many -= 1
                hole, last = position[best], near[many]
                near[hole], base[hole], position[last] = last, base[many], hole
                near_x[hole], near_y[hole], near_z[hole] = near_x[many], near_y[many], near_z[many]
                position[best] = NONE
            if len(nodes):
                node = leaf_of[best]
                while node:
                    nodes[node] -= 1
                    node >>= 1
            for corner in range(3):
                vertex = corners[best, corner]
                if state[vertex] & NEW:
                    place[vertex] = used
                    owned[first_owned + used] = firsts[piece] + vertex
                    used += 1
                own_corners[starts[piece] + step, corner] = place[vertex]
                live[vertex] -= 1
                state[vertex] = TWO_LEFT * (live[vertex] == 2) + ONE_LEFT * (live[vertex] == 1)
                at, end = offsets[vertex], offsets[vertex] + live[vertex]
                while at < end and around[at] != best:
                    at += 1
                around[at], around[end] = around[end], best
            for corner in range(3):
                vertex = corners[best, corner]
                for at in range(offsets[vertex], offsets[vertex] + live[vertex]):
                    other = around[at]
                    if position[other] < 0:
                        position[other] = many
                        near[many] = other
                        near_x[many], near_y[many], near_z[many] = (
                            middles[other, 0],
                            middles[other, 1],
                            middles[other, 2],
                        )
                        many += 1
                    summed = state[corners[other, 0]] + state[corners[other, 1]] + state[corners[other, 2]]
                    base[position[other]] = above * PRIORITIES[summed]
        if held:
            pieces[cluster], triangles[cluster], members[cluster] = piece, held, used
            cluster, first_owned = cluster + 1, first_owned + used
    ends[0], ends[1] = cluster, first_owned
