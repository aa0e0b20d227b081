"""Draw for all browser tabs in a single thread: the newest picture that each tab requests, one tab after another."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rooftop.debugging import memory_error_in_words
from rooftop.errors import InputError, RooftopError
from rooftop.scene.framing import outline
from rooftop.scene.gbuffers import GBuffer
from rooftop.scene.lights import DirectionalLight
from rooftop.scene.pictures import points
from rooftop.scene.rendering.renderer import Renderer
from rooftop.scene.scenes import Scene
from rooftop.scene.viewing.asking import Asked
from rooftop.scene.viewing.modes import MODES, Pages, image_of
from rooftop.scene.viewing.viewpoints import FOV_Y_DEGREES, Vector, Viewpoint

WARM_UP = (64, 48)  # size of the first picture, which loads kernels and pages before the first request


class DroppedError(Exception):
    """A newer request of the same tab arrived before this picture was drawn, or the viewer has ended."""


class DrawingError(RooftopError, RuntimeError):
    """The renderer failed; the message contains the renderer's error."""


@dataclass(frozen=True)
class Drawn:
    """A picture, the time that drawing took, and the memory that PyTorch had allocated afterwards.

    Attributes:
        image: (height, width, 3) uint8.
        view: the view from which the picture was drawn.
        stats: statistics of the frame, as plain values.
        ms: milliseconds of each of the renderer's stages, and of "colours", which includes the copy of the image to the
            host.
        memory_bytes: GPU memory that PyTorch has allocated; None on a CPU.
    """

    image: NDArray[np.uint8]
    view: Viewpoint
    stats: dict[str, Any]
    ms: dict[str, float]
    memory_bytes: int | None


@dataclass
class _Job:
    """A function that the drawing thread calls, and its result or its error."""

    work: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done.set()


class Drawing:
    """Draws a scene for browser tabs. Any thread may request pictures.

    Args:
        world: the scene, which the caller must not change while this object exists. With `shadows`, this
            object adds a light to the scene, whose direction follows the page's requests.
        device: as in `Renderer`.
        pixel_error: as in `Renderer`; a page may request another value.
        up, fov_y_degrees: up direction and vertical field of view of the home view.
        pool_bytes: as in `Renderer`. With a pool, pictures are drawn from the resident pages, without waiting for
            missing pages.
        shadows: whether objects cast shadows. If True, the scene must have no lights.

    Attributes:
        renderer: the renderer, which only the drawing thread may use.
        usual_error, usual_light: pixel error and light for requests that do not set them.
        scene_size: the diagonal of the scene's box, in world units.

    Raises:
        ValueError: the scene has no instances, or the renderer refuses the device.
    """

    def __init__(
        self,
        world: Scene,
        device: str | torch.device | None = None,
        pixel_error: float = 1.0,
        up: Vector = (0.0, 0.0, 1.0),
        fov_y_degrees: float = FOV_Y_DEGREES,
        pool_bytes: int | None = None,
        shadows: bool = False,
    ) -> None:
        low, high = world.bounds()
        self.world, self.scene_size = world, max(float(np.linalg.norm(high - low)), 1e-9)
        self._outline, self._up, self._fov = outline(world), up, fov_y_degrees
        self.home((16, 16)).camera((16, 16), self.scene_size)  # raises an error for an invalid `up` or angle
        self.renderer = Renderer(world, device, pixel_error=pixel_error, pool_bytes=pool_bytes)
        self._sun: tuple[float, ...] | None = None  # the direction from which the shadow-casting light comes
        if shadows:
            self._sun = tuple(self.renderer.light)
            world.add_light(_sun_from(self._sun))
        self.usual_error, self.usual_light = self.renderer.pixel_error, self.renderer.light
        self._pages: Pages | None = None
        # The queue: the newest picture request and the newest point request of each tab. A request takes the place of
        # the older request that it replaces.
        self._waiting: dict[str, _Job] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="drawing", daemon=True)
        self._thread.start()

    def home(self, size: tuple[int, int]) -> Viewpoint:
        """The initial view for a picture of this size."""
        return Viewpoint.home(self._outline, self._up, self._fov, size)

    def warm_up(self) -> None:
        """Queue a small picture, without waiting for it, so that kernels and pages are loaded before the first
        request."""
        self._submit("warm up", _Job(lambda: self.renderer.render(self.home(WARM_UP).camera(WARM_UP, self.scene_size))))

    def picture(self, asked: Asked) -> Drawn:
        """Draw the requested picture, and wait for it.

        Raises:
            InputError: the moves lead to a view for which no camera is possible.
            DroppedError: a newer request of the same tab arrived, or `stop` was called.
            DrawingError: the renderer failed.
        """
        view = self._view(asked)
        drawn: Drawn = self._wait(f"picture {asked.tab}", lambda: self._draw(asked, view))
        return drawn

    def point(self, asked: Asked) -> tuple[list[float] | None, Viewpoint]:
        """Find the point in the world that the pixel `asked.at` shows, and the view turned towards that point.

        If the pixel shows background, return None and the unchanged view.

        Raises:
            InputError: the request names no pixel; or as in `picture`.
        """
        if asked.at is None:
            raise InputError("at is missing: expected the pixel's column and row")
        view = self._view(asked)
        found: list[float] | None = self._wait(f"point {asked.tab}", lambda: self._find(asked, view))
        return found, view if found is None else view.towards(found)

    def stop(self, patience_s: float = 0.5) -> bool:
        """End the thread. Callers that wait for a picture get a DroppedError.

        Returns:
            Whether the thread ended within `patience_s` seconds. A picture that is being drawn cannot be interrupted.
        """
        with self._changed:
            self._stopped = True
            for job in self._waiting.values():
                job.end(DroppedError())
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _view(self, asked: Asked) -> Viewpoint:
        view = self.home(asked.window) if asked.view is None else asked.view
        try:
            view = view.moved(asked.move, self.scene_size)
            view = view.framed(self._outline, asked.window) if asked.framed else view
            view.camera(asked.size, self.scene_size)
        except ValueError as error:
            raise InputError(f"this camera is not possible: {error}") from None
        return view

    def _draw(self, asked: Asked, view: Viewpoint) -> Drawn:
        self.renderer.light = self.usual_light if asked.light is None else asked.light
        self.renderer.pixel_error = self.usual_error if asked.pixel_error is None else asked.pixel_error
        if self._sun is not None and self._sun != tuple(self.renderer.light):
            self._sun = tuple(self.renderer.light)
            self.world.set_light(0, _sun_from(self._sun))
        camera = view.camera(asked.size, self.scene_size)
        frame = self.renderer.render(camera, MODES[asked.show].outputs, timings=True, wait=False)
        began = time.perf_counter()
        self._pages = self._pages or Pages(self.world, self.renderer.device)
        image = image_of(frame, asked.show, self._pages).cpu().numpy()
        stats = asdict(frame.stats)
        ms = stats.pop("stage_ms") | {"colours": 1e3 * (time.perf_counter() - began)}
        on_gpu = self.renderer.device.type == "cuda"
        memory = torch.cuda.memory_allocated(self.renderer.device) if on_gpu else None
        return Drawn(image, view, stats, ms, memory)

    def _find(self, asked: Asked, view: Viewpoint) -> list[float] | None:
        camera = view.camera(asked.size, self.scene_size)
        assert asked.at is not None
        column, row = asked.at
        frame = self.renderer.render(camera, ("depth",), wait=False)
        depth = torch.full_like(frame["depth"], torch.inf)
        depth[0, row, column] = frame["depth"][0, row, column]
        only = GBuffer(frame.stats, depth=depth)
        found: list[list[float]] = points(only, camera, dtype=torch.float64).xyz.tolist()
        return found[0] if found else None

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def _wait(self, tab: str, work: Callable[[], Any]) -> Any:
        job = _Job(work)
        self._submit(tab, job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    def _submit(self, tab: str, job: _Job) -> None:
        with self._changed:
            if self._stopped:
                job.end(DroppedError())
                return
            older = self._waiting.get(tab)
            self._waiting[tab] = job  # this replaces the tab's older request in the queue, at the same position
            self._changed.notify()
        if older is not None:
            older.end(DroppedError())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
                if self._stopped:
                    return
                job = self._waiting.pop(next(iter(self._waiting)))
            try:
                job.result = job.work()
                job.end()
            except RooftopError as error:
                job.end(error)
            except Exception as error:
                if memory_error_in_words(error) is not None:
                    what = f"the scene or the picture does not fit into the memory of {self.renderer.device}"
                    job.end(DrawingError(f"{what}; make the window smaller"))
                    continue
                traceback.print_exc()
                job.end(DrawingError(f"{type(error).__name__}: {error}"))


def _sun_from(light: Sequence[float]) -> DirectionalLight:
    """Make a directional light that shines from a direction."""
    return DirectionalLight([-number for number in light])
