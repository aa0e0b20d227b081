"""The levels of a mesh: clusters, grouped, simplified, cut again, until one is left.

A step takes the front (the coarsest clusters so far), groups it, and replaces each group by the clusters of what it was
simplified to. Clusters of a group that does not shrink stay in the front, to be grouped otherwise the next time; after
a few times, and when nothing shrinks any more, they stay for good: nothing replaces them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.clustering import Clusters, cut
from rooftop.scene.building.grouping import group
from rooftop.scene.building.meshes import Mesh
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.parts import Added, parts_of
from rooftop.scene.building.ragged import rows_of, starts_of, taken
from rooftop.scene.building.simplifying import Simplified, simplify
from rooftop.scene.building.spheres import around_spheres

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Progress = Callable[[str, float], None]
T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V", bound=np.generic)

PIECE_TRIANGLES = 1 << 14  # of the mesh as given, cut together: clusters do not cross from one piece into another
BATCH_TRIANGLES = 1 << 16  # a task of one thread
GROWTH = 1 + 2**-10 + 2**-20  # an error is larger than those below it by 1 + 2^-10, also when rounded to float32
TRIES = 3
MOST_LEVELS = 255


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
        heads: (C, CLUSTER_WORDS) of all clusters in the order in which they were made; CLUSTER_SOURCE is the group's
            number here, CLUSTER_STREAMS and CLUSTER_GROUP are not filled in.
        streams: of all clusters, one after another, in the parts in which they were made.
        lengths: (C,) the words of each cluster's streams.
        levels: (C,).
        groups: (C,) the group of each cluster.
        spheres: (G, 4) float32, errors: (G,) float32: of each group; the error of terminal ones is NEVER.
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


def build_levels(mesh: Mesh, progress: Progress, threads: int | None = None) -> Hierarchy:
    """Clusters of all levels, from the mesh's own faces to the root."""
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        try:
            return _Levels(mesh, pool, progress).build()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


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


class _Levels:
    """What is made step by step."""

    def __init__(self, mesh: Mesh, pool: ThreadPoolExecutor, progress: Progress) -> None:
        self.mesh = mesh
        self.pool = pool
        self.progress = progress
        self.step = math.ldexp(1.0, mesh.vertices.exponent)
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

    def build(self) -> Hierarchy:
        parts = self.pool.submit(parts_of, self.mesh.vertices, self.mesh.faces)
        front = self._finest()
        self.mesh = replace(self.mesh, vertices=replace(self.mesh.vertices, parts=parts.result()))
        total = len(front.triangles)
        while len(front.triangles) > 1:
            self.progress(f"simplifying {len(front.triangles):,} clusters", 1 - len(front.triangles) / total)
            front = self._next(front)
        if len(front.triangles):
            self._end(front.numbers, np.zeros(len(front.numbers), np.int64))
        groups = np.full(self.clusters, -1)
        for clusters, numbers in self.members:
            groups[clusters] = numbers
        return Hierarchy(
            np.concatenate(self.heads), self.streams, np.concatenate(self.lengths), self.levels.all(), groups,
            np.concatenate(self.group_spheres), np.concatenate(self.group_errors), self.unshrunk,
        )  # fmt: skip

    def _finest(self) -> Front:
        """The mesh's own faces as clusters."""
        self.progress(f"cutting {len(self.mesh.faces):,} triangles", 0.0)
        faces = self.mesh.faces
        order = np.argsort(morton_codes(self.mesh.vertices.grid)[faces[:, 0]], kind="stable")
        pieces = np.array_split(order, -(-len(order) // PIECE_TRIANGLES))
        batches = [pieces[i : i + 4] for i in range(0, len(pieces), 4)]

        def work(batch: list[Ints]) -> Clusters:
            counts = np.array([len(piece) for piece in batch])
            return cut(self.mesh.vertices, faces[np.concatenate(batch)], counts, np.zeros(len(batch), np.int64))

        cut_pieces = self._run(work, batches)
        return _joined(
            [self._keep(each, each.spheres, np.zeros(len(each.triangles), np.float32)) for each in cut_pieces]
        )

    def _next(self, front: Front) -> Front:
        """One step."""
        numbers = front.numbers
        parts = group(
            self.mesh.vertices.place[front.corners],
            front.triangles,
            self.spheres.all()[numbers],
            self.sizes.all()[numbers],
        )
        front = front.part(np.argsort(parts, kind="stable"))
        parts = np.sort(parts)
        counts = np.bincount(parts)  # clusters of each group
        locked = self._locked(front, parts)

        spheres = around_spheres(self.spheres.all()[front.numbers], counts)
        starts = starts_of(counts)
        least = np.maximum.reduceat(self.errors.all()[front.numbers], starts[:-1]).astype(np.float64) * GROWTH
        levels = np.maximum.reduceat(self.levels.all()[front.numbers], starts[:-1]) + 1
        triangles = np.add.reduceat(front.triangles, starts[:-1])
        ends = starts_of(triangles)
        batches = _batches(triangles)

        def simplified(batch: tuple[int, int]) -> Simplified:
            a, b = batch
            return simplify(self.mesh, front.corners[ends[a] : ends[b]], triangles[a:b], locked)

        def again_cut(batch: tuple[tuple[int, int], Simplified]) -> tuple[Clusters | None, npt.NDArray[np.bool_]]:
            (a, b), found = batch
            if not len(found.corners):
                return None, np.zeros(b - a, bool)
            clusters = cut(self.mesh.vertices, found.corners, found.counts, levels[a:b])
            fewer = np.bincount(clusters.pieces, minlength=b - a)
            return clusters, (fewer > 0) & (fewer < counts[a:b]) & (levels[a:b] <= MOST_LEVELS)

        found = self._numbered(self._run(simplified, batches))
        fronts, stuck = [], []
        again = self._run(again_cut, list(zip(batches, found, strict=True)))
        for (a, b), each, (clusters, shrunk) in zip(batches, found, again, strict=True):
            errors = np.maximum(each.errors * self.step, least[a:b]).astype(np.float32)
            if clusters is not None and len(each.added.sources):
                both = np.concatenate([np.arange(b - a), clusters.pieces])
                order = np.argsort(both, kind="stable")
                all_spheres = np.concatenate([spheres[a:b], clusters.spheres])[order]
                spheres[a:b] = around_spheres(all_spheres, np.bincount(both))
            inside = rows_of(counts[a:b])
            own = front.numbers[starts[a] : starts[b]]
            number = np.cumsum(shrunk) - 1 + self.groups
            self.members.append((own[shrunk[inside]], number[inside][shrunk[inside]]))
            self.group_spheres.append(spheres[a:b][shrunk])
            self.group_errors.append(errors[shrunk])
            self.groups += int(shrunk.sum())
            stuck.append(np.flatnonzero(~shrunk[inside]) + starts[a])
            if clusters is not None:
                fronts.append(
                    self._keep(clusters, spheres[a:b][clusters.pieces], errors[clusters.pieces], number, shrunk)
                )
        left = front.part(np.concatenate(stuck))
        tries = left.tries + 1
        over = tries >= TRIES if fronts and sum(len(each.triangles) for each in fronts) else np.ones(len(tries), bool)
        if over.any():
            self.unshrunk += int(over.sum())
            _, part = np.unique(parts[np.concatenate(stuck)][over], return_inverse=True)
            self._end(left.numbers[over], part)
        rest = np.flatnonzero(~over)
        fronts.append(left.part(rest))
        joined = _joined(fronts)
        joined.tries[len(joined.tries) - len(rest) :] = tries[rest]
        return joined

    def _numbered(self, found: list[Simplified]) -> list[Simplified]:
        """With vertices that were added numbered over all batches; the mesh gets them."""
        first = len(self.mesh.vertices.grid)
        starts = starts_of([len(each.added.sources) for each in found])
        if starts[-1]:
            added = Added.joined([each.added for each in found])
            self.mesh = replace(self.mesh, vertices=added.behind(self.mesh.vertices))
        for each, start in zip(found, starts[:-1].tolist(), strict=True):
            each.corners[each.corners >= first] += start
        return found

    def _locked(self, front: Front, parts: Ints) -> npt.NDArray[np.bool_]:
        """Whether a vertex's place is used by more than one group."""
        place = self.mesh.vertices.place
        at = place[front.corners]
        of = np.repeat(parts, front.triangles).astype(np.int32)[:, None]
        owner = np.zeros(int(place.max()) + 1, np.int32)
        owner[at] = of  # the last one to write
        shared = np.zeros(len(owner), bool)
        shared[at[owner[at] != of]] = True
        return shared[place]

    def _keep(
        self, clusters: Clusters, spheres: Reals, errors: Reals, sources: Ints | None = None,
        chosen: npt.NDArray[np.bool_] | None = None,
    ) -> Front:  # fmt: skip
        """Number new clusters and remember what will be written of them.

        Args:
            clusters: as they were cut.
            spheres, errors: of each; those of its group, but for the finest.
            sources: (pieces,) the group that each piece replaces; none at the finest level.
            chosen: (pieces,) from which pieces clusters are kept; by default from all.
        """
        encoded = clusters.encoded
        kept = np.arange(len(clusters.triangles)) if chosen is None else np.flatnonzero(chosen[clusters.pieces])
        front = Front(clusters.corners, clusters.triangles, kept, np.zeros(len(kept), np.int64))
        heads, streams = encoded.heads[kept], encoded.streams
        if len(kept) < len(clusters.triangles):
            rows = taken(starts_of(clusters.triangles)[kept], clusters.triangles[kept])
            front = Front(clusters.corners[rows], clusters.triangles[kept], kept, front.tries)
            streams = streams[taken(starts_of(encoded.counts)[kept], encoded.counts[kept])]
        words = heads.view(np.float32)
        words[:, layouts.CLUSTER_SPHERE : layouts.CLUSTER_SPHERE + 4] = spheres[kept]
        words[:, layouts.CLUSTER_ERROR] = errors[kept]
        replaced = np.full(len(kept), -1) if sources is None else sources[clusters.pieces[kept]]
        heads[:, layouts.CLUSTER_SOURCE] = replaced.astype(np.int32).view(np.uint32)
        self.heads.append(heads)
        self.streams.append(streams)
        self.lengths.append(encoded.counts[kept])
        numbers = np.arange(len(kept)) + self.clusters
        self.clusters += len(kept)
        self.spheres.append(spheres[kept])
        self.errors.append(errors[kept])
        self.levels.append((heads[:, layouts.CLUSTER_COUNTS] >> 24).astype(np.int64))
        self.sizes.append(4 * (encoded.counts[kept] + layouts.CLUSTER_WORDS))
        return Front(front.corners, front.triangles, numbers, front.tries)

    def _end(self, clusters: Ints, parts: Ints) -> None:
        """Groups of clusters that nothing replaces."""
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts)
        self.members.append((clusters[order], parts[order] + self.groups))
        self.group_spheres.append(around_spheres(self.spheres.all()[clusters[order]], counts))
        self.group_errors.append(np.full(len(counts), layouts.NEVER, np.float32))
        self.groups += len(counts)

    def _run(self, work: Callable[[T], R], batches: list[T]) -> list[R]:
        """The results of all batches, in order."""
        futures: list[Future[R]] = [self.pool.submit(work, batch) for batch in batches]
        return [future.result() for future in futures]


def _batches(triangles: Ints) -> list[tuple[int, int]]:
    """Consecutive groups of about BATCH_TRIANGLES together: first and end of each batch."""
    of = starts_of(triangles)[:-1] // BATCH_TRIANGLES
    first = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
    return list(zip(first.tolist(), [*first[1:].tolist(), len(triangles)], strict=True))


def _joined(fronts: list[Front]) -> Front:
    return Front(
        np.concatenate([each.corners for each in fronts]),
        np.concatenate([each.triangles for each in fronts]),
        np.concatenate([each.numbers for each in fronts]),
        np.concatenate([each.tries for each in fronts]),
    )
