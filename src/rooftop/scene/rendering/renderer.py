"""Render a scene, frame after frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from rooftop.scene.arguments import MOST, number_in, real_numbers, short
from rooftop.scene.cameras import Camera, checked_cameras, same_size
from rooftop.scene.gbuffers import OUTPUTS, FrameStats, GBuffer, StreamingStats
from rooftop.scene.rendering import buffers, cuda_sources
from rooftop.scene.rendering.canvases import MOST_THREADS, Canvas, canvas_of
from rooftop.scene.rendering.chains import Chain, Chains
from rooftop.scene.rendering.host_rows import HostCopy
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.placing import Placed
from rooftop.scene.rendering.shadow_maps import Drawing, ShadowMaps
from rooftop.scene.rendering.stages import THREADS_OF_A_MULTIPROCESSOR, Clock, Stages
from rooftop.scene.rendering.surfaces import uploaded_surfaces
from rooftop.scene.rendering.targets import Outputs
from rooftop.scene.rendering.texturing import Surfaces
from rooftop.scene.rendering.uploads import Meshes, Uploaded
from rooftop.scene.scenes import Scene
from rooftop.scene.streaming.answers import Answer
from rooftop.scene.streaming.page_graph import PageGraph
from rooftop.scene.streaming.pool import Pool, checked_pool_bytes, slots_of

VIEWS_AHEAD = 8  # maximum number of views that `prefetch` culls in one batch
# if a batch would have more pairs of view and instance, `prefetch` culls view by view, so that lists stay short
MOST_PAIRS_AHEAD = 2**22
LIGHT = (0.4, 0.3, 0.85)  # the direction in the world from which the light comes


class Renderer:
    """Draws a scene, frame after frame. The depths of one frame help the next frame to skip hidden geometry.

    Args:
        scene: the scene to draw; it may change between frames.
        device: "cuda", "cuda:1" or "cpu"; by default a GPU if there is one.
        pixel_error: allowed error of the surface in pixels; 0 draws the finest level.
        occlusion: whether hidden geometry is skipped. The pixels are the same in both cases.
        one_sided: whether triangles seen from behind (clockwise) are skipped.
        light: the direction in the world from which the light of "color" comes, of any length.
        kernels: "warp" runs everywhere; "cuda", in CUDA C++, is faster and needs a GPU and `rooftop[cuda]`; None
            chooses "cuda" if it can run. All pixels have the same bits with "warp" and with "cuda".
        pool_bytes: bytes of device memory for the pages of the scene's meshes. Pages are loaded when frames need them.
            By default all pages are loaded before the first frame, and stay in memory.

    Attributes:
        pixel_error: as given; the caller may set it between frames.
        light: `light` with length 1; the caller may set it between frames, to a direction of any length.
        kernels: the kernels in use, "warp" or "cuda".
        pool: the pool of pages on the device; None without `pool_bytes`.

    Raises:
        InputError: the pages that every complete picture of the scene needs do not fit into the pool.
        GeometryFileError: a page is damaged, or needs a later page of its file.

    Example:
        >>> frame = Renderer(scene).render(Camera.look_at((3, 0, 1), (0, 0, 0)), outputs=("depth", "normal"))
        >>> frame.depth.shape
        torch.Size([1, 1080, 1920])
    """

    def __init__(
        self,
        scene: Scene,
        device: str | torch.device | None = None,
        *,
        pixel_error: float = 1.0,
        occlusion: bool = True,
        one_sided: bool = False,
        light: Sequence[float] = LIGHT,
        kernels: str | None = None,
        pool_bytes: int | None = None,
    ) -> None:
        if kernels not in (None, "warp", "cuda"):
            raise ValueError(f"kernels={kernels!r}: expected 'warp' or 'cuda', or None for the fastest available")
        if not isinstance(scene, Scene):
            raise ValueError(f"scene={scene!r}: expected a scene.Scene with instances of meshes")
        self.scene, self.device = scene, _device(device)
        self.pixel_error, self.occlusion, self.one_sided = _checked_error(pixel_error), occlusion, one_sided
        self.light = _checked_light(light)
        if kernels == "cuda":
            cuda_sources.require(self.device)
        self.kernels = kernels or ("cuda" if cuda_sources.is_there(self.device) else "warp")
        self._threads = 1
        if self.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._threads = THREADS_OF_A_MULTIPROCESSOR * multiprocessors
        self.pool_bytes = checked_pool_bytes(pool_bytes)
        self.pool: Pool | None = None
        self._graph: PageGraph | None = None
        if self.pool_bytes is not None and scene.meshes:
            self._graph = PageGraph(scene.meshes)
            slots_of(self._graph, self.pool_bytes)
        self._chains, self._ahead = Chains(self.device), Chains(self.device, pictures=False)  # _ahead: for `prefetch`
        self._meshes: Meshes | None = None
        self._surfaces: Uploaded | None = None
        self._surfaces_of: tuple[object, ...] = ()
        self._memory: FrameMemory | None = None
        self._direction: tuple[float, ...] = ()  # the unit vector of `_light_of`
        self._light_of: object = None
        # used without lights and without materials; always the same objects, see `Launches`
        self._dark, self._plain = buffers.Lights(), Surfaces()
        self._shadows = ShadowMaps(self.device)
        self._placed = Placed(self.device)
        self._resident: Uploaded | None = None  # the tensors whose addresses captured graphs contain
        self._counters = HostCopy(2 * int(buffers.PASS), self.device)
        # State of the previous frame:
        self._cameras: tuple[Camera, ...] = ()
        self._has_depths = False

    def render(
        self,
        cameras: Camera | Sequence[Camera],
        outputs: Sequence[str] = ("depth", "normal", "instance"),
        *,
        timings: bool = False,
        wait: bool = True,
    ) -> GBuffer:
        """Render a frame for each camera, all in one chain of launches.

        Args:
            cameras: all of the same size; `render_each` takes any sizes. A camera's previous position is the position
                of the camera at the same index in the previous frame.
            outputs: which fields of `GBuffer` to fill.
            timings: whether to time each stage and fill `stats.stage_ms`.
            wait: with a pool, whether missing pages are loaded before the frame ends. If True, the picture is the same
                as with all pages. If the needed pages do not fit into the pool, the picture is the finest whose pages
                fit. The picture does not depend on earlier frames and loads, except that shadow maps kept from earlier
                frames may be finer. If False, the frame is drawn from the resident pages, complete but coarser, and
                missing pages are loaded for later frames.

        Draw all frames of one renderer on one stream, because each frame reads data of the previous one. On a GPU the
        pictures may still be in progress when this returns, as with any work that torch queues.

        Raises:
            ValueError: an output or the cameras are invalid, or pictures or lists would be too large.
            GeometryFileError: a page that a frame loads cannot be read or is damaged; the message names the page.
        """
        views = checked_cameras(cameras)
        width, height = same_size(views)
        stats, pictures = self._frame(views, outputs, timings, wait)
        shape = (len(views), height, width)
        return GBuffer(stats, **{name: flat.view(*shape, *flat.shape[1:]) for name, flat in pictures.items()})

    def render_each(
        self,
        cameras: Sequence[Camera],
        outputs: Sequence[str] = ("depth", "normal", "instance"),
        *,
        timings: bool = False,
        wait: bool = True,
    ) -> tuple[GBuffer, ...]:
        """Render a frame for each camera, of any size, all in one chain of launches.

        Args:
            cameras: if the previous frame had as many cameras, with the same sizes in the same order, each camera's
                previous position is taken from that frame. If not, the cameras count as unmoved.
            outputs, timings, wait: as in `render`.

        Returns:
            For each camera a frame with pictures (1, height, width[, C]); its statistics count all cameras together.
            Without cameras, an empty tuple.

        Raises:
            ValueError, GeometryFileError: as in `render`.
        """
        views, outputs = checked_cameras(cameras), _checked_outputs(outputs)
        if not views:
            return ()
        stats, pictures = self._frame(views, outputs, timings, wait)
        texels = [view.width * view.height for view in views]
        parts = {name: flat.split(texels) for name, flat in pictures.items()}
        return tuple(
            GBuffer(
                stats, **{n: own[k].view(1, view.height, view.width, *own[k].shape[1:]) for n, own in parts.items()}
            )
            for k, view in enumerate(views)
        )

    @torch.inference_mode(False)  # data kept for the next frame must stay valid outside inference mode too
    def _frame(
        self, cameras: tuple[Camera, ...], outputs: Sequence[str], timings: bool, wait: bool
    ) -> tuple[FrameStats, dict[str, Tensor]]:
        """Draw a frame; return its statistics and the pictures of all cameras, concatenated to (pixels[, C])."""
        outputs = _checked_outputs(outputs)
        light = self._light_now()
        pixel_error = _checked_error(self.pixel_error)
        sizes = tuple((camera.width, camera.height) for camera in cameras)
        canvas = canvas_of(sizes, len(cameras))
        _check_sizes(canvas, self.scene.placed.count)
        if not len(self.scene):
            return FrameStats(0, 0, (), 0, 0, 0), self._background(outputs, canvas)
        meshes, lights = self._meshes_now(), self.scene.lights
        placed = self._place(meshes)
        same_views = sizes == tuple((camera.width, camera.height) for camera in self._cameras)
        history = self.occlusion and same_views and self._has_depths
        emitted = _emitted(outputs, self.scene)
        due: tuple[int, ...] = ()
        if lights and "shadow" in emitted:
            drawing = Drawing(self.one_sided, self.kernels == "cuda", pixel_error)
            due = self._shadows.due(lights, cameras, meshes, self.scene.placed, self.scene.bounds(), drawing)
        beside, *later = self._shadows.batches(due, placed.places, len(cameras))
        maps = [self._shadows.views[number] for number in beside]
        canvas = canvas_of((*sizes, *((view.width, view.height) for view in maps)), len(cameras))
        chain = self._chains.of(canvas, placed.places, "overdraw" in outputs)
        chain.inputs.look(placed.frame, cameras, self._cameras if same_views else cameras, maps)
        chain.memory.frame.pixel_error = pixel_error
        pool, best = self.pool, False
        if pool is not None:
            if pool.is_new and wait:
                self._load_first(pool, chain, meshes, pixel_error)
            pool.begin()
        surfaces = self._surfaces_now() if {"color", "base_color"} & set(outputs) else self._plain
        while True:
            clock = Clock(self.device, timings)
            stages = self._stages(chain, meshes, clock)
            stages.draw_captured(history)
            counters_of = chain.memory.tensors["counters"]
            if due:
                with clock.of("shadow_maps"):
                    self._shadows.keep(stages, beside)
                    for batch in later:
                        self._draw_maps(batch, meshes, pixel_error)
                if later and pool is not None:
                    pool.requests.collect(counters_of, self._threads, aging=False)
            # Start to copy the counters to the host before the outputs are computed, so that the host need not wait for
            # the outputs.
            if pool is None:
                self._counters.send(counters_of)
            else:
                pool.requests.send()
            tensors = chain.outputs(emitted, len(lights))
            pictures = tensors.new()
            shone = self._shadows.values if lights else self._dark
            plain = not lights and not any(self.scene.materials)
            stages.emit(tensors.targets, light, shone, surfaces, emitted, pictures, plain, meshes.has_attributes)
            answer = None if pool is None else self._answer(pool, wait)
            counters = self._counters.read().tolist() if answer is None else answer.counters
            room = chain.memory.wanted_room(counters)
            if room != chain.memory.room:
                self._chains.widen(chain, room)
                continue
            if pool is None or answer is None or best or not len(answer.missing):
                break
            if not wait:
                pool.ask(answer)
                break
            best, history = _filled(pool, history)
        memory = chain.memory
        self._shadows.drawn(due, answer is None or not len(answer.missing))
        if "overdraw" in outputs:
            pictures["overdraw"] = memory.tensors["fragments"].clone()
        for name in set(emitted) - set(outputs):
            del pictures[name]
        streaming = None if pool is None or answer is None else pool.stats(answer, pixel_error)
        stats = _stats(counters, len(due), clock.stage_ms(), streaming)
        self._chains.settle(chain)
        placed.settle()
        self._memory, self._cameras, self._has_depths = memory, cameras, self.occlusion
        return stats, pictures

    def _answer(self, pool: Pool, wait: bool) -> Answer:
        """Wait for the counters and the page requests of the current frame, and return them. The device may still be
        computing the frame's outputs. Without `wait`, first prepare the pool for the next frame.

        Raises:
            GeometryFileError: the device refused a page. The pool is dropped.
        """
        resident = None
        if not wait:
            resident = pool.resident()
            pool.begin()  # prepare the next frame here, because the host has time while the device draws
        answer = pool.requests.read(resident)
        if answer.refused is not None:
            self._drop_pool()
            pool.refuse(answer.refused)
        return answer

    @torch.inference_mode(False)
    def prefetch(self, cameras: Camera | Sequence[Camera]) -> None:
        """Start to load the pages that frames of these cameras will need, such as the cameras of the path ahead. The
        current frame keeps its pages. Without `pool_bytes` this does nothing.

        Args:
            cameras: cameras of any sizes, in any order. Pages whose absence causes the largest error in pixels are
                loaded first.

        Raises:
            ValueError: the cameras are invalid, or lists would be too large.
            GeometryFileError: a page that was read since the previous frame or `prefetch` is unreadable or damaged.
        """
        views = checked_cameras(cameras)
        if not views:
            return  # the path has ended
        for view in views:
            _check_sizes(canvas_of(((view.width, view.height),), 1), self.scene.placed.count)
        if self.pool_bytes is None or not len(self.scene):
            return
        meshes, pool = self._meshes_now(), self.pool
        assert pool is not None
        if pool.is_behind:
            pool.begin()
        pixel_error = _checked_error(self.pixel_error)
        places = self._place(meshes).places
        at_once = VIEWS_AHEAD if VIEWS_AHEAD * self.scene.placed.count <= MOST_PAIRS_AHEAD else 1
        for first in range(0, len(views), at_once):
            some = views[first : first + at_once]
            canvas = canvas_of(tuple((view.width, view.height) for view in some), len(some))
            chain = self._ahead.of(canvas, places)
            chain.inputs.look(self._placed.frame, some, some)
            answer = self._look_ahead(pool, self._ahead, chain, meshes, pixel_error, more=first > 0)
        pool.ask(answer, urgent=False)

    def _look_ahead(
        self, pool: Pool, chains: Chains, chain: Chain, meshes: Meshes, pixel_error: float, more: bool = False
    ) -> Answer:
        """Collect the page requests of a frame without drawing the frame, since culling needs only trees, not pages. If
        `more`, earlier requests are kept."""
        while True:
            chain.memory.frame.pixel_error = pixel_error
            self._stages(chain, meshes, Clock(self.device, False)).look_ahead(more)
            pool.requests.send()
            resident = pool.resident()
            if not pool.is_new:
                pool.begin()  # called here, because the host has time while the device culls
            answer = pool.requests.read(resident)
            room = chain.memory.wanted_room(answer.counters)
            if room == chain.memory.room:
                return answer
            chains.widen(chain, room)

    def _load_first(self, pool: Pool, chain: Chain, meshes: Meshes, pixel_error: float) -> None:
        """Before a new pool's first frame, load the root pages and all pages that the frame needs, in one go. If they
        do not all fit into the pool, load nothing; `Pool.begin` then loads the root pages. The trees suffice to find
        the pages that the frame needs."""
        self._look_ahead(pool, self._chains, chain, meshes, pixel_error)
        target = pool.target()
        if target is not None:
            pool.load(target)

    def _meshes_now(self) -> Meshes:
        """The scene's meshes on the device. If meshes were added or the pool was dropped since the last call, upload
        all meshes again. With `pool_bytes`, also create a new pool in this case."""
        if self._meshes is None or self._meshes.count != len(self.scene.meshes):
            self._drop_pool()
            if self.pool_bytes is not None:
                if self._graph is None or len(self._graph.meshes) != len(self.scene.meshes):
                    self._graph = PageGraph(self.scene.meshes)
                self.pool = Pool(self._graph, self.pool_bytes, self.device)
            self._meshes = Meshes(self.scene.meshes, self.device, self.pool)
        return self._meshes

    def _light_now(self) -> Any:
        """The unit vector of `light`; the same object until `light` is set again."""
        # the caller may have changed the values of a list
        if self.light is not self._light_of or not isinstance(self.light, tuple):
            direction = _checked_light(self.light)
            self._light_of = self.light
            if direction != self._direction:
                self._direction, self._toward_light = direction, wp.vec3(*direction)
        return self._toward_light

    def _surfaces_now(self) -> Any:
        """The scene's materials on the device, uploaded for the first frame that requests a colour."""
        materials = self.scene.materials
        if self._surfaces is None or self._surfaces_of != materials:
            self._surfaces = uploaded_surfaces(self.scene.meshes, materials, self.device)
            self._surfaces_of = materials
        return self._surfaces.values

    def _drop_pool(self) -> None:
        """Drop the pool; the next frame creates a new one."""
        if self.pool is not None:
            self.pool.close()
        self.pool = self._meshes = None

    def _place(self, meshes: Meshes) -> Placed:
        """Upload the instances that changed since the last call. If this replaces the instances' tensors, drop the
        captured graphs."""
        resident = self._resident
        self._placed.update(self.scene.placed, meshes)
        if self._placed.resident is not resident:
            self._chains.forget_graphs()
            self._ahead.forget_graphs()
            self._resident = self._placed.resident
        return self._placed

    def _stages(self, chain: Chain, meshes: Meshes, clock: Clock) -> Stages:
        return Stages(
            *(self._placed.resident, chain.inputs.now, chain.inputs.then, chain.memory, meshes.depth, self._threads),
            *(clock, self.occlusion and chain.memory.canvas.cameras > 0, self.one_sided, self.kernels == "cuda"),
            requests=None if self.pool is None else self.pool.requests,
        )

    def _draw_maps(self, numbers: tuple[int, ...], meshes: Meshes, pixel_error: float) -> None:
        """Draw the shadow maps with these numbers in a batch of their own, because they do not fit into one batch with
        the cameras' pictures."""
        views = [self._shadows.views[number] for number in numbers]
        canvas = canvas_of(tuple((view.width, view.height) for view in views), 0)
        chain = self._chains.of(canvas, self._placed.places)
        chain.inputs.look(self._placed.frame, (), (), views)
        while True:
            chain.memory.frame.pixel_error = pixel_error
            stages = self._stages(chain, meshes, Clock(self.device, False))
            stages.draw_more()
            room = chain.memory.wanted_room(chain.memory.tensors["counters"].tolist())
            if room == chain.memory.room:
                break
            self._chains.widen(chain, room)
        self._shadows.keep(stages, numbers)

    def _background(self, outputs: tuple[str, ...], canvas: Canvas) -> dict[str, Tensor]:
        """The pictures of a scene without instances. The next frame is then drawn as if it were the first."""
        self._placed.settle()
        self._cameras, self._has_depths = (), False
        pictures = Outputs(outputs, canvas.camera_texels, len(self.scene.lights), self.device).background()
        if "overdraw" in outputs:
            pictures["overdraw"] = torch.zeros(canvas.texels, dtype=torch.int32, device=self.device)
        return pictures


def _filled(pool: Pool, history: bool) -> tuple[bool, bool]:
    """Load the pages that a frame missed, such that the redrawn frame does not depend on the pages that happened to be
    resident.

    The first pass's requests depend only on the previous frame. Once those pages are resident, the first pass draws the
    same as with all pages, so the second pass's requests are known too. If the pages of both passes do not fit, the
    frame is drawn without testing against the previous frame. Its requests then depend only on the camera and the
    scene, and the pages are chosen by these requests.

    Returns:
        Whether the resident pages are the most wanted ones that fit (`Pool.best_target`), so that loading more cannot
        help; and whether to test against the previous frame.
    """
    target = pool.target()
    if target is None and not history:
        pool.load(pool.best_target(), alone=True)
        return True, False
    if target is None:
        target = pool.target(first=True)
        if target is None or pool.has(target):
            return False, False
    pool.load(target)
    return False, history


def _checked_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    names = tuple(outputs) if isinstance(outputs, Iterable) and not isinstance(outputs, str) else (None,)
    if any(name not in OUTPUTS for name in names):
        raise ValueError(f"outputs={short(outputs)}: expected a list of {', '.join(OUTPUTS)}")
    return tuple(str(name) for name in names)


def _emitted(outputs: tuple[str, ...], scene: Scene) -> tuple[str, ...]:
    """The outputs to compute: the requested ones, and the inputs of "color"."""
    needed = [("shadow", bool(scene.lights)), ("base_color", any(scene.materials))]
    more = (name for name, there in needed if there and "color" in outputs and name not in outputs)
    return (*outputs, *more)


def _check_sizes(canvas: Canvas, instances: int) -> None:
    if max(canvas.texels, len(canvas.sizes) * instances) > MOST_THREADS:
        raise ValueError(
            f"{len(canvas.sizes)} views have {canvas.texels:,} pixels in all, and {instances:,} instances each: a "
            "frame has at most 2^30 pixels, and 2^30 instances summed over its views; render fewer views at once"
        )


def _checked_error(pixel_error: Any) -> float:
    """Check the allowed error in pixels, and return it.

    Raises:
        ValueError: the value is not a number, or is negative or too large.
    """
    return number_in("pixel_error", pixel_error, 0.0, MOST, "a number of pixels")


def _checked_light(light: Any) -> tuple[float, ...]:
    """Check a direction, and return it with length 1.

    Raises:
        ValueError: `light` is not a direction.
    """
    direction = real_numbers(light, "light", "three numbers that are not all 0")
    if direction.shape != (3,) or not np.isfinite(direction).all() or not direction.any():
        raise ValueError(f"light={short(light)}: expected a direction, three finite numbers that are not all 0")
    direction /= abs(direction).max()  # scale first, so that no square overflows or underflows
    return tuple((direction / np.linalg.norm(direction)).tolist())


def _stats(
    counters: list[int], shadow_maps: int, stage_ms: dict[str, float], streaming: StreamingStats | None
) -> FrameStats:
    first, second = counters[: buffers.PASS], counters[buffers.PASS :]
    levels = first[buffers.DRAWN_LEVELS] | second[buffers.DRAWN_LEVELS]
    return FrameStats(
        clusters=first[buffers.DRAWN_CLUSTERS] + second[buffers.DRAWN_CLUSTERS],
        triangles=first[buffers.DRAWN_TRIANGLES] + second[buffers.DRAWN_TRIANGLES],
        levels=tuple(level for level in range(32) if levels >> level & 1),
        occluded=sum(first[k] for k in (buffers.HIDDEN_INSTANCES, buffers.HIDDEN_CHILDREN, buffers.HIDDEN_CLUSTERS)),
        second_pass_clusters=second[buffers.VISIBLE],
        large_triangles=first[buffers.LARGE] + second[buffers.LARGE],
        shadow_maps=shadow_maps,
        stage_ms=stage_ms,
        streaming=streaming,
        nodes=sum(first[buffers.LEVEL :]) + sum(second[buffers.LEVEL :]),
        groups=first[buffers.GROUPS] + second[buffers.GROUPS],
    )


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected 'cuda' or 'cpu'") from error
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: expected 'cuda' or 'cpu'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}: PyTorch sees no GPU here; device='cpu' draws the same pictures, more slowly"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen if chosen.type == "cuda" else torch.device("cpu")
