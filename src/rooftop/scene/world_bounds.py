"""Keep the box around all instances of a scene up to date. Usually, only changed instances are read; all are read if an
instance that touched a side of the box has moved."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rooftop.scene.geometry import Geometry
from rooftop.scene.instances import Floats, Instances, grown


class WorldBounds:
    """The bounds of a scene's instances, cached between calls. Renderers in several threads may ask for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = self._known = 0
        self._sides: Floats = np.empty((0, 6))  # for each instance, the lowest corner and the negated highest corner
        self._lowest = np.full(6, np.inf)  # the minimum of `_sides` over all instances
        self._halves = np.empty((0, 2, 3))  # for each mesh: centre and half size of its box

    def __reduce__(self) -> tuple[type[WorldBounds], tuple[()]]:
        """Pickle and copy without the cached values; the copy computes them again."""
        return WorldBounds, ()

    def __setstate__(self, state: object) -> None:
        """Unpickle what an earlier version of Rooftop has pickled. Drop the cached values in it, and compute them
        again when needed."""
        self.__init__()  # type: ignore[misc]

    def of(self, instances: Instances, meshes: Sequence[Geometry]) -> Floats:
        """Return the lowest and highest corner (2, 3) of the box around all instances. There must be at least one
        instance.
        """
        with self._lock:
            self._update(instances, meshes)
            corners = self._lowest.reshape(2, 3).copy()
        np.negative(corners[1], out=corners[1])
        return corners

    def _update(self, instances: Instances, meshes: Sequence[Geometry]) -> None:
        rows = instances.changed(self._version, self._known)
        if len(rows):
            self._sides = grown(self._sides, instances.count)
            before = self._sides[rows[rows < self._known]]
            sides = self._sides[rows] = self._sides_of(instances, rows, meshes)
            self._known = instances.count
            if (before <= self._lowest).any():  # an instance that touched the box's sides has moved
                self._lowest = self._sides[: self._known].min(0)
            else:
                self._lowest = np.minimum(self._lowest, sides.min(0))
        self._version = instances.changes.version

    def _sides_of(self, instances: Instances, rows: NDArray[np.int64], meshes: Sequence[Geometry]) -> Floats:
        if len(self._halves) != len(meshes):
            boxes = np.array([np.add(mesh.meta["bounds"], mesh.meta["origin"]) for mesh in meshes])
            self._halves = np.stack([boxes.mean(1), (boxes[:, 1] - boxes[:, 0]) / 2], 1)
        mesh_of, transforms = instances.mesh_of[rows], instances.transforms[rows]
        center, half = self._halves[mesh_of].swapaxes(0, 1)
        center = np.einsum("nij,nj->ni", transforms[:, :3, :3], center) + transforms[:, :3, 3]
        half = np.einsum("nij,nj->ni", abs(transforms[:, :3, :3]), half)
        sides = np.concatenate([center - half, -(center + half)], 1)
        sides[mesh_of < 0] = np.inf
        return sides
