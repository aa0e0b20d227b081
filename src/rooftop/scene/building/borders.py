"""Borders between batches of triangles: find the places (vertex positions) that several batches use, and combine the
batches' connected parts and open edges.

Workers find connected parts, and edges that do not have exactly two faces, batch by batch. A single process then
combines the results at places that several batches use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.compiled import array, loop, output
from rooftop.scene.building.excerpts import Excerpt
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import numbered, starts_of
from rooftop.scene.building.workers import shared

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]


class SharedPlaces:
    """Find the places (vertex positions) that several owners (batches or groups) use.

    Attributes:
        several: (places,) 1 if more than one owner uses a place; undefined for unused places.
    """

    def __init__(self) -> None:
        self.owner = np.empty(0, np.int32)
        self.several = np.empty(0, np.uint8)

    def begin(self, places: int) -> None:
        """Allocate the arrays for `places` different vertex positions. Call this before `own`."""
        if places > len(self.owner):
            self.owner, self.several = shared(places, np.int32), shared(places, np.uint8)

    def own(self, place: Numbers, corners: Numbers, starts: Ints, counts: Ints, owners: Ints) -> None:
        """First pass: record the owner of each place of these triangles.

        Workers write to the same arrays. If a place has several owners, any of them may be the last to write its own
        number to the place. In the second pass, the other owners of the place find a number that is not their own.

        Args:
            place: (V,) index of the place of each vertex.
            corners: (T, 3) vertices of all triangles.
            starts, counts: (R,) first triangle and number of triangles of each run.
            owners: (R,) the owner of each run.
        """
        _own(place, corners, starts, counts, owners, self.owner, self.several)

    def mark(self, place: Numbers, corners: Numbers, starts: Ints, counts: Ints, owners: Ints) -> None:
        """Second pass: mark each place of these triangles that another owner (batch or group) also uses. Arguments are
        as for `own`."""
        _mark(place, corners, starts, counts, owners, self.owner, self.several)

    def hold(self, places: Numbers) -> None:
        """Mark these places (vertex positions) as if several owners used them, so that simplification keeps the
        vertices there. Call this after `own` and `mark`."""
        self.several[places] = 1


@loop(
    array("uint32"), array("uint32", 2), array("int64"), array("int64"), array("int64"),
    output("int32"), output("uint8"),
)  # fmt: skip
def _own(place, corners, starts, counts, owners, owner, several):  # type: ignore[no-untyped-def]
    for run in range(len(starts)):
        for row in range(starts[run], starts[run] + counts[run]):
            for corner in range(3):
                at = place[corners[row, corner]]
                owner[at] = owners[run]
                several[at] = 0


@loop(
    array("uint32"), array("uint32", 2), array("int64"), array("int64"), array("int64"),
    array("int32"), output("uint8"),
)  # fmt: skip
def _mark(place, corners, starts, counts, owners, owner, several):  # type: ignore[no-untyped-def]
    for run in range(len(starts)):
        for row in range(starts[run], starts[run] + counts[run]):
            for corner in range(3):
                at = place[corners[row, corner]]
                if owner[at] != owners[run]:
                    several[at] = 1


@dataclass(frozen=True)
class Connections:
    """The connected parts and the edges of a batch of triangles.

    Attributes:
        parts: the number of connected parts of the batch's triangles.
        vertices: indices of the batch's vertices in the mesh; empty if there is one part.
        of_vertices: the part of each vertex, or None if there is one part.
        places: places that other batches also use.
        of_places: the part of each of these places.
        crowded: number of edges that have more than two faces and that no other batch can share.
        open_places: places of edges that have one face and that no other batch can share.
        edges: (E, 2) places of the edges that other batches may share, with the lower place first.
        faces: (E,) the number of faces of each edge in this batch.
    """

    parts: int
    vertices: Numbers
    of_vertices: Numbers | None
    places: Numbers
    of_places: Numbers
    crowded: int
    open_places: Numbers
    edges: Numbers
    faces: Ints

    @classmethod
    def of(cls, excerpt: Excerpt, several: npt.NDArray[np.uint8]) -> Connections:
        """Find the connected parts and the edges of a batch from its triangles.

        Args:
            excerpt: the triangles of the batch, with their vertices.
            several: (places,) whether other batches use a place.
        """
        at = excerpt.vertices.place
        places, own = numbered(at, int(at.max()) + 1)
        count = len(places)
        corners = own[excerpt.corners].astype(np.int64)
        following = corners[:, [1, 2, 0]]
        keys = (np.minimum(corners, following) * count + np.maximum(corners, following)).ravel()
        keys.sort()
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        faces = np.diff(np.append(first, len(keys)))
        low, high = np.divmod(keys[first], count)
        parts, labels = components(low, high, count)
        is_several = several[places].astype(bool)
        outside = is_several[low] & is_several[high]
        lonely = ~outside & (faces == 1)
        beside = np.flatnonzero(is_several)
        return cls(
            parts=parts,
            vertices=excerpt.numbers if parts > 1 else excerpt.numbers[:0],
            of_vertices=labels[own].astype(np.uint32) if parts > 1 else None,
            places=places[beside],
            of_places=labels[beside].astype(np.uint32),
            crowded=int((~outside & (faces > 2)).sum()),
            open_places=places[np.unique(np.concatenate([low[lonely], high[lonely]]))],
            edges=np.column_stack([places[low[outside]], places[high[outside]]]),
            faces=faces[outside],
        )


@dataclass(frozen=True)
class Whole:
    """The connected parts and the edges of the whole mesh, combined from the results of all batches of triangles.

    Attributes:
        parts: (V,) the part of each vertex; None if there is one part.
        non_manifold_edges: number of edges with more than two faces.
        open_places: places of edges with one face.
    """

    parts: Numbers | None
    non_manifold_edges: int
    open_places: Numbers

    @classmethod
    def of(cls, batches: list[Connections], used: Callable[[int], Numbers], vertices: Vertices) -> Whole:
        """Combine the results of all batches of triangles.

        Args:
            batches: results of the batches, in order.
            used: returns the vertices that a batch uses, given the batch's number.
            vertices: vertices of the mesh.
        """
        edges = np.concatenate([each.edges for each in batches]).astype(np.int64)
        keys, number = np.unique(edges[:, 0] << 32 | edges[:, 1], return_inverse=True)
        faces = np.bincount(number, np.concatenate([each.faces for each in batches]), len(keys))
        lonely = keys[faces == 1]
        open_places = np.concatenate(
            [*(each.open_places for each in batches), (lonely >> 32).astype(np.uint32), lonely.astype(np.uint32)]
        )
        return cls(
            _parts(batches, used, vertices),
            sum(each.crowded for each in batches) + int((faces > 2).sum()),
            np.unique(open_places),
        )

    @classmethod
    def of_faces(cls, vertices: Vertices, faces: Numbers) -> Whole:
        """Find the connected parts and the edges of a mesh whose triangles are a single batch."""
        several = np.zeros(int(vertices.place.max()) + 1, np.uint8)
        return cls.of([Connections.of(Excerpt.of(vertices, faces), several)], lambda _: np.unique(faces), vertices)


def _parts(batches: list[Connections], used: Callable[[int], Numbers], vertices: Vertices) -> Numbers | None:
    """Return, for each vertex of the mesh, the index of its connected part; or None if the mesh is a single part. Parts
    of different batches of triangles are one part if they share a vertex position."""
    first = starts_of([each.parts for each in batches])
    places = np.concatenate([each.places for each in batches])
    of = np.concatenate([each.of_places + start for each, start in zip(batches, first[:-1].tolist(), strict=True)])
    order = np.argsort(places, kind="stable")
    places, of = places[order], of[order]
    same = np.flatnonzero(places[1:] == places[:-1])
    parts, labels = components(of[same], of[same + 1], int(first[-1]))
    if parts == 1:
        return None
    found = np.zeros(len(vertices.grid), np.uint32)
    for number, (batch, start) in enumerate(zip(batches, first[:-1].tolist(), strict=True)):
        if batch.of_vertices is None:
            own = used(number)
            found[own] = found[vertices.merged[own]] = labels[start]
        else:
            found[batch.vertices] = labels[start + batch.of_vertices.astype(np.int64)]
    return found


def components(begin: Ints, end: Ints, count: int) -> tuple[int, npt.NDArray[np.int32]]:
    """Find the connected components of `count` items, given pairs of joined items.

    Returns the number of components, and the component of each item.

    Components are numbered in the order of their first items. In each round, every item becomes the child of a
    neighbour with a higher number. If lower numbers leave fewer roots, every item becomes the child of a neighbour with
    a lower number instead. Then each tree counts as one item. Each round at least halves the number of items that still
    have neighbours. (SciPy takes half the time, but a third of a second to import.)
    """
    things = np.arange(count, dtype=np.int32)
    root = things
    a, b = begin.astype(np.int32), end.astype(np.int32)
    while len(a):
        low, high = np.minimum(a, b), np.maximum(a, b)
        up, down = things.copy(), things.copy()
        up[low], down[high] = high, low
        below = up if np.count_nonzero(up == things) <= np.count_nonzero(down == things) else down
        while (below[below] != below).any():
            below = below[below]
        root, a, b = below[root], below[a], below[b]
        apart = a != b
        a, b = a[apart], b[apart]
    first = np.empty(count, np.int32)
    # The items are assigned in reverse order, so each root keeps its first item.
    first[root[::-1]] = things[::-1]
    is_first = first[root] == things
    return int(np.count_nonzero(is_first)), (np.cumsum(is_first, dtype=np.int32) - np.int32(1))[first[root]]
