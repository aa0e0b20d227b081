"""Build the levels of detail of a mesh. Clusters of triangles are grouped, and each group is simplified and cut into
fewer, coarser clusters, until one cluster is left.

A step takes the front (the coarsest clusters so far), divides it into groups of clusters, and replaces each group by
the clusters of its simplified triangles. If a group does not become fewer clusters (does not shrink), its clusters stay
in the front, and the next step groups them differently. After TRIES tries, or when no group shrinks any more, these
clusters are never replaced by coarser ones.

Batches of groups are processed in parallel. The batches and groups depend only on the mesh, so the file has the same
bits for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.borders import Connections, SharedPlaces, Whole
from rooftop.scene.building.clustering import Clusters, cut
from rooftop.scene.building.encoding import Encoded
from rooftop.scene.building.excerpts import Excerpt
from rooftop.scene.building.grouping import group
from rooftop.scene.building.meshes import Mesh
from rooftop.scene.building.orders import ordering
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import gathered, rows_of, starts_of, taken
from rooftop.scene.building.simplifying import simplify
from rooftop.scene.building.spheres import around_spheres
from rooftop.scene.building.workers import ALONE, Call, Stage, Team, shared
from rooftop.scene.heads import head_words

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Progress = Callable[[str, float], None]
V = TypeVar("V", bound=np.generic)

# triangles of the given mesh per piece; no cluster extends from one piece into another
PIECE_TRIANGLES = 1 << 14
MOST_TRIANGLES = 1 << 16  # maximum number of triangles of a batch
# A batch has 1 / SHARE of the triangles that are in no batch yet. So batches become smaller towards the end of a stage,
# and up to SHARE workers finish at about the same time.
SHARE = 32
LEAST_TRIANGLES = 1 << 13  # minimum number of triangles of a batch; with smaller batches, the whole build takes longer
RUN_CLUSTERS = 1 << 10  # clusters per run; groups are formed within a run, so no group extends into another run
# minimum ratio of a group's error to the errors of its clusters; it stays above 1 + 2^-10 after rounding to float32
GROWTH = 1 + 2**-10 + 2**-20
TRIES = 3
MOST_LEVELS = 255
LONGEST_HEAD = head_words(replaces=True, normals=True, uv=True)
CUTTING = 0.45  # approximate share of the build time that cutting the mesh takes


@dataclass(frozen=True)
class Front:
    """The C clusters that no coarser clusters have replaced so far.

    Attributes:
        corners: (T, 3) vertex indices of the triangles, cluster by cluster.
        triangles: (C,) number of triangles of each cluster.
        numbers: (C,) the clusters' numbers, which count all clusters of the build in order of creation.
        tries: (C,) how often each cluster was in a group that did not become fewer clusters.
    """

    corners: Words
    triangles: Ints
    numbers: Ints
    tries: Ints

    def part(self, chosen: Ints) -> Front:
        """Return a front of only the clusters with the indices `chosen` in this front, in this order."""
        starts = starts_of(self.triangles)[:-1]
        rows = taken(starts[chosen], self.triangles[chosen])
        return Front(self.corners[rows], self.triangles[chosen], self.numbers[chosen], self.tries[chosen])


@dataclass(frozen=True)
class Hierarchy:
    """All C clusters of a mesh at all levels of detail, and all G groups of these clusters.

    Attributes:
        heads: (C, CLUSTER_COLUMNS) heads (descriptions) of all clusters, in order of creation. CLUSTER_SOURCE is the
            index in `spheres` of the group that the cluster replaces; CLUSTER_STREAMS is not filled in yet.
        streams: the words of all clusters' streams, as a list of arrays, in order of the clusters' creation.
        lengths: (C,) number of 32-bit words of each cluster's streams.
        levels: (C,) level of detail of each cluster; 0 is the finest.
        groups: (C,) the group to which each cluster belongs.
        spheres: (G, 4) float32, centre and radius of a sphere around each group.
        errors: (G,) float32, error of the clusters that replace each group, in object units; NEVER for a group that no
            clusters replace.
        non_manifold_edges: number of non-manifold edges of the mesh.
        unshrunk: number of clusters that no clusters replace because their groups did not become fewer clusters.
    """

    heads: Words
    streams: list[Words]
    lengths: Ints
    levels: Ints
    groups: Ints
    spheres: Reals
    errors: Reals
    unshrunk: int
    non_manifold_edges: int

    @property
    def roots(self) -> int:
        """Number of clusters that no coarser clusters replace."""
        return int((self.errors[self.groups] == layouts.NEVER).sum())


def build_levels(mesh: Mesh, progress: Progress, team: Team, lock_borders: bool = False) -> Hierarchy:
    """Build the clusters of all levels of detail, from the mesh's own faces to the coarsest cluster.

    Args:
        mesh: the mesh to build from.
        progress: called with (text that names the current activity, fraction of the build that is done).
        team: the processes that share the work. The team must not have run anything yet, because it learns functions
            here.
        lock_borders: whether the vertices of edges with only one face keep their places in all levels.
    """
    levels = _Levels(mesh, progress, lock_borders)
    team.learn(levels.calls())
    return levels.build(team)


class _Column(Generic[V]):
    """An array that grows: appended parts are concatenated on request."""

    def __init__(self, first: npt.NDArray[V]) -> None:
        self._pieces = [first]

    def append(self, more: npt.NDArray[V]) -> None:
        self._pieces.append(more)

    def all(self) -> npt.NDArray[V]:
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0]


@dataclass(frozen=True)
class _Cut:
    """A worker's result for cutting some of the mesh's own triangles into clusters. The worker also reordered these
    triangles in place, cluster by cluster.

    Attributes:
        triangles: (C,) number of triangles of each cluster.
        spheres: (C, 4) centre and radius of a sphere around each cluster.
        encoded: the clusters' heads and streams.
        connections: the connected parts and the edges of these triangles.
    """

    triangles: Ints
    spheres: Reals
    encoded: Encoded
    connections: Connections


@dataclass(frozen=True)
class _Next:
    """A worker's result for simplifying a batch of G groups of clusters.

    Attributes:
        errors: (G,) error of each group's simplification, in object units.
        shrunk: (G,) whether the group became fewer clusters.
        spheres: (G, 4) centre and radius of a sphere around the clusters of each group. If vertices were added, the
            sphere is also around the clusters that replace the group.
        clusters: the clusters that replace the groups that became fewer clusters; None if no group did.
        added: vertices that the simplification added. In `clusters.corners`, they have the indices that follow those of
            the mesh's vertices, as if no other batch added vertices.
    """

    errors: npt.NDArray[np.float64]
    shrunk: npt.NDArray[np.bool_]
    spheres: Reals
    clusters: Clusters | None
    added: Added


@dataclass(frozen=True)
class _Runs:
    """The C clusters of a `Front`, divided into R runs of consecutive clusters. Each run is then divided into groups.

    Attributes:
        ends: (R + 1,) index of the first cluster of each run, then the number of clusters.
        starts: (C + 1,) index of the first triangle of each cluster, then the number of triangles.
        triangles: (C,) number of triangles of each cluster.
        spheres: (C, 4) centre and radius of a sphere around each cluster.
        sizes: (C,) bytes of each cluster's head and streams.
    """

    ends: Ints
    starts: Ints
    triangles: Ints
    spheres: Reals
    sizes: Ints


@dataclass(frozen=True)
class _Step:
    """The C clusters of a `Front`, divided into G groups.

    Attributes:
        order: (C,) indices of the clusters in the front, group by group.
        cluster_starts: (C + 1,) index of the first triangle of each cluster, then the number of triangles.
        cluster_triangles: (C,) number of triangles of each cluster.
        starts: (G + 1,) where the clusters of each group start in `order`, then the number of clusters.
        counts, triangles: (G,) number of clusters, and number of triangles, of each group.
        levels: (G,) level of detail of the clusters that replace each group.
        spheres: (G, 4) centre and radius of a sphere around each group's clusters.
    """

    order: Ints
    cluster_starts: Ints
    cluster_triangles: Ints
    starts: Ints
    counts: Ints
    triangles: Ints
    levels: Ints
    spheres: Reals


class _Levels:
    """The state of a build, which advances step by step.

    The workers of a team see all data as it was at the time of the fork. Of the data that workers use, only three items
    change after the fork: `corners` and the arrays of `shared_places`, which are in shared memory, and `mesh`. Code
    that changes `mesh`, or allocates new arrays for `shared_places`, ends the team's processes with `forget`.
    """

    def __init__(self, mesh: Mesh, progress: Progress, lock_borders: bool) -> None:
        self.mesh = mesh
        self.corners = shared(mesh.faces.shape, np.uint32)  # corners of the front, in shared memory
        self._told, self._progress = 0.0, progress
        self.lock_borders = lock_borders
        self.places = int(mesh.vertices.place.max()) + 1
        self.step = math.ldexp(1.0, mesh.vertices.exponent)
        self.shared_places = SharedPlaces()
        self.held: Words = np.empty(0, np.uint32)  # places whose vertices no level may move
        self.non_manifold_edges = 0
        self.heads: list[Words] = []
        self.streams: list[Words] = []
        self.lengths: list[Ints] = []
        self.clusters = 0
        self.spheres = _Column(np.empty((0, 4), np.float32))  # spheres of clusters
        self.errors = _Column(np.empty(0, np.float32))
        self.levels = _Column(np.empty(0, np.int64))
        self.sizes = _Column(np.empty(0, np.int64))
        self.members: list[tuple[Ints, Ints]] = []  # pairs of arrays: clusters, and the group that each of them joined
        self.group_spheres: list[Reals] = []
        self.group_errors: list[Reals] = []
        self.groups = 0
        self.unshrunk = 0
        self.steps = 0

    def calls(self) -> list[Call]:
        """The methods that the team's workers will call. The function that cuts the mesh is not one of them."""
        return [self._group, self._own, self._mark, self._hold, self._replace]

    def build(self, team: Team) -> Hierarchy:
        """Build all levels of detail, with the workers of `team`."""
        front = self._finest(team)
        total = len(front.triangles)
        while len(front.triangles) > 1:
            front = self._next(front, total, team)
        if len(front.triangles):
            self._end(front.numbers, np.zeros(len(front.numbers), np.int64))
        groups = np.full(self.clusters, -1)
        for clusters, numbers in self.members:
            groups[clusters] = numbers
        return Hierarchy(
            np.concatenate(self.heads), self.streams, np.concatenate(self.lengths), self.levels.all(), groups,
            np.concatenate(self.group_spheres), np.concatenate(self.group_errors), self.unshrunk,
            self.non_manifold_edges,
        )  # fmt: skip

    def _finest(self, team: Team) -> Front:
        """Cut the mesh's own faces into clusters, which form the first front."""
        what = f"cutting {len(self.mesh.faces):,} triangles"
        self.progress(what, 0.0)
        vertices, corners = self.mesh.vertices, self.corners
        self.shared_places.begin(self.places)
        count = len(corners)
        ends = np.linspace(0, count, -(-count // PIECE_TRIANGLES) + 1).astype(np.int64)
        pieces = [ends[a : b + 1] for a, b in _batches(np.diff(ends))]

        def own(number: int) -> None:
            self.shared_places.own(vertices.place, corners, *run(number))

        def mark(number: int) -> None:
            self.shared_places.mark(vertices.place, corners, *run(number))

        def run(number: int) -> tuple[Ints, Ints, Ints]:
            first = pieces[number][:1]
            return first, pieces[number][-1:] - first, np.array([number])

        def work(number: int) -> _Cut:
            batch = pieces[number]
            own = corners[batch[0] : batch[-1]]
            excerpt = Excerpt.of(vertices, own)
            counts = np.diff(batch)
            clusters = cut(excerpt.vertices, excerpt.corners, counts, np.zeros(len(counts), np.int64))
            own[:] = excerpt.numbers[clusters.corners]
            connections = Connections.of(excerpt, self.shared_places.several)
            return _Cut(clusters.triangles, clusters.spheres, clusters.encoded, connections)

        numbers = range(len(pieces))
        stages: list[Stage] = [
            *ordering(vertices.grid, self.mesh.faces, corners),
            (own, numbers),
            (mark, numbers),
        ]
        done = _Fraction(len(pieces), lambda fraction: self.progress(what, CUTTING * fraction))
        found = team.run_items(work, numbers, "cutting triangles", done, stages)
        self.mesh = replace(self.mesh, faces=np.empty((0, 3), np.uint32))
        whole = Whole.of(
            [each.connections for each in found],
            lambda number: np.unique(corners[pieces[number][0] : pieces[number][-1]]),
            vertices,
        )
        self.non_manifold_edges = whole.non_manifold_edges
        if self.lock_borders:
            self.held = whole.open_places
        if whole.parts is not None:
            self.mesh = replace(self.mesh, vertices=replace(vertices, parts=whole.parts))
            team.forget()
        kept = [
            self._keep(each.encoded, each.spheres, np.zeros(len(each.triangles), np.float32), None) for each in found
        ]
        triangles = np.concatenate([each.triangles for each in found])
        return Front(corners, triangles, np.concatenate(kept), np.zeros(len(triangles), np.int64))

    def _next(self, front: Front, total: int, team: Team) -> Front:
        """Run one step: divide the front's clusters into groups, and replace each group by fewer, simplified clusters.
        Return the next front. `total` is the number of clusters of the first front, for the progress."""
        what = f"simplifying {len(front.triangles):,} clusters"
        self.progress(what, self._fraction(len(front.triangles), total))
        numbers = front.numbers
        parts = self._grouped(front, team)
        order = np.argsort(parts, kind="stable")  # clusters, group by group
        counts = np.bincount(parts)  # number of clusters of each group
        starts = starts_of(counts)
        triangles = np.add.reduceat(front.triangles[order], starts[:-1])
        batches = _batches(triangles)
        least = np.maximum.reduceat(self.errors.all()[numbers[order]], starts[:-1]).astype(np.float64) * GROWTH
        step = _Step(
            order=order,
            cluster_starts=starts_of(front.triangles),
            cluster_triangles=front.triangles,
            starts=starts,
            counts=counts,
            triangles=triangles,
            levels=np.maximum.reduceat(self.levels.all()[numbers[order]], starts[:-1]) + 1,
            spheres=around_spheres(self.spheres.all()[numbers[order]], counts),
        )
        soon = self._fraction(len(front.triangles) // 2, total) - self._fraction(len(front.triangles), total)
        done = _Fraction(
            len(batches),
            lambda fraction: self.progress(what, self._fraction(len(front.triangles), total) + soon * fraction),
        )
        held = [self.held] if len(self.held) else []
        before: list[tuple[Call, Sequence[Any]]] = [(self._own, batches), (self._mark, batches), (self._hold, held)]
        those = team if int(triangles.sum()) > LEAST_TRIANGLES else ALONE.team(self.calls())
        found = those.run(self._replace, batches, step, what, done, before)
        self._numbered(found, team)

        fronts, stuck = [], []
        for (a, b), each in zip(batches, found, strict=True):
            errors = np.maximum(each.errors, least[a:b]).astype(np.float32)
            inside = rows_of(counts[a:b])
            own = order[starts[a] : starts[b]]
            number = np.cumsum(each.shrunk) - 1 + self.groups
            self.members.append((numbers[own[each.shrunk[inside]]], number[inside][each.shrunk[inside]]))
            self.group_spheres.append(each.spheres[each.shrunk])
            self.group_errors.append(errors[each.shrunk])
            self.groups += int(each.shrunk.sum())
            stuck.append(own[~each.shrunk[inside]])
            if (clusters := each.clusters) is not None:
                of = clusters.pieces
                kept = self._keep(clusters.encoded, each.spheres[of], errors[of], number[of])
                fronts.append(Front(clusters.corners, clusters.triangles, kept, np.zeros(len(kept), np.int64)))
        left = np.concatenate(stuck)
        tries = front.tries[left] + 1
        over = tries >= TRIES if sum(len(each.triangles) for each in fronts) else np.ones(len(tries), bool)
        if over.any():
            self.unshrunk += int(over.sum())
            _, part = np.unique(parts[left[over]], return_inverse=True)
            self._end(numbers[left[over]], part)
        rest = front.part(left[~over])
        fronts.append(replace(rest, tries=tries[~over]))
        return _joined(fronts, self.corners)

    def progress(self, what: str, fraction: float) -> None:
        """Report the progress. The reported fraction never decreases, even if a front shrinks less than expected."""
        self._told = max(self._told, fraction)
        self._progress(what, self._told)

    def _fraction(self, left: int, total: int) -> float:
        """Estimate the finished share (0 to 1) of the whole build when the current front has `left` clusters. `total`
        is the number of clusters of the first front."""
        return 1 - (1 - CUTTING) * left / total

    def _grouped(self, front: Front, team: Team) -> Ints:
        """Assign a group to each cluster of a front; return the groups' numbers (C,). In every other step, the runs are
        shifted by half a run, so that clusters on both sides of a border between runs can get into one group."""
        count = len(front.triangles)
        many = -(-count // RUN_CLUSTERS)
        ends = np.linspace(0, count, many + 1)
        if self.steps % 2 and many > 1:
            ends = np.concatenate([[0], (ends[1:] + ends[:-1]) / 2, [count]])
        self.steps += 1
        runs = _Runs(
            ends=ends.astype(np.int64),
            starts=starts_of(front.triangles),
            triangles=front.triangles,
            spheres=self.spheres.all()[front.numbers],
            sizes=self.sizes.all()[front.numbers],
        )
        found = team.run(self._group, range(len(ends) - 1), runs, "grouping clusters")
        first = starts_of([int(each.max()) + 1 for each in found])
        return np.concatenate([each + start for each, start in zip(found, first[:-1].tolist(), strict=True)])

    # ---- functions of the workers ---------------------------------------------------------------------------------

    def _group(self, runs: _Runs, run: int) -> Ints:
        """Divide the clusters of run number `run` into groups; return the group of each cluster, counted from 0."""
        a, b = runs.ends[run], runs.ends[run + 1]
        places = self.mesh.vertices.place[self.corners[runs.starts[a] : runs.starts[b]]]
        return group(places, runs.triangles[a:b], runs.spheres[a:b], runs.sizes[a:b])

    def _own(self, step: _Step, batch: tuple[int, int]) -> None:
        self.shared_places.own(self.mesh.vertices.place, self.corners, *self._runs(step, batch))

    def _mark(self, step: _Step, batch: tuple[int, int]) -> None:
        self.shared_places.mark(self.mesh.vertices.place, self.corners, *self._runs(step, batch))

    def _hold(self, _: _Step, places: Words) -> None:
        self.shared_places.hold(places)

    def _runs(self, step: _Step, batch: tuple[int, int]) -> tuple[Ints, Ints, Ints]:
        """Return three arrays with an element for each cluster of a batch of groups: the index of the cluster's first
        triangle, the number of its triangles, and its group's index in `step`."""
        chosen = step.order[step.starts[batch[0]] : step.starts[batch[1]]]
        groups = np.repeat(np.arange(*batch), step.counts[slice(*batch)])
        return step.cluster_starts[chosen], step.cluster_triangles[chosen], groups

    def _replace(self, step: _Step, batch: tuple[int, int]) -> _Next:
        """Simplify a batch of groups of clusters: reduce the number of triangles of each group, and cut the simplified
        triangles of each group into new clusters. `batch` is (first group, end) in the groups of `step`."""
        own = slice(*batch)
        triangles, counts, levels, spheres = step.triangles[own], step.counts[own], step.levels[own], step.spheres[own]
        corners = gathered(self.corners, *self._runs(step, batch)[:2])
        whole = len(self.mesh.vertices.grid)
        excerpt = Excerpt.of(self.mesh.vertices, corners)
        mesh = replace(self.mesh, vertices=excerpt.vertices)
        locked = self.shared_places.several[excerpt.vertices.place].astype(bool)
        found = simplify(mesh, excerpt.corners, triangles, locked)
        errors = found.errors * self.step
        if not len(found.corners):
            return _Next(errors, np.zeros(len(counts), bool), spheres, None, Added.none())
        clusters = cut(found.added.behind(excerpt.vertices), found.corners, found.counts, levels)
        if len(found.added.sources):
            both = np.concatenate([np.arange(len(counts)), clusters.pieces])
            around = np.concatenate([spheres, clusters.spheres])[np.argsort(both, kind="stable")]
            spheres = around_spheres(around, np.bincount(both))
        fewer = np.bincount(clusters.pieces, minlength=len(counts))
        shrunk = (fewer > 0) & (fewer < counts) & (levels <= MOST_LEVELS)
        kept, added = excerpt.in_mesh(clusters.corners, found.added, whole)
        clusters = replace(clusters, corners=kept).part(np.flatnonzero(shrunk[clusters.pieces]))
        return _Next(errors, shrunk, spheres, clusters, added)

    def _numbered(self, found: list[_Next], team: Team) -> None:
        """Add the vertices that simplification added in all batches to the mesh, with consecutive indices. Correct
        these indices in the new clusters."""
        first = len(self.mesh.vertices.grid)
        starts = starts_of([len(each.added.sources) for each in found])
        if not starts[-1]:
            return
        added = Added.joined([each.added for each in found])
        self.mesh = replace(self.mesh, vertices=added.behind(self.mesh.vertices))
        self.places = int(self.mesh.vertices.place.max()) + 1
        self.shared_places.begin(self.places)
        team.forget()
        for each, start in zip(found, starts[:-1].tolist(), strict=True):
            if start and each.clusters is not None:
                each.clusters.corners[each.clusters.corners >= first] += start

    def _keep(self, encoded: Encoded, spheres: Reals, errors: Reals, sources: Ints | None) -> Ints:
        """Give new clusters numbers, and keep their heads and streams for the file. Return the numbers.

        Args:
            encoded: the heads and streams of the new clusters.
            spheres, errors: the sphere and the error of each cluster. A cluster above the finest level has the sphere
                and the error of the group that it replaces.
            sources: the group that each cluster replaces; None at the finest level.
        """
        heads, count = encoded.heads, len(encoded.heads)
        words = heads.view(np.float32)
        words[:, layouts.CLUSTER_SPHERE : layouts.CLUSTER_SPHERE + 4] = spheres
        words[:, layouts.CLUSTER_ERROR] = errors
        replaced = np.full(count, -1) if sources is None else sources
        heads[:, layouts.CLUSTER_SOURCE] = replaced.astype(np.int32).view(np.uint32)
        self.heads.append(heads)
        self.streams.append(encoded.streams)
        self.lengths.append(encoded.counts)
        numbers = np.arange(count) + self.clusters
        self.clusters += count
        self.spheres.append(spheres)
        self.errors.append(errors)
        self.levels.append((heads[:, layouts.CLUSTER_COUNTS] >> 24).astype(np.int64))
        self.sizes.append(4 * (encoded.counts + LONGEST_HEAD))
        return numbers

    def _end(self, clusters: Ints, parts: Ints) -> None:
        """Form groups of clusters that no coarser clusters will replace. Such groups have the error NEVER.

        Args:
            clusters: numbers of these clusters.
            parts: the group of each of them, counted from 0.
        """
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts)
        self.members.append((clusters[order], parts[order] + self.groups))
        self.group_spheres.append(around_spheres(self.spheres.all()[clusters[order]], counts))
        self.group_errors.append(np.full(len(counts), layouts.NEVER, np.float32))
        self.groups += len(counts)


class _Fraction:
    """A callback that counts its calls, one for each finished item. Each call passes the finished share (0 to 1) of all
    `items` items to `told`."""

    def __init__(self, items: int, told: Callable[[float], None]) -> None:
        self.items, self.told, self.done = items, told, 0

    def __call__(self, _: int) -> None:
        self.done += 1
        self.told(self.done / self.items)


def _batches(triangles: Ints) -> list[tuple[int, int]]:
    """Divide items (pieces of the mesh or groups of clusters) into batches of consecutive items. Return (first item,
    end) of each batch. `triangles` has the number of triangles of each item."""
    starts = starts_of(triangles)
    batches = []
    first, total = 0, int(starts[-1])
    while first < len(triangles):
        done = int(starts[first])
        size = min(max((total - done) // SHARE, LEAST_TRIANGLES), MOST_TRIANGLES)
        end = max(first + 1, int(np.searchsorted(starts, done + size, "right")) - 1)
        batches.append((first, end))
        first = end
    return batches


def _joined(fronts: list[Front], corners: Words) -> Front:
    """Concatenate fronts to one front. Their corners are copied to the start of the array `corners`, one front after
    another."""
    count = sum(len(each.corners) for each in fronts)
    return Front(
        np.concatenate([each.corners for each in fronts], out=corners[:count]),
        np.concatenate([each.triangles for each in fronts]),
        np.concatenate([each.numbers for each in fronts]),
        np.concatenate([each.tries for each in fronts]),
    )
