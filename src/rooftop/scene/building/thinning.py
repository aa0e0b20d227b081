"""Replace small parts of a mesh, such as leaves, by fewer and larger parts that cover the same area.

Leaves, blades of grass or gravel cannot be simplified by merging vertices, because each has only a few triangles. If
such parts were removed, pictures from far away would lack the area that the parts cover. So one of two neighbours is
removed, and the other grows until it has the area of both; a narrow part grows in width first. If parts hide each
other, as in clumps of leaves, the result would cover too much. So the coverage of the group is sampled before and
after, and the growth is corrected. A part that grew has new vertices: copies of its old vertices at other positions.
The error is approximately the part's width: once parts are narrower than a pixel, they look like one part that covers
the same area.

Only *loose* parts are treated: parts that lie completely in one group and share no vertex positions with other groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building import meshopt
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import rows_of, within
from rooftop.scene.building.welding import repeats

Ints = npt.NDArray[np.int64]
Corners = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

SEEN = 1.75  # error of a part that replaces two parts, in units of half its width
MOST_GROWTH = 4.0  # maximum factor by which a part's area grows in one round; without it, a needle would grow forever
FAR_LARGER = 4.0  # the larger part of a pair stays if its area exceeds this many times the area of the other
# a pair whose error is above this many times the median error of all pairs, such as a leaf and a trunk, is not merged
LIKE = 2.0
# the simplification of a group is rejected if the parts that it removes completely have, together, this share of the
# area of all parts or more
MISSING = 0.05
LARGE_PARTS = 16  # parts need not grow if half their width is at least this many times the error
UNCHANGED = 0.01  # a part that would grow by less than this share of its area does not change
# number of rounds in which parts grow and are then moved back into the group's box; each round regains area that the
# previous one lost
ROUNDS = 4
# A group's coverage is measured in square pictures. HITS: approximate number of a picture's samples that hit triangles.
# SIDES: least and greatest number of samples along the picture's side.
HITS, SIDES = 10_000, (64, 512)
LOOKS = 2  # a group's coverage is measured at most this many times
OVERLAP = 1.5  # areas grow by the wanted ratio ** OVERLAP, because other parts hide some of the growth
LEAST, LARGE = 1e-30, 1e30


@dataclass(frozen=True)
class Pairs:
    """Pairs of parts; in each pair, one part replaces both.

    Attributes:
        kept, gone: (N,) parts, as indices into `LooseParts.ids`.
        error: largest error of a pair, in steps of the grid.
    """

    kept: Ints
    gone: Ints
    error: float = 0.0

    @classmethod
    def none(cls) -> Pairs:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Thinned:
    """The remaining triangles of a group.

    Attributes:
        corners: (T, 3) vertex indices. With V vertices in the mesh, index V + i is the added vertex i.
        error: error of the group, in steps of the grid.
        added: the added vertices.
    """

    corners: Corners
    error: float
    added: Added


class LooseParts:
    """The loose parts of a group: the connected parts that lie completely in the group and have no locked vertex.

    Args:
        vertices: vertices of the mesh, which has several parts.
        corners: (T, 3) of the group.
        locked: (V,) whether a vertex must stay, for example because another group also uses its position.

    Attributes:
        ids: (P,) the loose parts, as numbers of `Vertices.parts`, ascending.
    """

    def __init__(self, vertices: Vertices, corners: Corners, locked: npt.NDArray[np.bool_]) -> None:
        assert vertices.parts is not None
        self._vertices = vertices
        self._corners = corners
        parts = vertices.parts[corners]
        joined = (parts != parts[:, :1]).any(1)  # merging vertices made this triangle span several parts
        held = np.concatenate([parts[joined].ravel(), parts[locked[corners].any(1), 0]])
        self.ids = np.setdiff1d(parts[:, 0], held)

    @cached_property
    def _own(self) -> tuple[Ints, Corners]:
        """All triangles of the group that belong to loose parts, and the part of each triangle, as returned by
        `_of`."""
        return self._of(self._corners)

    @cached_property
    def _shapes(self) -> _Shapes:
        of, inside = self._own
        return _Shapes.of(self._vertices.grid[inside], of, len(self))

    @cached_property
    def _side(self) -> int:
        """Side, in samples, of the square pictures that measure how much the group covers. In each picture, about HITS
        samples hit the group's triangles; fewer if the triangles are needles."""
        grid = self._vertices.grid[self._corners].astype(np.float64)
        # Estimate the area of a triangle in a picture as a quarter of its longest edge squared. All samples in the box
        # around a triangle are tested, and a needle's box may be as wide as the needle is long.
        edges = np.square(grid - np.roll(grid, 1, 1)).sum(2).max(1)
        size = float(((grid.max((0, 1)) - grid.min((0, 1))) ** 2).sum())
        return int(np.clip(math.sqrt(HITS * size / max(float(edges.sum()) / 4, LEAST)), *SIDES))

    @cached_property
    def _covered(self) -> int:
        """Number of samples that the group's triangles cover, summed over pictures from several sides."""
        grid = self._vertices.grid[self._corners]
        return _covered(grid, grid.min((0, 1)), grid.max((0, 1)), self._side)

    @cached_property
    def _materials(self) -> Ints:
        found = np.zeros(len(self), np.int64)
        if self._vertices.materials is not None:
            of, inside = self._own
            found[of] = self._vertices.materials[inside[:, 0]]
        return found

    @cached_property
    def _order(self) -> Ints:
        """Indices of all loose parts, sorted by material, and along Morton's curve within a material, so that
        neighbours are adjacent."""
        return np.lexsort([morton_codes(self._shapes.centres), self._materials])

    def __len__(self) -> int:
        return len(self.ids)

    def pairs(self, most: int, error: float = np.inf) -> Pairs:
        """Choose pairs of neighbours among the smallest parts, of one material if possible.

        Args:
            most: approximate maximum number of triangles that the removed parts have together.
            error: largest allowed error of a pair.
        """
        shapes = self._shapes
        by_size = np.argsort(shapes.widths, kind="stable")
        enough = np.searchsorted(np.cumsum(shapes.triangles[by_size]), 2 * most) + 1
        chosen = self._order[np.isin(self._order, by_size[:enough])]
        _, runs = np.unique(self._materials[chosen], return_counts=True)
        if (runs < 2).all():
            runs = np.array([len(chosen)])
        second = np.flatnonzero(within(runs) % 2 == 1)
        pairs = np.column_stack([chosen[second - 1], chosen[second]])
        # swap kept and gone in every other pair: if the larger part always stayed, grass would grow taller
        pairs[::2] = pairs[::2, ::-1]
        smaller = FAR_LARGER * shapes.areas[pairs[:, 0]] < shapes.areas[pairs[:, 1]]
        pairs[smaller] = pairs[smaller, ::-1]
        kept, gone = pairs.T
        ratios = (shapes.areas[kept] + shapes.areas[gone]) / np.maximum(shapes.areas[kept], LEAST)
        errors = SEEN * shapes.widths[kept] * _growth(ratios, shapes.slenderness[kept])[1]
        usual = LIKE * float(np.median(errors)) if len(errors) else 0.0
        small = errors <= min(error, usual)
        kept, gone, errors = kept[small], gone[small], errors[small]
        return Pairs(kept, gone, float(errors.max(initial=0.0)))

    def missing(self, left: Corners) -> float:
        """Compute the share (0 to 1) of the loose parts' total area that belongs to parts without any triangle in
        `left`."""
        areas = self._shapes.areas
        there = np.zeros(len(self), bool)
        there[self._of(left)[0]] = True
        return float(areas[~there].sum() / max(areas.sum(), LEAST))

    def are_large(self, error: float) -> bool:
        """Whether every part is so wide that simplification with this error keeps nearly all of its area: half its
        width is more than `LARGE_PARTS` times the error."""
        return float(self._shapes.widths.min()) > LARGE_PARTS * error

    def without(self, corners: Corners, pairs: Pairs) -> Corners:
        """Drop the triangles that belong to the removed parts `pairs.gone` from the triangles `corners`."""
        gone = np.zeros(len(self) + 1, bool)  # the last entry stands for triangles that belong to no loose part
        gone[pairs.gone] = True
        return corners[~gone[self._numbers(corners)]]

    def remain(self, left: Corners) -> bool:
        """Whether any of the remaining triangles `left` belongs to a loose part."""
        return bool((self._numbers(left) >= 0).any())

    def thinned(self, left: Corners, error: float, pairs: Pairs) -> Thinned:
        """Remove one part of each pair, and grow the remaining parts so that the group keeps its area.

        Args:
            left: (T, 3) the remaining triangles of the group.
            error: the error of these triangles.
            pairs: the pairs of parts. At least one kept part must still have triangles in `left` (see `remain`).
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
            wanted = self._shared(wanted, lost, now.triangles > 0)
        ratios = wanted / np.maximum(now.areas, LEAST)
        changed = ratios > 1 + UNCHANGED
        changed[pairs.kept] = True
        grows = changed[of]
        if not grows.any():
            return Thinned(left, error, Added.none())
        used, triangles = np.unique(inside[grows], return_inverse=True)
        triangles = triangles.reshape(-1, 3)
        part = np.empty(len(used), np.int64)
        part[triangles] = of[grows][:, None]

        old = grid[used].astype(np.float64)
        room = _Room.of(grid[self._corners.ravel()], old, part, count)

        def grown_to(areas: Floats, points: Floats, first: bool) -> Floats:
            for turn in range(ROUNDS):
                shapes = _Shapes.of(points[triangles], of[grows], count)
                ratios = areas / np.maximum(shapes.areas, LEAST)
                growth = _growth(ratios, shapes.slenderness) if first and not turn else (_again(ratios),) * 2
                points = room.holds(shapes.scaled(points, part, *growth))
            return points

        points = grown_to(wanted, old, first=True)
        rows = np.flatnonzero(self._numbers(left) >= 0)[grows]
        if len(pairs.kept):
            rest = grid[np.delete(left, rows, axis=0)]
            for _ in range(LOOKS):
                share = self._covered / max(room.covered(self._side, rest, points[triangles]), 1)
                wanted = wanted * np.clip(share, 0.5, 2.0) ** OVERLAP
                points = grown_to(wanted, points, first=False)
        grown = np.rint(points).astype(np.int32)
        alone = ~np.isin(part, pairs.kept)
        moved = float(np.sqrt(((points - old)[alone] ** 2).sum(1)).max(initial=0.0))
        widths = _Shapes.of(points[triangles], of[grows], count).widths[pairs.kept]
        error = max(error, moved, SEEN * float(widths.max(initial=0.0)))

        places = meshopt.same_rows(grown)[1].astype(np.int64)
        corners, stays = left.copy(), np.ones(len(left), bool)
        corners[rows] = (triangles + len(grid)).astype(np.uint32)
        stays[rows] = ~repeats(places[triangles])  # moving points into the group's box may flatten triangles
        return Thinned(corners[stays], error, Added(used.astype(np.int64), grown, places))

    def _shared(self, areas: Floats, lost: npt.NDArray[np.bool_], there: npt.NDArray[np.bool_]) -> Floats:
        """Distribute the areas of the parts `lost` over the remaining parts `there`, in proportion to their areas. Only
        parts of the same material get a share, or all parts if none of this material remains. Return the new areas."""
        areas = areas.copy()
        for material in np.unique(self._materials[lost]).tolist():
            own = lost & (self._materials == material)
            heirs = there & (self._materials == material)
            heirs = heirs if heirs.any() else there
            areas[heirs] *= 1 + areas[own].sum() / max(float(areas[heirs].sum()), LEAST)
        return areas

    def _numbers(self, corners: Corners) -> Ints:
        """For each triangle, (T,), the index in `ids` of its loose part (`LooseParts`), or -1 if there is none."""
        assert self._vertices.parts is not None
        ids = self._vertices.parts[corners[:, 0]]
        at = np.minimum(np.searchsorted(self.ids, ids), len(self) - 1)
        return np.where(self.ids[at] == ids, at, -1)

    def _of(self, corners: Corners) -> tuple[Ints, Corners]:
        """Select the triangles that belong to loose parts: return the part of each of these triangles, and the
        triangles."""
        numbers = self._numbers(corners)
        return numbers[numbers >= 0], corners[numbers >= 0]


@dataclass(frozen=True)
class _Shapes:
    """Sizes and positions of parts; all 0 for a part without triangles.

    Attributes:
        triangles, areas: number of triangles and area of each part.
        centres: (P, 3) centroid of each part.
        axes: (P, 3) unit vector from the centroid to the farthest corner.
        lengths, widths: largest distance of a corner from the centroid, and from the axis.
    """

    triangles: Ints
    areas: Floats
    centres: Floats
    axes: Floats
    lengths: Floats
    widths: Floats

    @classmethod
    def of(cls, grid: npt.NDArray[Any], numbers: Ints, count: int) -> _Shapes:
        """Measure `count` parts from their triangles (T, 3, 3); `numbers` has the part of each triangle."""
        first, second, third = (grid[:, corner].astype(np.float64) for corner in range(3))
        (ax, ay, az), (bx, by, bz) = (second - first).T, (third - first).T
        areas = np.sqrt((ay * bz - az * by) ** 2 + (az * bx - ax * bz) ** 2 + (ax * by - ay * bx) ** 2) / 2
        sums = np.bincount(numbers, areas, count).astype(np.float64)  # without triangles, bincount returns integers
        weighted = (areas / 3)[:, None] * (first + second + third)
        columns = [np.bincount(numbers, column, count) for column in weighted.T]
        centres = np.column_stack(columns) / np.maximum(sums, LEAST)[:, None]

        of = np.concatenate([numbers, numbers, numbers])
        away = np.concatenate([first, second, third]) - centres[of]
        squares = np.einsum("ij,ij->i", away, away)
        lengths = _most(squares, of, count)
        axes = np.zeros((count, 3))
        farthest = np.flatnonzero(squares == lengths[of])
        axes[of[farthest]] = away[farthest]
        lengths = np.sqrt(lengths)
        axes /= np.maximum(lengths, LEAST)[:, None]
        along = np.einsum("ij,ij->i", away, axes[of])
        widths = np.sqrt(_most(np.maximum(squares - along**2, 0.0), of, count))
        return cls(np.bincount(numbers, minlength=count), sums, centres, axes, lengths, widths)

    @property
    def slenderness(self) -> Floats:
        """Length divided by width, at least 1."""
        found: Floats = np.maximum(self.lengths / np.maximum(self.widths, LEAST), 1.0)
        return found

    def scaled(self, points: Floats, parts: Ints, along: Floats, across: Floats) -> Floats:
        """Scale points (N, 3) of parts relative to the centre of each part: by `along` in the direction of the part's
        axis, by `across` at right angles to it."""
        away = points - self.centres[parts]
        axes = self.axes[parts]
        lengths = np.einsum("ij,ij->i", away, axes) * (along - across)[parts]
        moved: Floats = self.centres[parts] + across[parts][:, None] * away + lengths[:, None] * axes
        return moved


def _most(values: Floats, numbers: Ints, count: int) -> Floats:
    """The largest value of each of `count` parts, at least 0; `numbers` is the part of each value."""
    found = np.zeros(count)
    np.maximum.at(found, numbers, values)
    return found


def _growth(ratios: Floats, slenderness: Floats) -> tuple[Floats, Floats]:
    """Split the factors by which the areas of parts grow into factors of length and of width. Only the width grows
    until it equals the length."""
    ratios = np.clip(ratios, 1 / MOST_GROWTH, MOST_GROWTH)
    along = np.sqrt(np.maximum(ratios / slenderness, 1.0))
    return along, ratios / along


def _again(ratios: Floats) -> Floats:
    """Factor by which both length and width of a part grow in a later round. `ratios`: wanted area divided by present
    area. A ratio above 1 is the factor itself, not its root, since `_Room.holds` may block growth in one direction."""
    growth: Floats = np.clip(np.where(ratios > 1, ratios, np.sqrt(ratios)), 1 / MOST_GROWTH, MOST_GROWTH)
    return growth


@dataclass(frozen=True)
class _Room:
    """The space of a group, which its parts must not leave, and the largest size of each part. Without these limits the
    group would look larger.

    Attributes:
        middle: middle of the box around the group.
        half: (3,) half of the box's extent.
        radius: radius of the sphere around all points of the group; its centre is `middle`.
        parts: (N,) the part of each point.
        most: (P, 3) the maximum extent of parts along each axis.
    """

    middle: Floats
    half: Floats
    radius: float
    parts: Ints
    most: Floats

    @classmethod
    def of(cls, group: npt.NDArray[np.int32], points: Floats, parts: Ints, count: int) -> _Room:
        """Measure the space of a group from its points (G, 3), and the largest allowed sizes of parts from their points
        (N, 3) before they grow."""
        low, high = group.min(0).astype(np.float64), group.max(0).astype(np.float64)
        radius = float(np.sqrt(((group - (low + high) / 2) ** 2).sum(1).max()))
        least, most = _boxes(points, parts, count)
        return cls((low + high) / 2, (high - low) / 2, radius, parts, np.maximum(most - least, (high - low) / 2))

    def covered(self, side: int, *triangles: npt.NDArray[Any]) -> int:
        """Count the samples that triangles (T, 3, 3) cover in pictures of the group's box from several sides, each of
        `side` x `side` samples."""
        return _covered(np.concatenate(triangles), self.middle - self.half, self.middle + self.half, side)

    def holds(self, points: Floats) -> Floats:
        """Shrink each part to its maximum size, and move it into the group's space; return the new points."""
        parts, count = self.parts, len(self.most)
        least, most = _boxes(points, parts, count)
        centres, extents = (least + most) / 2, most - least
        squeezed = np.minimum(1.0, self.most / np.maximum(extents, LEAST))
        points = (points - centres[parts]) * squeezed[parts]
        centres -= self.middle
        free = np.maximum(self.half - extents * squeezed / 2, 0.0)
        centres = np.clip(centres, -free, free)

        away = points + centres[parts]
        outside = _most(np.sqrt((away**2).sum(1)) - self.radius, parts, count)
        lengths = np.sqrt((centres**2).sum(1))
        centres *= 1 - np.minimum(outside / np.maximum(lengths, LEAST), 1.0)[:, None]
        held: Floats = np.clip(points + centres[parts], -self.half, self.half) + self.middle
        return held


def _covered(triangles: npt.NDArray[Any], low: npt.NDArray[Any], high: npt.NDArray[Any], side: int) -> int:
    """Number of samples that triangles (T, 3, 3) cover in pictures of a box from several sides, each of `side` x `side`
    samples."""
    spacing = max(float(np.sqrt(((high - low) ** 2.0).sum())), 1.0) / side
    points = (triangles - (low + high) / 2) / spacing
    return sum(_covered_along(_along(points, frame) + (side - 1) / 2, side) for frame in _FRAMES)


def _along(points: Floats, frame: Floats) -> Floats:
    """Compute points @ frame without BLAS, whose threads do not exist in a forked process."""
    return sum(points[..., axis, None] * frame[axis] for axis in range(3))  # type: ignore[return-value]


def _covered_along(triangles: Floats, side: int) -> int:
    """Count the integer points (x, y) from 0 to side - 1 that lie in any of the triangles (T, 3, 2)."""
    first = np.maximum(np.ceil(triangles.min(1)), 0).astype(np.int64)
    last = np.minimum(np.floor(triangles.max(1)), side - 1).astype(np.int64)
    sizes = np.maximum(last - first + 1, 0)
    counts = sizes[:, 0] * sizes[:, 1]
    of = rows_of(counts)
    row, column = np.divmod(within(counts), sizes[of, 0])
    x, y = first[of, 0] + column, first[of, 1] + row
    left, right = np.ones(len(of), bool), np.ones(len(of), bool)
    for corner in range(3):
        (ax, ay), (bx, by) = triangles[:, corner].T, triangles[:, (corner + 1) % 3].T
        # the sign of `turn` says on which side of the edge the sample lies
        turn = (ay - by)[of] * x + (bx - ax)[of] * y + (ax * by - ay * bx)[of]
        left &= turn >= 0
        right &= turn <= 0
    seen = np.zeros(side * side, bool)
    seen[(y * side + x)[left | right]] = True
    return int(seen.sum())


def _frames() -> list[Floats]:
    """For each of the six axes of an icosahedron, two axes perpendicular to it (3, 2)."""
    golden = (1 + math.sqrt(5)) / 2
    ways = [np.roll([0.0, sign, golden], turn) for turn in range(3) for sign in (1, -1)]
    return [np.linalg.svd(way[:, None])[0][:, 1:] for way in ways]


_FRAMES = _frames()


def _boxes(points: Floats, parts: Ints, count: int) -> tuple[Floats, Floats]:
    """Return the lowest and the highest corners (count, 3) of the boxes around parts. `parts` has the part of each
    point."""
    least, most = np.full((count, 3), LARGE), np.full((count, 3), -LARGE)
    np.minimum.at(least, parts, points)
    np.maximum.at(most, parts, points)
    return least, most
