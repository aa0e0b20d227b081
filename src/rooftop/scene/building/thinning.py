"""Small parts of a mesh, such as leaves: fewer and larger ones, of the same area.

Leaves, blades of grass or gravel cannot be simplified by moving vertices: each is a few triangles already. Without them
far pictures would miss what they cover. So of two neighbours one goes, and the other grows until it has the area of
both. Its vertices are new ones, copies of the old in all but the position.

Only *loose* parts are treated so: those that lie whole in one group, whose vertices no other group uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building import meshopt
from rooftop.scene.building.meshes import Vertices, repeats
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import within

Ints = npt.NDArray[np.int64]
Corners = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

SEEN = 1.5  # of the radius of a part that stands for two: its error
MOST_GROWTH = 4.0  # of a part's lengths in one step: a needle would grow without end
LIKE = 2.0  # median errors of pairs: pairs with more, such as a leaf and its tree, are left alone
MISSING = 0.05  # of the area of all parts: those of which simplifying leaves nothing
LARGE_PARTS = 16  # radii of parts over an error, from which on they need not grow
UNCHANGED = 0.005  # of its lengths: a part that would grow by less stays as it is
ROUNDS = 3  # of growing and moving back into the group's box, which makes narrow parts wider instead of longer
LEAST, LARGE = 1e-30, 1e30
MOVED = 0.5  # of its radius, by which a part that stands for two may move towards the middle of both


@dataclass(frozen=True)
class Pairs:
    """Of each pair one part stays for both.

    Attributes:
        kept, gone: (N,) parts, as numbers into `LooseParts.ids`.
        error: in steps of the grid.
    """

    kept: Ints
    gone: Ints
    error: float = 0.0

    @classmethod
    def none(cls) -> Pairs:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Thinned:
    """What is left of a group.

    Attributes:
        corners: (T, 3), in which vertices that were added have numbers from V on.
        error: in steps of the grid.
        added: those vertices.
    """

    corners: Corners
    error: float
    added: Added


class LooseParts:
    """The loose parts of a group.

    Args:
        vertices: of the mesh, which has several parts.
        corners: (T, 3) of the group.
        locked: (V,) whether another group uses a vertex, too.

    Attributes:
        ids: (P,) of the parts, ascending.
    """

    def __init__(self, vertices: Vertices, corners: Corners, locked: npt.NDArray[np.bool_]) -> None:
        assert vertices.parts is not None
        self._vertices = vertices
        self._corners = corners
        parts = vertices.parts[corners]
        joined = (parts != parts[:, :1]).any(1)  # by moving vertices together
        held = np.concatenate([parts[joined].ravel(), parts[locked[corners].any(1), 0]])
        self.ids = np.setdiff1d(parts[:, 0], held)

    @cached_property
    def _own(self) -> tuple[Ints, Corners]:
        """The part of each triangle of the group that belongs to one, and those triangles."""
        return self._of(self._corners)

    @cached_property
    def _shapes(self) -> _Shapes:
        of, inside = self._own
        return _Shapes.of(self._vertices.grid[inside], of, len(self))

    @cached_property
    def _materials(self) -> Ints:
        found = np.zeros(len(self), np.int64)
        if self._vertices.materials is not None:
            of, inside = self._own
            found[of] = self._vertices.materials[inside[:, 0]]
        return found

    @cached_property
    def _order(self) -> Ints:
        """All parts, neighbours of one material side by side."""
        return np.lexsort([morton_codes(self._shapes.centres), self._materials])

    def __len__(self) -> int:
        return len(self.ids)

    def pairs(self, most: int, error: float = np.inf) -> Pairs:
        """Of the smallest parts two neighbours each, of one material if possible.

        Args:
            most: about so many triangles may go with parts that go.
            error: of the pairs, at most.
        """
        shapes = self._shapes
        by_size = np.argsort(shapes.radii, kind="stable")
        enough = np.searchsorted(np.cumsum(shapes.triangles[by_size]), 2 * most) + 1
        chosen = self._order[np.isin(self._order, by_size[:enough])]
        _, runs = np.unique(self._materials[chosen], return_counts=True)
        if (runs < 2).all():
            runs = np.array([len(chosen)])
        second = np.flatnonzero(within(runs) % 2 == 1)
        pairs = np.column_stack([chosen[second - 1], chosen[second]])
        swapped = shapes.areas[pairs[:, 1]] > shapes.areas[pairs[:, 0]]
        pairs[swapped] = pairs[swapped, ::-1]
        kept, gone = pairs.T
        errors = SEEN * shapes.radii[kept] * _growth(shapes.areas[kept] + shapes.areas[gone], shapes.areas[kept])
        usual = LIKE * float(np.median(errors)) if len(errors) else 0.0
        small = errors <= min(error, usual)
        kept, gone, errors = kept[small], gone[small], errors[small]
        return Pairs(kept, gone, float(errors.max(initial=0.0)))

    def missing(self, left: Corners) -> float:
        """The share in the area of all parts of those of which nothing is left."""
        areas = self._shapes.areas
        there = np.zeros(len(self), bool)
        there[self._of(left)[0]] = True
        return float(areas[~there].sum() / max(areas.sum(), LEAST))

    def are_large(self, error: float) -> bool:
        """Whether parts that are off by so much still have nearly their area."""
        return float(self._shapes.radii.min()) > LARGE_PARTS * error

    def without(self, corners: Corners, pairs: Pairs) -> Corners:
        """The triangles that are not of a part that goes."""
        gone = np.zeros(len(self) + 1, bool)  # the last one stands for triangles of no loose part
        gone[pairs.gone] = True
        return corners[~gone[self._numbers(corners)]]

    def remain(self, left: Corners) -> bool:
        """Whether of any part something is left."""
        return bool((self._numbers(left) >= 0).any())

    def thinned(self, left: Corners, error: float, pairs: Pairs) -> Thinned:
        """What is left with one part of each pair, where each part has the area that was there.

        Args:
            left: (T, 3) what is left of the group.
            error: of that.
            pairs: of parts. Of those that stay some `remain`.
        """
        left = self.without(left, pairs)
        of, inside = self._of(left)
        grid, count, before = self._vertices.grid, len(self), self._shapes
        wanted = before.areas.copy()
        wanted[pairs.kept] += before.areas[pairs.gone]

        now = _Shapes.of(grid[inside], of, count)
        lost = now.triangles == 0
        lost[pairs.gone] = False
        if lost.any():
            np.add.at(wanted, self._nearest(lost, now.triangles > 0), wanted[lost])
        growth = _growth(wanted, now.areas)
        changed = growth > 1 + UNCHANGED
        changed[pairs.kept] = True
        grows = changed[of]
        if not grows.any():
            return Thinned(left, error, Added.none())
        used, triangles = np.unique(inside[grows], return_inverse=True)
        triangles = triangles.reshape(-1, 3)
        part = np.empty(len(used), np.int64)
        part[triangles] = of[grows][:, None]

        old = grid[used].astype(np.float64)
        points = old + self._moves(pairs, before, growth * now.radii)[part]
        room = _Room.around(grid[self._corners.ravel()])
        for turn in range(ROUNDS if len(pairs.kept) else 1):
            shapes = _Shapes.of(points[triangles], of[grows], count)
            growth = _growth(wanted, shapes.areas) ** (
                2 if turn else 1
            )  # later, what was cut off is made up for in width
            middles = shapes.centres[part]
            points = room.holds((points - middles) * growth[part][:, None] + middles, part, count)
        grown = np.rint(points).astype(np.int32)
        alone = ~np.isin(part, pairs.kept)
        moved = float(np.sqrt(((points - old)[alone] ** 2).sum(1)).max(initial=0.0))
        radii = _Shapes.of(points[triangles], of[grows], count).radii[pairs.kept]
        error = max(error, moved, SEEN * float(radii.max(initial=0.0)))

        places = meshopt.same_rows(grown)[1].astype(np.int64)
        corners, stays = left.copy(), np.ones(len(left), bool)
        rows = np.flatnonzero(self._numbers(left) >= 0)[grows]
        corners[rows] = (triangles + len(grid)).astype(np.uint32)
        stays[rows] = ~repeats(places[triangles])  # of what was cut off nothing may be left
        return Thinned(corners[stays], error, Added(used.astype(np.int64), grown, places))

    def _nearest(self, lost: npt.NDArray[np.bool_], there: npt.NDArray[np.bool_]) -> Ints:
        """For each part that is lost one that is there."""
        rank = np.empty(len(self), np.int64)
        rank[self._order] = np.arange(len(self))
        found = np.flatnonzero(there[self._order])
        after = np.minimum(np.searchsorted(found, rank[lost]), len(found) - 1)
        before = np.maximum(after - 1, 0)
        nearer = np.abs(found[before] - rank[lost]) < np.abs(found[after] - rank[lost])
        return self._order[found[np.where(nearer, before, after)]]

    def _moves(self, pairs: Pairs, shapes: _Shapes, radii: Floats) -> Floats:
        """(P, 3) how parts that stand for two move towards the middle of both."""
        share = shapes.areas[pairs.gone] / np.maximum(shapes.areas[pairs.kept] + shapes.areas[pairs.gone], LEAST)
        moves = np.zeros((len(self), 3))
        moves[pairs.kept] = share[:, None] * (shapes.centres[pairs.gone] - shapes.centres[pairs.kept])
        lengths = np.sqrt((moves**2).sum(1))
        return moves * np.minimum(1.0, MOVED * radii / np.maximum(lengths, LEAST))[:, None]

    def _numbers(self, corners: Corners) -> Ints:
        """(T,) the loose part of each triangle, as a number into `ids`; -1 for one of none."""
        assert self._vertices.parts is not None
        ids = self._vertices.parts[corners[:, 0]]
        at = np.minimum(np.searchsorted(self.ids, ids), len(self) - 1)
        return np.where(self.ids[at] == ids, at, -1)

    def _of(self, corners: Corners) -> tuple[Ints, Corners]:
        """The part of each triangle of a loose part, and those triangles."""
        numbers = self._numbers(corners)
        return numbers[numbers >= 0], corners[numbers >= 0]


@dataclass(frozen=True)
class _Shapes:
    """Of parts: triangles, areas and centres of area, and how far a corner is from there at most. 0 of none."""

    triangles: Ints
    areas: Floats
    centres: Floats
    radii: Floats

    @classmethod
    def of(cls, grid: npt.NDArray[Any], numbers: Ints, count: int) -> _Shapes:
        """Of triangles (T, 3, 3), each of the part with its number."""
        first, second, third = (grid[:, corner].astype(np.float64) for corner in range(3))
        (ax, ay, az), (bx, by, bz) = (second - first).T, (third - first).T
        areas = np.sqrt((ay * bz - az * by) ** 2 + (az * bx - ax * bz) ** 2 + (ax * by - ay * bx) ** 2) / 2
        sums = np.bincount(numbers, areas, count).astype(np.float64)  # whole numbers where there is no triangle
        weighted = (areas / 3)[:, None] * (first + second + third)
        columns = [np.bincount(numbers, column, count) for column in weighted.T]
        centres = np.column_stack(columns) / np.maximum(sums, LEAST)[:, None]
        away, middles = np.zeros(len(numbers)), centres[numbers]
        for corner in (first, second, third):
            distances = corner - middles
            np.maximum(away, np.einsum("ij,ij->i", distances, distances), out=away)
        radii = np.zeros(count)
        np.maximum.at(radii, numbers, away)
        return cls(np.bincount(numbers, minlength=count), sums, centres, np.sqrt(radii))


def _growth(wanted: Floats, areas: Floats) -> Floats:
    """By what lengths grow when areas do."""
    growth: Floats = np.clip(np.sqrt(wanted / np.maximum(areas, LEAST)), 1.0, MOST_GROWTH)
    return growth


@dataclass(frozen=True)
class _Room:
    """The box and the sphere around a group, which its parts must not leave: seen from far it would become wider."""

    low: Floats
    high: Floats
    radius: float

    @classmethod
    def around(cls, points: npt.NDArray[np.int32]) -> _Room:
        """Around points (N, 3)."""
        low, high = points.min(0).astype(np.float64), points.max(0).astype(np.float64)
        return cls(low, high, float(np.sqrt(((points - (low + high) / 2) ** 2).sum(1).max())))

    def holds(self, points: Floats, parts: Ints, count: int) -> Floats:
        """Points of parts, each moved into the room; what is larger than the box is cut off by it."""
        middle = (self.low + self.high) / 2
        least, most = np.full((count, 3), LARGE), np.full((count, 3), -LARGE)
        np.minimum.at(least, parts, points)
        np.maximum.at(most, parts, points)
        centres = (least + most) / 2 - middle
        room = np.maximum((self.high - self.low - (most - least)) / 2, 0.0)
        moves = np.clip(centres, -room, room) - centres
        points = points + moves[parts] - middle

        centres += moves
        away = np.sqrt((points**2).sum(1))
        outside = np.zeros(count)
        np.maximum.at(outside, parts, away - self.radius)
        lengths = np.sqrt((centres**2).sum(1))
        pulled = np.minimum(outside / np.maximum(lengths, LEAST), 1.0)
        points = points - (pulled[:, None] * centres)[parts] + middle
        held: Floats = np.clip(points, self.low, self.high)
        return held
