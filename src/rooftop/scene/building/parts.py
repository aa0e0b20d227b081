"""New vertices for the small parts of a mesh that `thinning` enlarges, such as leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.ragged import starts_of

Ints = npt.NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Added:
    """Copies of the mesh's vertices, moved to other positions.

    Attributes:
        sources: (N,) indices of the copied vertices in the mesh.
        grid: (N, 3) int32 positions, in steps of the grid.
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
        """Concatenate the added vertices of several batches of triangles. Renumber their places, so that vertices of
        different batches never share a place."""
        first = starts_of([int(each.places.max(initial=-1)) + 1 for each in several])
        return cls(
            np.concatenate([each.sources for each in several]),
            np.concatenate([each.grid for each in several]),
            np.concatenate([each.places + start for each, start in zip(several, first[:-1].tolist(), strict=True)]),
        )

    def behind(self, vertices: Vertices) -> Vertices:
        """The vertices of the mesh, followed by the added vertices."""
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
