"""Where batches of triangles meet: the places that several use, and what can be said of the mesh only across them.

Parts that hang together and edges that are not between two faces are found batch by batch, on all cores. Only what
touches a place that several batches use is looked at again, by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import MissingExtraError
from rooftop.scene.building.excerpts import Excerpt
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import numbered, starts_of
from rooftop.scene.building.workers import Stage, shared

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]


class SharedPlaces:
    """Which places are used by several owners (batches, or groups)."""

    def __init__(self) -> None:
        self.owner = np.empty(0, np.int32)
        self.several = np.empty(0, np.uint8)

    def stages(
        self, batches: Sequence[Any], used: Callable[[Any], tuple[Numbers, Any]], places: int, held: Numbers
    ) -> list[Stage]:
        """What fills `several` (places,): 1 where more than one owner uses a place; says nothing of unused places.

        Workers write to the same arrays. Whichever owner of a place comes last, the others find another one there.

        Args:
            batches: of triangles.
            used: the places (T, 3) that a batch uses, and the owner of each triangle.
            places: how many there are.
            held: places that count as used by several.
        """
        if places > len(self.owner):
            self.owner, self.several = shared(places, np.int32), shared(places, np.uint8)

        def own(batch: Any) -> None:
            at, owners = used(batch)
            self.owner[at] = np.asarray(owners, np.int32)[..., None]
            self.several[at] = 0

        def mark(batch: Any) -> None:
            at, owners = used(batch)
            self.several[at[self.owner[at] != np.asarray(owners, np.int32)[..., None]]] = 1

        def hold(places: Numbers) -> None:
            self.several[places] = 1

        return [(own, batches), (mark, batches), (hold, [held] if len(held) else [])]


@dataclass(frozen=True)
class Connections:
    """What a batch says of its parts and edges.

    Attributes:
        parts: how many parts its triangles are.
        vertices: numbers in the mesh; of_vertices: the part of each, or None where there is one part.
        places: that other batches use, too; of_places: the part of each.
        crowded: edges, both of whose places no other batch uses, with more than two faces.
        open_places: places of such edges that have one face.
        edges: (E, 2) places of all other edges, the lower first; faces: (E,) how many each has here.
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
        """Of the triangles of a batch.

        Args:
            excerpt: the batch.
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
        parts, labels = _components(low, high, count)
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
    """What all batches say together.

    Attributes:
        parts: (V,) the part of each vertex; None if there is one part.
        non_manifold_edges: edges with more than two faces.
        open_places: of edges with one face.
    """

    parts: Numbers | None
    non_manifold_edges: int
    open_places: Numbers

    @classmethod
    def of(cls, batches: list[Connections], used: Callable[[int], Numbers], vertices: Vertices) -> Whole:
        """Of all batches.

        Args:
            batches: in order.
            used: the vertices that the triangles of a batch use, by its number.
            vertices: of the mesh.
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
        """Of a mesh as a single batch."""
        several = np.zeros(int(vertices.place.max()) + 1, np.uint8)
        return cls.of([Connections.of(Excerpt.of(vertices, faces), several)], lambda _: np.unique(faces), vertices)


def _parts(batches: list[Connections], used: Callable[[int], Numbers], vertices: Vertices) -> Numbers | None:
    first = starts_of([each.parts for each in batches])
    places = np.concatenate([each.places for each in batches])
    of = np.concatenate([each.of_places + start for each, start in zip(batches, first[:-1].tolist(), strict=True)])
    order = np.argsort(places, kind="stable")
    places, of = places[order], of[order]
    same = np.flatnonzero(places[1:] == places[:-1])
    parts, labels = _components(of[same], of[same + 1], int(first[-1]))
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


def load_scipy() -> None:
    """Load what finds parts, once, before workers would each load it.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        from scipy.sparse import csgraph  # noqa: F401
    except ImportError as error:
        raise MissingExtraError('building a scene needs scipy: pip install "rooftop[scene]"') from error


def _components(begin: Ints, end: Ints, count: int) -> tuple[int, npt.NDArray[np.int32]]:
    """How many parts so many things are, and the part of each, if these pairs are connected."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    graph = csr_matrix((np.ones(len(begin), np.int8), (begin, end)), (count, count))
    parts, labels = connected_components(graph, directed=False)
    return int(parts), labels
