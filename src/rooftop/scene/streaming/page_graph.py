"""Number all pages of a scene's meshes, and find the pages that each page needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rooftop.scene.dependencies import PageNeeds
from rooftop.scene.geometry import Geometry

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class PageGraph:
    """The pages of all meshes, mesh after mesh. A page needs only earlier pages, so the graph has no cycles.

    Attributes:
        meshes: the meshes of the pages.
        count: number of all pages.
        first_page, first_group: (meshes,) the index of each mesh's first page and first group.
        needs: for each page, the pages that it needs directly.
        roots: (pages,) whether a page is always resident.
        limits: (pages, 4) for each page: number of its words, number of its clusters according to the tree, attributes
            of its mesh's pages (`Geometry.attributes`), and number of groups of its mesh.
        group_page: (groups,) the page of each group.
        mesh_of: (pages,) the mesh of each page.
        offsets, lengths, checksums: (pages,) int64, position, size and checksum of each page in its file.
    """

    def __init__(self, meshes: Sequence[Geometry]) -> None:
        self.meshes = tuple(meshes)
        pages, groups = ([*values] for values in zip(*((m.pages, m.meta["groups"]) for m in meshes), strict=True))
        self.first_page, self.first_group = np.cumsum([0, *pages])[:-1], np.cumsum([0, *groups])[:-1]
        self.count = sum(pages)
        self.needs = PageNeeds.joined(mesh.needs for mesh in meshes)
        self.roots = np.zeros(self.count, bool)
        of_meshes = list(zip(self.first_page.tolist(), meshes, strict=True))
        for first, mesh in of_meshes:
            self.roots[mesh.root_pages + first] = True
        self.limits = np.concatenate(
            [
                np.stack(np.broadcast_arrays(m.page_lengths // 4, m.page_reach, m.attributes, m.meta["groups"]), axis=1)
                for m in meshes
            ]
        )
        self.mesh_of = np.repeat(np.arange(len(self.meshes)), pages)
        self.offsets = np.concatenate([mesh.page_offsets for mesh in meshes])
        self.lengths = np.concatenate([mesh.page_lengths for mesh in meshes])
        self.checksums = np.concatenate([mesh.checksums for mesh in meshes]).astype(np.int64)
        self.group_page = np.concatenate([mesh.group_pages + first for first, mesh in of_meshes])

    def place(self, page: int) -> tuple[int, int]:
        """The mesh of a page, and the page's number among the pages of that mesh's file. `page` counts the pages of all
        meshes."""
        mesh = int(self.mesh_of[page])
        return mesh, page - int(self.first_page[mesh])

    def with_needs(self, chosen: Mask) -> Mask:
        """A mask (pages,) of the pages in the mask `chosen` and all pages that they need, directly or indirectly."""
        found = chosen.copy()
        new = np.flatnonzero(chosen)
        while len(new):
            needed, _ = self.needs.of_all(new)
            new = distinct(needed[~found[needed]])
            found[new] = True
        return found


def distinct(pages: Ints) -> Ints:
    """Sort pages and drop duplicates. (`np.unique` would first import masked arrays, which takes 15 ms.)"""
    found = np.sort(pages)
    return found[np.concatenate([[True], found[1:] != found[:-1]])] if len(found) else found
