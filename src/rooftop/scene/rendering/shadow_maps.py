"""The shadow maps of a scene's lights: which are to be drawn for a frame, and the memory where all are kept.

A map stays as it is while its view, what casts shadows in it, and the wanted accuracy stay. The others are drawn by the
first three stages, as pictures are, all of one size at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from rooftop.scene.rendering.memory import MOST_THREADS, ROOM, FrameMemory
from rooftop.scene.rendering.placing import Placed
from rooftop.scene.rendering.stages import Clock, Stages
from rooftop.scene.rendering.uploads import LENS, Meshes, Uploaded, lens_of, uploaded, views_of
from rooftop.scene.streaming.answers import RequestBuffers

MOST_AT_ONCE = (
    2**26
)  # texels, and instances over all maps, of maps that are drawn together: as many are in memory twice


@dataclass(frozen=True)
class Drawing:
    """How maps are drawn.

    Attributes:
        threads, one_sided, cuda_cpp: as of `Stages`.
        pixel_error: by how many texels the surface may be off.
    """

    threads: int
    one_sided: bool
    cuda_cpp: bool
    pixel_error: float


class ShadowMaps:
    """Of the lights of a scene, from frame to frame.

    Attributes:
        values: `buffers.Lights`, as of the last frame.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.values = device, buffers.Lights()
        self._lights: tuple[Light, ...] = ()
        self._sizes: list[int] = []  # of all maps
        self._drawn: list[object] = []  # of each map, of what it was drawn; None: it is not yet
        self._latest: list[int] = []  # those that were drawn at last
        self._casters = _Casters()
        self._batches: dict[tuple[int, int], _Batch] = {}

    def draw(
        self,
        lights: tuple[Light, ...],
        cameras: Sequence[Camera],
        meshes: Meshes,
        instances: Instances,
        bounds: Floats,
        placed: Placed,
        drawing: Drawing,
        requests: RequestBuffers | None,
        clock: Clock,
    ) -> int:
        """Bring the maps up to date; how many had to be drawn.

        Args:
            lights: of the scene, at least one.
            cameras: of the frame.
            meshes, instances: of the scene; placed: the same on the device.
            bounds: (2, 3), a box around all instances.
            drawing: how.
            requests: where the culls ask for pages, if some may be absent, beside what is asked for already.
            clock: of the frame.

        Raises:
            ValueError: maps of too many texels.
        """
        maps = [light.maps(cameras, bounds) for light in lights]
        views = [view for each in maps for view in each]
        self._place(lights, [len(each) for each in maps], views)
        changed = self._casters.changed(meshes, instances)
        due: dict[int, list[int]] = {}
        self._latest = []
        for number, view in enumerate(views):
            of = (drawing, view.world_to_camera.tobytes(), view.fx, view.near)
            if self._drawn[number] != of or changed is None or _sees(view, *changed):
                due.setdefault(view.width, []).append(number)
                self._latest.append(number)
            self._drawn[number] = of
        with clock.of("shadow_maps"):
            for size, numbers in due.items():
                most = max(1, MOST_AT_ONCE // max(size * size, placed.places))
                for first in range(0, len(numbers), most):
                    batch = numbers[first : first + most]
                    self._draw_batch(batch, views, meshes, placed, drawing, requests)
        return len(self._latest)

    def draw_again(self) -> None:
        """Those that were drawn last lack pages: the next frame draws them again."""
        for number in self._latest:
            self._drawn[number] = None

    def _place(self, lights: tuple[Light, ...], counts: Sequence[int], views: Sequence[Camera]) -> None:
        """Memory for all maps; those that were not in the same place before are to be drawn."""
        sizes = [view.width for view in views]
        ends = np.cumsum([size * size for size in sizes], dtype=np.int64)
        if ends[-1] > MOST_THREADS:
            raise ValueError(
                f"{len(sizes)} shadow maps have {ends[-1]:,} texels: a frame has at most 2^30 of them; give the lights "
                "a smaller size or fewer cascades, or render fewer cameras at once"
            )
        matrices = np.stack([view.world_to_camera[:3].reshape(12) for view in views])
        lens = np.array([lens_of(view) for view in views])
        if sizes != self._sizes:
            self._sizes, self._drawn, self._lights = sizes, [None] * len(sizes), ()
            self._depths = torch.empty(int(ends[-1]), dtype=torch.float32, device=self.device)
            self._texel_at = uploaded(self.device, np.concatenate([[0], ends[:-1]]))
        if lights != self._lights:
            tables = {name: uploaded(self.device, array) for name, array in _tables(lights, counts, sizes).items()}
            tables |= {"texel_at": self._texel_at, "depths": self._depths}
            tables["from_world"] = torch.empty(len(views), 12, dtype=torch.float64, device=self.device)
            tables["lens"] = torch.empty(len(views), LENS, dtype=torch.float32, device=self.device)
            self._uploaded = Uploaded.into(buffers.Lights(), tables)
            self._lights, self.values = lights, self._uploaded.values
        self._uploaded.set({"from_world": matrices, "lens": lens})

    def _draw_batch(
        self,
        numbers: Sequence[int],
        views: Sequence[Camera],
        meshes: Meshes,
        placed: Placed,
        drawing: Drawing,
        requests: RequestBuffers | None,
    ) -> None:
        size = views[numbers[0]].width
        batch = self._batches.get((len(numbers), size))
        if batch is None or batch.memory.sizes[0] != placed.places:
            batch = self._batches[len(numbers), size] = _Batch(len(numbers), size, placed.places, self.device)
        batch.draw(numbers, views, meshes.depth, placed.resident, drawing, requests, self._texel_at, self._depths)


def _tables(lights: Sequence[Light], counts: Sequence[int], sizes: Sequence[int]) -> dict[str, NDArray[Any]]:
    """The fields of `buffers.Lights` that say what lights are."""
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


class _Batch:
    """Maps of one size that are drawn at once, and the memory for as many."""

    def __init__(self, count: int, size: int, instances: int, device: torch.device) -> None:
        self.device = device
        self.memory = FrameMemory(instances, count, size, size, False, ROOM, device)
        self._which = torch.empty(count, dtype=torch.int32, device=device)
        matrices = torch.empty(count, 12, dtype=torch.float64, device=device)
        lenses = torch.empty(count, LENS, dtype=torch.float32, device=device)
        self._views = views_of((size, size), matrices, lenses)

    def draw(
        self,
        numbers: Sequence[int],
        views: Sequence[Camera],
        depth: int,
        resident: Uploaded,
        drawing: Drawing,
        requests: RequestBuffers | None,
        texel_at: torch.Tensor,
        depths: torch.Tensor,
    ) -> None:
        """Those of these numbers, into `depths`."""
        chosen = [views[number] for number in numbers]
        self._views.set(
            {
                "from_world": np.stack([view.world_to_camera[:3].reshape(12) for view in chosen]),
                "lens": np.array([lens_of(view) for view in chosen]),
            }
        )
        self._which.copy_(torch.tensor(numbers, dtype=torch.int32))
        while True:
            self.memory.frame.pixel_error = drawing.pixel_error
            stages = Stages(
                *(resident, self._views, self._views, self.memory, depth, drawing.threads, Clock(self.device, False)),
                *(False, drawing.one_sided, drawing.cuda_cpp, requests),
            )
            stages.draw_more()
            room = self.memory.wanted_room(self.memory.tensors["counters"].tolist())
            if room == self.memory.room:
                break
            self.memory = self.memory.with_room(room)
        stages.keep_depths(*map(wp.from_torch, (self._which, texel_at, depths)))


# ---- what casts shadows ------------------------------------------------------------------------------------------


class _Casters:
    """The instances as they were in the frame before."""

    def __init__(self) -> None:
        self._meshes: Meshes | None = None
        self._version = self._known = 0
        self._centers, self._radii = np.empty((0, 3)), np.empty(0)  # of spheres around them

    def changed(self, meshes: Meshes, instances: Instances) -> tuple[Floats, Floats] | None:
        """Spheres, centres (N, 3) and radii (N,), around what has come, moved or gone, where it was and is; None: all is
        another."""
        anew = self._meshes is not meshes
        if anew:
            self._meshes, self._version, self._known = meshes, 0, 0
            self._boxes = meshes.mesh_box.cpu().numpy().astype(np.float64)  # centre and half size, from the origin
        rows = instances.changed(self._version, self._known)
        was = rows[rows < self._known]
        before = self._centers[was], self._radii[was]
        self._centers, self._radii = (grown(array, instances.count) for array in (self._centers, self._radii))
        now = self._centers[rows], self._radii[rows] = self._spheres(meshes, instances, rows)
        self._version, self._known = instances.changes.version, instances.count
        if anew:
            return None
        centers, radii = (np.concatenate(both) for both in zip(now, before, strict=True))
        there = radii >= 0
        return centers[there], radii[there]

    def _spheres(self, meshes: Meshes, instances: Instances, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Of what was removed, with a radius below 0."""
        mesh_of, transforms = instances.mesh_of[rows], instances.transforms[rows]
        center = self._boxes[mesh_of, :3] + meshes.origins[mesh_of]
        center = np.einsum("nij,nj->ni", transforms[:, :3, :3], center) + transforms[:, :3, 3]
        radius = np.linalg.norm(self._boxes[mesh_of, 3:], axis=1) * most_stretch(transforms[:, :3, :3]) * (1 + 1e-6)
        return center, np.where(mesh_of >= 0, radius, -1.0)


def _sees(view: Camera, centers: Floats, radii: Floats) -> bool:
    """Whether a map may show any of some spheres."""
    if not len(centers):
        return False
    at = centers @ view.world_to_camera[:3, :3].T + view.world_to_camera[:3, 3]
    half = view.width / 2 / view.fx  # of what a map shows, one unit deep
    aside = abs(at[:, :2]).max(1)
    if view.orthographic:
        return bool((aside - radii <= half).any())
    reach = radii * math.hypot(1.0, half)
    return bool(((at[:, 2] + radii >= view.near) & (aside - half * at[:, 2] <= reach)).any())
