"""The levels of a mesh: clusters, grouped, simplified, cut again, until one is left.

A step takes the front (the coarsest clusters so far), groups it, and replaces each group by the clusters of what it was
simplified to. Clusters of a group that does not shrink stay in the front, to be grouped otherwise the next time; after
a few times, and when nothing shrinks any more, they stay for good: nothing replaces them.

Batches of groups are worked on side by side. How the mesh is divided into batches, and where groups may lie, depends on
the mesh alone: the file is the same, bit for bit, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.borders import Connections, SharedPlaces, Whole, load_scipy
from rooftop.scene.building.clustering import Clusters, cut
from rooftop.scene.building.encoding import Encoded
from rooftop.scene.building.excerpts import Excerpt
from rooftop.scene.building.grouping import group
from rooftop.scene.building.meshes import Mesh
from rooftop.scene.building.orders import order_along_curve
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import rows_of, starts_of, taken
from rooftop.scene.building.simplifying import simplify
from rooftop.scene.building.spheres import around_spheres
from rooftop.scene.building.workers import ALONE, Workers, shared
from rooftop.scene.heads import head_words

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Progress = Callable[[str, float], None]
V = TypeVar("V", bound=np.generic)

PIECE_TRIANGLES = 1 << 14  # of the mesh as given, cut together: clusters do not cross from one piece into another
PIECES = 4  # of a batch
BATCH_TRIANGLES = 1 << 16  # of groups that are simplified together, at most
BATCHES = 64  # that there are at least, of
LEAST_TRIANGLES = 1 << 13  # each: as long as there is enough to do, 16 workers and more have it
RUN_CLUSTERS = 1 << 11  # neighbours among which groups are found: no group crosses from one run into another
GROWTH = 1 + 2**-10 + 2**-20  # an error is larger than those below it by 1 + 2^-10, also when rounded to float32
TRIES = 3
MOST_LEVELS = 255
LONGEST_HEAD = head_words(replaces=True, normals=True, uv=True)
CUTTING = 0.45  # of the time of a build, about


@dataclass(frozen=True)
class Front:
    """Clusters that nothing replaces yet.

    Attributes:
        corners: (T, 3) of all, cluster by cluster.
        triangles: (C,).
        numbers: (C,) of the clusters, in the order in which they were made.
        tries: (C,) how often each was in a group that did not shrink.
    """

    corners: Words
    triangles: Ints
    numbers: Ints
    tries: Ints

    def part(self, chosen: Ints) -> Front:
        """These clusters, in this order."""
        starts = starts_of(self.triangles)[:-1]
        rows = taken(starts[chosen], self.triangles[chosen])
        return Front(self.corners[rows], self.triangles[chosen], self.numbers[chosen], self.tries[chosen])


@dataclass(frozen=True)
class Hierarchy:
    """All clusters and groups.

    Attributes:
        heads: (C, CLUSTER_COLUMNS) of all clusters in the order in which they were made; CLUSTER_SOURCE is the group's
            number here, CLUSTER_STREAMS is not filled in.
        streams: of all clusters, one after another, in the parts in which they were made.
        lengths: (C,) the words of each cluster's streams.
        levels: (C,).
        groups: (C,) the group of each cluster.
        spheres: (G, 4) float32, errors: (G,) float32: of each group; the error of terminal ones is NEVER.
        non_manifold_edges: of the mesh.
        unshrunk: how many clusters nothing replaces because no group with them shrank.
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


def build_levels(mesh: Mesh, progress: Progress, workers: Workers, lock_borders: bool = False) -> Hierarchy:
    """Clusters of all levels, from the mesh's own faces to the root.

    Args:
        mesh: to build from.
        progress: is told what is being done, and which fraction is done.
        workers: that do it.
        lock_borders: whether vertices of edges with a single face stay where they are in all levels.
    """
    return _Levels(mesh, workers, progress, lock_borders).build()


class _Column(Generic[V]):
    """An array that grows: what is appended is joined when it is asked for."""

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
    """What a worker sends back of the mesh's own triangles, whose corners it has put into order in place."""

    triangles: Ints
    spheres: Reals
    encoded: Encoded
    connections: Connections


@dataclass(frozen=True)
class _Next:
    """What a worker sends back of a batch of groups.

    Attributes:
        errors: (G,) of simplifying, in object units. shrunk: (G,) whether a group has become fewer clusters.
        spheres: (G, 4) around the clusters of a group, and what replaces them if vertices were added.
        clusters: what replaces the groups that shrank, if any did.
        added: vertices; corners name them by numbers from V on, whatever other batches add.
    """

    errors: npt.NDArray[np.float64]
    shrunk: npt.NDArray[np.bool_]
    spheres: Reals
    clusters: Clusters | None
    added: Added


class _Levels:
    """What is made step by step."""

    def __init__(self, mesh: Mesh, workers: Workers, progress: Progress, lock_borders: bool) -> None:
        self.mesh = mesh
        self.workers = workers
        self._told, self._progress = 0.0, progress
        self.lock_borders = lock_borders
        self.places = int(mesh.vertices.place.max()) + 1
        self.step = math.ldexp(1.0, mesh.vertices.exponent)
        self.shared_places = SharedPlaces()
        self.held: Words = np.empty(0, np.uint32)  # places that no level may leave
        self.non_manifold_edges = 0
        self.heads: list[Words] = []
        self.streams: list[Words] = []
        self.lengths: list[Ints] = []
        self.clusters = 0
        self.spheres = _Column(np.empty((0, 4), np.float32))  # of clusters
        self.errors = _Column(np.empty(0, np.float32))
        self.levels = _Column(np.empty(0, np.int64))
        self.sizes = _Column(np.empty(0, np.int64))
        self.members: list[tuple[Ints, Ints]] = []  # clusters, and the group of each
        self.group_spheres: list[Reals] = []
        self.group_errors: list[Reals] = []
        self.groups = 0
        self.unshrunk = 0
        self.steps = 0

    def build(self) -> Hierarchy:
        front = self._finest()
        total = len(front.triangles)
        while len(front.triangles) > 1:
            front = self._next(front, total)
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

    def _finest(self) -> Front:
        """The mesh's own faces as clusters."""
        load_scipy()
        what = f"cutting {len(self.mesh.faces):,} triangles"
        self.progress(what, 0.0)
        vertices = self.mesh.vertices
        order = order_along_curve(vertices.grid, self.mesh.faces[:, 0], self.workers)
        corners = shared(self.mesh.faces.shape, np.uint32)
        np.take(self.mesh.faces, order, axis=0, out=corners, mode="clip")  # otherwise it makes a copy first
        self.mesh = replace(self.mesh, faces=np.empty((0, 3), np.uint32))
        del order
        count = len(corners)
        ends = np.linspace(0, count, -(-count // PIECE_TRIANGLES) + 1).astype(np.int64)
        pieces = [ends[i : i + PIECES + 1] for i in range(0, len(ends) - 1, PIECES)]
        shared_by = self.shared_places.stages(
            list(enumerate(pieces)),
            lambda batch: (vertices.place[corners[batch[1][0] : batch[1][-1]]], batch[0]),
            self.places,
            self.held,
        )

        def work(batch: Ints) -> _Cut:
            own = corners[batch[0] : batch[-1]]
            excerpt = Excerpt.of(vertices, own)
            counts = np.diff(batch)
            clusters = cut(excerpt.vertices, excerpt.corners, counts, np.zeros(len(counts), np.int64))
            own[:] = excerpt.numbers[clusters.corners]
            connections = Connections.of(excerpt, self.shared_places.several)
            return _Cut(clusters.triangles, clusters.spheres, clusters.encoded, connections)

        done = _Fraction(len(pieces), lambda fraction: self.progress(what, CUTTING * fraction))
        found = self.workers.run(work, pieces, "cutting triangles", done, shared_by)
        whole = Whole.of(
            [each.connections for each in found],
            lambda number: np.unique(corners[pieces[number][0] : pieces[number][-1]]),
            vertices,
        )
        self.non_manifold_edges = whole.non_manifold_edges
        if self.lock_borders:
            self.held = whole.open_places
        self.mesh = replace(self.mesh, vertices=replace(vertices, parts=whole.parts))
        numbers = [
            self._keep(each.encoded, each.spheres, np.zeros(len(each.triangles), np.float32), None) for each in found
        ]
        triangles = np.concatenate([each.triangles for each in found])
        return Front(corners, triangles, np.concatenate(numbers), np.zeros(len(triangles), np.int64))

    def _next(self, front: Front, total: int) -> Front:
        """One step."""
        what = f"simplifying {len(front.triangles):,} clusters"
        self.progress(what, self._fraction(len(front.triangles), total))
        numbers = front.numbers
        parts = self._grouped(front)
        order = np.argsort(parts, kind="stable")  # clusters, group by group
        counts = np.bincount(parts)  # clusters of each group
        starts = starts_of(counts)
        vertices = self.mesh.vertices
        triangles = np.add.reduceat(front.triangles[order], starts[:-1])
        batches = _batches(triangles)
        own_starts = starts_of(front.triangles)

        def own_corners(batch: tuple[int, int]) -> Words:
            chosen = order[starts[batch[0]] : starts[batch[1]]]
            return front.corners[taken(own_starts[chosen], front.triangles[chosen])]

        shared_by = self.shared_places.stages(
            batches,
            lambda batch: (vertices.place[own_corners(batch)], np.repeat(np.arange(*batch), triangles[slice(*batch)])),
            self.places,
            self.held,
        )
        spheres = around_spheres(self.spheres.all()[numbers[order]], counts)
        least = np.maximum.reduceat(self.errors.all()[numbers[order]], starts[:-1]).astype(np.float64) * GROWTH
        levels = np.maximum.reduceat(self.levels.all()[numbers[order]], starts[:-1]) + 1

        def work(batch: tuple[int, int]) -> _Next:
            a, b = batch
            return self._replaced(own_corners(batch), triangles[a:b], counts[a:b], levels[a:b], spheres[a:b])

        soon = self._fraction(len(front.triangles) // 2, total) - self._fraction(len(front.triangles), total)
        done = _Fraction(
            len(batches),
            lambda fraction: self.progress(what, self._fraction(len(front.triangles), total) + soon * fraction),
        )
        workers = self.workers if int(triangles.sum()) > LEAST_TRIANGLES else ALONE
        found = workers.run(work, batches, what, done, shared_by)
        self._numbered(found)

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
        return _joined(fronts)

    def progress(self, what: str, fraction: float) -> None:
        """Tell what is being done; a front that shrinks less than was expected does not turn back what was told."""
        self._told = max(self._told, fraction)
        self._progress(what, self._told)

    def _fraction(self, left: int, total: int) -> float:
        """Of the whole build, where so many of the finest clusters' number are left."""
        return 1 - (1 - CUTTING) * left / total

    def _grouped(self, front: Front) -> Ints:
        """The group of each cluster. Every other step the runs among which they are found lie elsewhere."""
        count = len(front.triangles)
        runs = -(-count // RUN_CLUSTERS)
        ends = np.linspace(0, count, runs + 1)
        if self.steps % 2 and runs > 1:
            ends = np.concatenate([[0], (ends[1:] + ends[:-1]) / 2, [count]])
        self.steps += 1
        ends = ends.astype(np.int64)
        starts = starts_of(front.triangles)
        spheres, sizes = self.spheres.all()[front.numbers], self.sizes.all()[front.numbers]
        place = self.mesh.vertices.place

        def work(run: int) -> Ints:
            a, b = ends[run], ends[run + 1]
            return group(place[front.corners[starts[a] : starts[b]]], front.triangles[a:b], spheres[a:b], sizes[a:b])

        found = self.workers.run(work, range(len(ends) - 1), "grouping clusters")
        first = starts_of([int(each.max()) + 1 for each in found])
        return np.concatenate([each + start for each, start in zip(found, first[:-1].tolist(), strict=True)])

    def _replaced(self, corners: Words, triangles: Ints, counts: Ints, levels: Ints, spheres: Reals) -> _Next:
        """Groups simplified and cut again.

        Args:
            corners: (T, 3) of all groups.
            triangles, counts: (G,) how many triangles and clusters each has.
            levels: (G,) of what replaces it.
            spheres: (G, 4) around its clusters.
        """
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

    def _numbered(self, found: list[_Next]) -> None:
        """Number vertices that were added over all batches; the mesh gets them."""
        first = len(self.mesh.vertices.grid)
        starts = starts_of([len(each.added.sources) for each in found])
        if not starts[-1]:
            return
        added = Added.joined([each.added for each in found])
        self.mesh = replace(self.mesh, vertices=added.behind(self.mesh.vertices))
        self.places = int(self.mesh.vertices.place.max()) + 1
        for each, start in zip(found, starts[:-1].tolist(), strict=True):
            if start and each.clusters is not None:
                each.clusters.corners[each.clusters.corners >= first] += start

    def _keep(self, encoded: Encoded, spheres: Reals, errors: Reals, sources: Ints | None) -> Ints:
        """Number new clusters and remember what will be written of them.

        Args:
            encoded: the clusters.
            spheres, errors: of each; those of its group, but for the finest.
            sources: the group that each replaces; none at the finest level.
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
        """Groups of clusters that nothing replaces."""
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts)
        self.members.append((clusters[order], parts[order] + self.groups))
        self.group_spheres.append(around_spheres(self.spheres.all()[clusters[order]], counts))
        self.group_errors.append(np.full(len(counts), layouts.NEVER, np.float32))
        self.groups += len(counts)


class _Fraction:
    """Tells what fraction of items is done, as they are."""

    def __init__(self, items: int, told: Callable[[float], None]) -> None:
        self.items, self.told, self.done = items, told, 0

    def __call__(self, _: int) -> None:
        self.done += 1
        self.told(self.done / self.items)


def _batches(triangles: Ints) -> list[tuple[int, int]]:
    """Consecutive groups of about as many triangles together: first and end of each batch."""
    size = min(max(int(triangles.sum()) // BATCHES, LEAST_TRIANGLES), BATCH_TRIANGLES)
    of = starts_of(triangles)[:-1] // size
    first = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
    return list(zip(first.tolist(), [*first[1:].tolist(), len(triangles)], strict=True))


def _joined(fronts: list[Front]) -> Front:
    return Front(
        np.concatenate([each.corners for each in fronts]),
        np.concatenate([each.triangles for each in fronts]),
        np.concatenate([each.numbers for each in fronts]),
        np.concatenate([each.tries for each in fronts]),
    )
