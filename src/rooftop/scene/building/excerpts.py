"""Excerpts of a mesh: the vertices that a batch of triangles uses, numbered from 0.

Because of this numbering, the size of a batch's arrays does not depend on the size of the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene.building.meshes import Vertices
from rooftop.scene.building.parts import Added
from rooftop.scene.building.ragged import numbered

Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Excerpt:
    """A batch of triangles of a mesh, and the vertices that these triangles use.

    Attributes:
        vertices: the vertices that the triangles use, and the vertices that represent them (`Vertices.merged`).
        numbers: (V,) the index of each vertex in the mesh, ascending.
        corners: (T, 3) corners of the triangles, as indices of `vertices`.
    """

    vertices: Vertices
    numbers: Numbers
    corners: Numbers

    @classmethod
    def of(cls, vertices: Vertices, corners: Numbers) -> Excerpt:
        """Make an excerpt of a mesh with these triangles. `corners` (T, 3) are indices of the mesh's vertices."""
        numbers, local = numbered(corners, len(vertices.grid))
        merged = vertices.merged[numbers]
        if (merged != numbers).any():
            numbers = np.union1d(numbers, merged).astype(np.uint32)
            merged = np.searchsorted(numbers, vertices.merged[numbers]).astype(np.uint32)
            local = np.searchsorted(numbers, corners).astype(np.uint32)
        else:
            merged = np.arange(len(numbers), dtype=np.uint32)
        rows: dict[str, Any] = {
            name: None if (column := getattr(vertices, name)) is None else column[numbers]
            for name in ("grid", "place", "normals", "uv", "colors", "materials", "parts")
        }
        return cls(replace(vertices, merged=merged, **rows), numbers, local)

    def in_mesh(self, corners: Numbers, added: Added, vertices: int) -> tuple[Numbers, Added]:
        """Convert `corners` and `added.sources`, the vertex that each added vertex copies, from indices in this excerpt
        to indices in the mesh. The mesh has `vertices` vertices, and the added vertices follow them."""
        numbers = np.concatenate([self.numbers, np.arange(vertices, vertices + len(added.sources), dtype=np.uint32)])
        return numbers[corners], replace(added, sources=self.numbers[added.sources].astype(np.int64))
