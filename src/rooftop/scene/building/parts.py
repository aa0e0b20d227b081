"""Parts of a mesh that hang together, and vertices that they get when they grow (see `thinning`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.errors import MissingExtraError
from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import starts_of

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]
T = TypeVar("T", bound=np.generic)


def parts_of(vertices: Vertices, faces: Numbers) -> Numbers | None:
    """The part of each vertex (V,): those that faces connect, by place, have one number. None if there is one part.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import connected_components
    except ImportError as error:
        raise MissingExtraError('building a scene needs scipy: pip install "rooftop[scene]"') from error
    triangles, places = len(faces), int(vertices.place.max()) + 1
    # A graph of triangles and places: each triangle is a row with its three places.
    number: type[np.signedinteger[Any]] = np.int32 if 3 * triangles + places < 1 << 31 else np.int64
    ends = np.minimum(3 * np.arange(triangles + places + 1), 3 * triangles).astype(number)
    columns = (vertices.place[faces].ravel().astype(np.int64) + triangles).astype(number)
    graph = csr_matrix((np.ones(len(columns), np.int8), columns, ends), (triangles + places,) * 2)
    count, labels = connected_components(graph, directed=False)
    return None if count == 1 else labels[triangles:][vertices.place].astype(np.uint32)


@dataclass(frozen=True)
class Added:
    """Vertices that are copies of others at other places.

    Attributes:
        sources: (N,) which they copy.
        grid: (N, 3) int32 where they are, in steps of the grid.
        places: (N,) equal for vertices at the same place, numbered from 0.
    """

    sources: Ints
    grid: npt.NDArray[np.int32]
    places: Ints

    @classmethod
    def none(cls) -> Added:
        return cls(np.empty(0, np.int64), np.empty((0, 3), np.int32), np.empty(0, np.int64))

    @classmethod
    def joined(cls, several: list[Added]) -> Added:
        """All of these, in order. Places of different ones stay different."""
        first = starts_of([int(each.places.max(initial=-1)) + 1 for each in several])
        return cls(
            np.concatenate([each.sources for each in several]),
            np.concatenate([each.grid for each in several]),
            np.concatenate([each.places + start for each, start in zip(several, first[:-1].tolist(), strict=True)]),
        )

    def behind(self, vertices: Vertices) -> Vertices:
        """All vertices, these behind the others."""
        of, count = self.sources, len(vertices.grid)
        if not len(of):
            return vertices
        places = (self.places + int(vertices.place.max()) + 1).astype(np.uint32)
        return replace(
            vertices,
            grid=np.concatenate([vertices.grid, self.grid]),
            place=np.concatenate([vertices.place, places]),
            normals=_with(vertices.normals, of),
            uv=_with(vertices.uv, of),
            colors=_with(vertices.colors, of),
            materials=_with(vertices.materials, of),
            merged=np.concatenate([vertices.merged, np.arange(count, count + len(of), dtype=np.uint32)]),
            parts=_with(vertices.parts, of),
        )


def _with(column: npt.NDArray[T] | None, copied: Ints) -> npt.NDArray[T] | None:
    return None if column is None else np.concatenate([column, column[copied]])
