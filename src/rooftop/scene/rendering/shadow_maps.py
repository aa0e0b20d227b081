"""The shadow maps of a scene's lights: choose the maps that a frame must draw, and own the memory of all maps.

A map is not redrawn while its view, the instances that cast shadows into it, and the allowed error stay the same. The
first three stages draw all other maps, as views without a previous frame: the first batch of maps in the same launches
as the cameras' views, later batches in launches of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray

from rooftop.scene.cameras import Camera
from rooftop.scene.instances import Floats, Instances, grown, most_stretch
from rooftop.scene.lights import DirectionalLight, Light, PointLight, SpotLight
from rooftop.scene.rendering import buffers
from rooftop.scene.rendering.canvases import MOST_THREADS
from rooftop.scene.rendering.stages import Stages
from rooftop.scene.rendering.uploads import Meshes, Uploaded, lens_of, uploaded

# Limit for a batch of several shadow maps. It applies to the number of texels, and to the number of views times the
# number of instances, since both take memory.
MOST_AT_ONCE = 2**26
MOST_KEPT = 16  # maximum number of cached argument lists of `ShadowMaps.keep`
ALIGNED = 16  # bytes


@dataclass(frozen=True)
class Drawing:
    """Settings with which shadow maps are drawn.

    Attributes:
        one_sided, cuda_cpp: as in `Stages`.
        pixel_error: allowed error of the surface in texels.
    """

    one_sided: bool
    cuda_cpp: bool
    pixel_error: float


class ShadowMaps:
    """The shadow maps of a scene's lights, cached from frame to frame.

    Attributes:
        values: `buffers.Lights`, as of the most recent frame.
        views: views of all maps.
    """

    views: list[Camera]

    def __init__(self, device: torch.device) -> None:
        self.device, self.values = device, buffers.Lights()
        self._lights: tuple[Light, ...] = ()
        self._sizes: list[int] = []  # sizes of all maps
        self._drawn: list[object] = []  # for each map, the inputs with which it was drawn; None: not drawn yet
        self._wanted: list[object] = []
        self._seen: object = None  # the inputs from which the views were computed
        self._casters = _Casters()
        self._staged: _Staged | None = None
        self._kept: dict[tuple[int, ...], list[Any]] = {}  # arguments of `keep_depths`, by the numbers of the maps

    def due(
        self,
        lights: tuple[Light, ...],
        cameras: Sequence[Camera],
        meshes: Meshes,
        instances: Instances,
        bounds: Floats,
        drawing: Drawing,
    ) -> tuple[int, ...]:
        """Return the numbers of the maps that a frame must draw. After these maps are drawn, call `drawn`.

        Args:
            lights: lights of the scene, at least one.
            cameras: cameras of the frame.
            meshes, instances: the scene's meshes and instances.
            bounds: (2, 3), a box around all instances.
            drawing: how maps are drawn.

        Raises:
            ValueError: the maps have too many texels.
        """
        seen = lights, tuple(camera.key for camera in cameras), bounds.tobytes(), drawing
        if seen != self._seen:
            maps = [light.maps(cameras, bounds) for light in lights]
            views = [view for each in maps for view in each]
            self._place(lights, [len(each) for each in maps], views)
            self.views, self._wanted, self._seen = views, [(drawing, view.key) for view in views], seen
        changed = self._casters.changed(meshes, instances)
        for number, view in enumerate(self.views):
            if changed is None or _sees(view, *changed):
                self._drawn[number] = None
        due = tuple(k for k, wanted in enumerate(self._wanted) if self._drawn[k] != wanted)
        for number in due:
            self._drawn[number] = None  # a frame that fails may have overwritten these maps
        return due

    def batches(self, due: Sequence[int], places: int, cameras: int) -> list[tuple[int, ...]]:
        """Divide the shadow maps with the numbers `due`, in order, into batches. The maps of a batch are drawn
        together; those of the first batch are drawn together with the views of `cameras` cameras."""
        batches: list[list[int]] = [[]]
        texels, views = 0, cameras
        for number in due:
            texels, views = texels + self.views[number].width ** 2, views + 1
            if batches[-1] and (texels > MOST_AT_ONCE or views * places > MOST_AT_ONCE):
                batches.append([])
                texels, views = self.views[number].width ** 2, 1
            batches[-1].append(number)
        return [tuple(batch) for batch in batches]

    def keep(self, stages: Stages, numbers: Sequence[int]) -> None:
        """Store the pictures of the shadow maps' views, which come after the cameras' views in `stages.now`, as the
        shadow maps with these numbers, in the same order."""
        arrays = self._kept.get(tuple(numbers))
        if arrays is None:
            which = uploaded(self.device, np.array(numbers, dtype=np.int32))
            arrays = [wp.from_torch(tensor) for tensor in (which, self._texel_at, self._depths)]
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[tuple(numbers)] = arrays
        stages.keep_depths(*arrays)

    def drawn(self, numbers: Sequence[int], whole: bool) -> None:
        """Record that these maps are drawn. If some wanted pages were missing (`whole` is False), the next frame draws
        these maps again."""
        for number in numbers:
            self._drawn[number] = self._wanted[number] if whole else None

    def _place(self, lights: tuple[Light, ...], counts: Sequence[int], views: Sequence[Camera]) -> None:
        """Allocate memory for all maps; maps whose position in memory changes must be drawn again."""
        sizes = [view.width for view in views]
        if sizes != self._sizes:
            ends = np.cumsum([size * size for size in sizes], dtype=np.int64)
            if ends[-1] > MOST_THREADS:
                raise ValueError(
                    f"{len(sizes)} shadow maps have {ends[-1]:,} texels: a frame has at most 2^30 of these texels; "
                    "give the lights a smaller size or fewer cascades, or render fewer cameras at once"
                )
            self._sizes, self._drawn, self._lights, self._staged = sizes, [None] * len(sizes), (), None
            self._depths = torch.empty(int(ends[-1]), dtype=torch.float32, device=self.device)
            self._texel_at = uploaded(self.device, np.concatenate([[0], ends[:-1]]))
            self._kept.clear()
        if lights != self._lights:
            self._lights, self._tables = lights, _tables(lights, counts, sizes)
        self._tables["from_world"] = np.stack([view.world_to_camera[:3].reshape(12) for view in views])
        self._tables["lens"] = np.array([lens_of(view) for view in views], dtype=np.float32)
        if self._staged is None or not self._staged.fits(self._tables):
            self._staged = _Staged(self._tables, self.device)
            tensors = self._staged.tensors | {"texel_at": self._texel_at, "depths": self._depths}
            self.values = Uploaded.into(buffers.Lights(), tensors).values
        self._staged.send(self._tables)


class _Staged:
    """Copy arrays to the device in one transfer, always to the same addresses.

    Args:
        arrays: examples with the shapes of all later arrays.

    Attributes:
        tensors: the tensors on the device, by the names of the arrays.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays.values()]
        on_gpu = device.type == "cuda"
        self._here = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self._there = torch.empty_like(self._here, device=device)
        self._rows = {
            name: part[: array.nbytes].numpy().view(array.dtype).reshape(array.shape)
            for (name, array), part in zip(arrays.items(), self._here.split(sizes), strict=True)
        }
        self.tensors = {
            name: part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for (name, array), part in zip(arrays.items(), self._there.split(sizes), strict=True)
        }

    def fits(self, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Whether these arrays have the same shapes as the arrays for which this staging memory was made."""
        return all(array.shape == self._rows[name].shape for name, array in arrays.items())

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy new values to the device. The staging memory is free, because the copy of the previous frame ended
        before the host read the counters of that frame."""
        for name, array in arrays.items():
            self._rows[name][:] = array
        self._there.copy_(self._here, non_blocking=True)


def _tables(lights: Sequence[Light], counts: Sequence[int], sizes: Sequence[int]) -> dict[str, NDArray[Any]]:
    """The fields `kind` to `maps` of `buffers.Lights`, which have one row for each light."""
    rows: dict[str, list[Any]] = {name: [] for name in ("kind", "vector", "axis", "color", "reach", "maps")}
    first = 0
    for light, count in zip(lights, counts, strict=True):
        axis: Sequence[float] = (0.0, 0.0, 0.0)
        reach, of_camera = (math.inf, 0.0, 0.0), count
        if isinstance(light, DirectionalLight):
            kind, vector, of_camera = buffers.DIRECTIONAL, -np.asarray(light.direction), light.cascades
        elif isinstance(light, SpotLight):
            kind, vector, axis = buffers.SPOT, np.asarray(light.position), light.direction
            half = math.radians(light.angle_degrees) / 2
            reach = (light.range, math.cos(half), math.cos(half * (1 - light.soft)))
        else:
            assert isinstance(light, PointLight)
            kind, vector, reach = buffers.POINT, np.asarray(light.position), (light.range, 0.0, 0.0)
        found = (int(kind), vector, axis, light.color, reach, (first, of_camera, sizes[first]))
        for row, value in zip(rows.values(), found, strict=True):
            row.append(value)
        first += count
    dtypes = {"kind": np.int32, "maps": np.int32, "vector": np.float64}
    return {name: np.array(row, dtype=dtypes.get(name, np.float32)) for name, row in rows.items()}


# ---- instances that cast shadows ---------------------------------------------------------------------------------


class _Casters:
    """Find the instances that changed since the previous frame, with spheres around their old and new positions."""

    def __init__(self) -> None:
        self._meshes: Meshes | None = None
        self._version = self._known = 0
        self._centers: Floats = np.empty((0, 3))  # centres of spheres around the instances
        self._radii: Floats = np.empty(0)

    def changed(self, meshes: Meshes, instances: Instances) -> tuple[Floats, Floats] | None:
        """Spheres, as centres (N, 3) and radii (N,), around the old and new positions of instances that were added,
        moved or removed; None if everything changed."""
        anew = self._meshes is not meshes
        if anew:
            self._meshes, self._version, self._known = meshes, 0, 0
            # for each mesh, centre and half size of its box, relative to its origin
            self._boxes = meshes.mesh_box.cpu().numpy().astype(np.float64)
        rows = instances.changed(self._version, self._known)
        if not len(rows) and not anew:
            return np.empty((0, 3)), np.empty(0)
        was = rows[rows < self._known]
        before = self._centers[was], self._radii[was]
        self._centers = grown(self._centers, instances.count)
        self._radii = grown(self._radii, instances.count)
        now = self._centers[rows], self._radii[rows] = self._spheres(meshes, instances, rows)
        self._version, self._known = instances.changes.version, instances.count
        if anew:
            return None
        centers, radii = (np.concatenate(both) for both in zip(now, before, strict=True))
        there = radii >= 0
        return centers[there], radii[there]

    def _spheres(self, meshes: Meshes, instances: Instances, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Compute spheres around the instances `rows` in the world: centres (N, 3) and radii (N,). Removed instances
        get a radius below 0."""
        mesh_of, transforms = instances.mesh_of[rows], instances.transforms[rows]
        center = self._boxes[mesh_of, :3] + meshes.origins[mesh_of]
        center = np.einsum("nij,nj->ni", transforms[:, :3, :3], center) + transforms[:, :3, 3]
        radius = np.linalg.norm(self._boxes[mesh_of, 3:], axis=1) * most_stretch(transforms[:, :3, :3]) * (1 + 1e-6)
        return center, np.where(mesh_of >= 0, radius, -1.0)


def _sees(view: Camera, centers: Floats, radii: Floats) -> bool:
    """Whether any of these spheres may cast a shadow into the map of a view."""
    if not len(centers):
        return False
    at = centers @ view.world_to_camera[:3, :3].T + view.world_to_camera[:3, 3]
    half = view.width / 2 / view.fx  # half width of the map's view at depth 1
    aside = abs(at[:, :2]).max(1)
    if view.orthographic:
        return bool((aside - radii <= half).any())
    reach = radii * math.hypot(1.0, half)
    return bool(((at[:, 2] + radii >= view.near) & (aside - half * at[:, 2] <= reach)).any())
