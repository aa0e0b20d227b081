"""Cut polygons into triangles.

A fan of triangles from any corner covers only convex polygons. A concave quadrilateral becomes a fan from its inward
corner. A concave polygon of more corners is cut by removing one corner after another (ear clipping).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.ragged import starts_of

Points = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# a corner is straight if its turn (cross product) is below this share of the sum of all the polygon's squared edges
_STRAIGHT = 1e-12


def cut_polygons(points: npt.NDArray[Any], counts: Ints, corners: Ints) -> Ints:
    """Cut polygons into triangles, in the order of the polygons.

    Args:
        points: (V, 3) positions.
        counts: (P,) number of corners of each polygon. Polygons with fewer than three corners have no triangles.
        corners: (N,) rows of `points`: the corners of all polygons, one polygon after another.

    Returns:
        (T, 3) indices into `corners`.
    """
    if (counts == 3).all():
        return np.arange(len(corners)).reshape(-1, 3)
    starts = starts_of(counts)[:-1]
    cut, polygons = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for count in np.unique(counts[counts > 2]).tolist():
        chosen = np.flatnonzero(counts == count)
        each = starts[chosen, None] + np.arange(count)  # (P', count)
        places = np.asarray(points[corners[each]], np.float64)
        inward = _inward(places) if count > 3 else np.zeros(each.shape, bool)  # (P', count)
        # a fan from its inward corner covers a concave quadrilateral
        first = inward.argmax(1) if count == 4 else np.zeros(len(each), np.int64)
        fan = np.arange(1, count - 1)
        fan = np.stack([np.zeros_like(fan), fan, fan + 1], 1)  # (count - 2, 3)
        found = (first[:, None, None] + fan) % count
        for row in np.flatnonzero(inward.any(1)).tolist() if count > 4 else ():
            found[row] = cut_polygon(places[row])
        cut.append((starts[chosen, None, None] + found).reshape(-1, 3))
        polygons.append(np.repeat(chosen, count - 2))
    order = np.argsort(np.concatenate(polygons), kind="stable")
    return np.concatenate(cut)[order]


def are_concave(polygons: Points) -> npt.NDArray[np.bool_]:
    """For polygons with corners (P, N, 3), whether any corner points inwards."""
    return np.asarray(_inward(polygons).any(1))


def _inward(polygons: Points) -> npt.NDArray[np.bool_]:
    """Whether each corner (P, N) of polygons (P, N, 3) turns in the opposite direction to the whole polygon."""
    edges = np.roll(polygons, -1, 1) - polygons
    turns = np.cross(np.roll(edges, 1, 1), edges)
    normals = np.cross(polygons - polygons[:, :1], np.roll(polygons, -1, 1) - polygons[:, :1]).sum(1)
    length = np.linalg.norm(normals, axis=1)
    along = np.einsum("pnk,pk->pn", turns, normals / np.maximum(length, np.finfo(float).tiny)[:, None])
    found: npt.NDArray[np.bool_] = along < -_STRAIGHT * np.square(edges).sum((1, 2))[:, None]
    return found


def cut_polygon(corners: Points) -> list[tuple[int, int, int]]:
    """Cut a polygon (N, 3) into triangles, by cutting off one corner after another; a convex polygon becomes a fan.

    A corner can be cut off if it points outwards and no other corner lies in its triangle. If no corner can be cut off,
    because the polygon crosses itself, the remaining polygon becomes a fan.
    """
    if not bool(are_concave(corners[None])[0]):
        return [(0, n, n + 1) for n in range(1, len(corners) - 1)]
    normal = np.cross(corners, np.roll(corners, -1, 0)).sum(0)
    drop = int(np.abs(normal).argmax())
    flat = np.delete(corners, drop, 1) * ([1, 1] if normal[drop] * (-1 if drop == 1 else 1) > 0 else [1, -1])
    left, found = list(range(len(corners))), []
    while len(left) > 3:
        for place in range(len(left)):
            a, b, c = (left[(place + step) % len(left)] for step in (-1, 0, 1))
            others = flat[[n for n in left if n not in (a, b, c)]]
            if _area(flat[a], flat[b], flat[c]) > 0 and not _inside(others, flat[a], flat[b], flat[c]).any():
                found.append((a, b, c))
                del left[place]
                break
        else:
            return found + [(left[0], left[n], left[n + 1]) for n in range(1, len(left) - 1)]
    return [*found, (left[0], left[1], left[2])]


def _area(a: Points, b: Points, c: Points) -> Points:
    """Twice the signed area of a triangle in the plane, positive if it turns to the left."""
    found: Points = (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (
        c[..., 0] - a[..., 0]
    )
    return found


def _inside(points: Points, a: Points, b: Points, c: Points) -> npt.NDArray[np.bool_]:
    """Whether each point is in a triangle that turns to the left, or on its edge, but not at one of its corners."""
    found: npt.NDArray[np.bool_] = (_area(a, b, points) >= 0) & (_area(b, c, points) >= 0) & (_area(c, a, points) >= 0)
    return found & ~(points == a).all(-1) & ~(points == b).all(-1) & ~(points == c).all(-1)
