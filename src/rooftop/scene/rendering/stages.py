"""Run a frame stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rooftop.hardware.graphs import collection_paused
from rooftop.scene.rendering import (
    base_colors,
    base_pass,
    base_pixels,
    buffers,
    emit_depth_targets,
    hzb,
    init_context,
    instance_cull,
    level_cull,
    persistent_cull,
    rasterize,
    rasterize_clusters,
    reduce_tiles,
    shadows,
    sort_clusters,
)
from rooftop.scene.rendering.memory import Captured, FrameMemory
from rooftop.scene.rendering.uploads import Uploaded
from rooftop.scene.streaming import streamed_cull
from rooftop.scene.streaming.answers import RequestBuffers

THREADS_OF_A_MULTIPROCESSOR = 1024
# maximum number of CUDA graphs of one FrameMemory: with and without history, each with and without timings
MOST_GRAPHS = 4
OF_BASE_PASS = {"normal", "uv", "color", "vertex_color"}
OF_DEPTH_TARGETS = {
    *("depth", "coverage", "triangle", "instance", "cluster", "level", "material", "material_depth", "velocity")
}


class Clock:
    """Measures the milliseconds of each stage, summed over its passes. On a GPU, CUDA events measure them."""

    def __init__(self, device: torch.device, runs: bool) -> None:
        self.device, self.runs = device, runs
        self.events: list[tuple[str, Any, Any]] = []  # for each stage: its name, beginning and end

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Time the launches of the `with` block as part of a stage."""
        if not self.runs:
            yield
            return
        start = self._now()
        yield
        self.events.append((stage, start, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)  # external, so that the event also works in a graph
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stage_ms(self) -> dict[str, float]:
        """The milliseconds of each stage. On a GPU, this waits for all queued work if stages were timed."""
        if self.device.type == "cuda" and self.events:
            torch.cuda.synchronize(self.device)
        total: dict[str, float] = {}
        for stage, start, end in self.events:
            spent = start.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - start)
            total[stage] = total.get(stage, 0.0) + spent
        return total


@dataclass
class Stages:
    """The arguments of a frame's stages.

    Attributes:
        resident, now, then: the scene, the views, and the views of the previous frame.
        memory, clock: the memory of the frame, and the clock that times its stages.
        depth: number of levels of the deepest tree.
        threads: default number of threads of a launch. Each thread processes every `threads`-th item of a list.
        occlusion: whether hidden geometry is skipped, and the depths are kept for the next frame.
        one_sided: as in `Renderer`.
        cuda_cpp: whether steps that have a faster CUDA C++ kernel use that kernel: the traversal of the trees from one
            queue (`persistent_cull`), the order of clusters (`sort_clusters`), small triangles (`rasterize_clusters`),
            hierarchical z (`reduce_tiles`) and the base pass of plain scenes (`base_pixels`).
        requests: buffers for page requests, if pages may be absent.
    """

    resident: Uploaded
    now: Uploaded
    then: Uploaded
    memory: FrameMemory
    depth: int
    threads: int
    clock: Clock
    occlusion: bool
    one_sided: bool
    cuda_cpp: bool
    requests: RequestBuffers | None = None

    def draw(self, history: bool) -> None:
        """Draw the visibility buffer, and collect the page requests of the culling kernels. `history` says whether
        geometry may be culled by the depths of the previous frame."""
        if self.requests is not None:
            # all culling kernels from here to `collect` add their requests, for cameras and for shadow maps
            self.requests.clear()
        self._draw(history)
        if self.requests is not None:
            with self.clock.of("requests"):
                self.requests.collect(self.memory.tensors["counters"], self.threads)

    def draw_more(self) -> None:
        """Draw more views of the same frame, without history; the page requests of their culling kernels are added to
        the earlier requests."""
        self._draw(history=False)

    def look_ahead(self, more: bool) -> None:
        """Run only the culling kernels of a frame, to collect the frame's page requests. If `more`, these requests are
        added to the requests collected before. If not, they replace the earlier requests."""
        requests = self.requests
        assert requests is not None

        def cull() -> None:
            if not more:
                requests.clear()
            self._begin()
            self._cull_first(0)
            requests.collect(self.memory.tensors["counters"], self.threads, aging=False)

        self._run(("ahead", more, float(self.memory.frame.pixel_error)), cull)

    def _draw(self, history: bool) -> None:
        frame = self.memory.frame
        self._begin()
        self._cull_first(int(history))
        self._rasterize(0)
        if not self.occlusion:
            return
        if history:
            if self.requests is not None:
                self.requests.keep_first()
            self._build_hzb()
            with self.clock.of("cull"):
                self._clear_lists(1)
                self._launch(level_cull.ask_again, *self._inputs[:2], frame)
            self._cull(0, 1)
            self._rasterize(1)
        self._build_hzb()

    def _begin(self) -> None:
        with self.clock.of("init_context"):
            self.memory.clear()
            arguments, threads = (*self._inputs, self.memory.frame, self.memory.pairs), max(12, self.threads // 12 * 12)
            self._launch(init_context.place_instances, *arguments, threads=threads)

    def _cull_first(self, asked: int) -> None:
        """Run the culling kernels of the first pass. `asked` says whether they test against the depths of the previous
        frame."""
        with self.clock.of("instance_cull"):
            self._clear_lists(0)
            shared = (*self._inputs, self.memory.frame)
            self._launch(instance_cull.cull_instances, *shared, asked, self.memory.pairs)
        self._cull(asked, 0)

    def draw_captured(self, history: bool) -> None:
        """Like `draw`. On a GPU, the second call with the same settings captures a CUDA graph. This call and later
        calls replay the graph, because launching about fifty kernels takes longer than running them."""
        key = (history, self.occlusion, self.one_sided, float(self.memory.frame.pixel_error), self.clock.runs)
        self._run(key, lambda: self.draw(history))

    def _run(self, key: tuple[object, ...], launches: Callable[[], None]) -> None:
        """Make the launches. On a GPU, the second call with the same key captures them as a CUDA graph. This call and
        later calls replay the graph."""
        if self.clock.device.type != "cuda":
            launches()
            return
        graphs, events = self.memory.graphs, self.clock.events
        seen, captured = key in graphs, graphs.pop(key, None)
        with torch.cuda.device(self.clock.device):
            # no graph at the first call, because there may be no second one, and this call compiles missing kernels
            if not seen:
                launches()
            else:
                captured = captured or self._capture(launches)
                graph, events[:] = captured
                graph.replay()
        graphs[key] = captured
        while len(graphs) > MOST_GRAPHS:
            del graphs[next(iter(graphs))]  # the graph that was used least recently

    def _capture(self, launches: Callable[[], None]) -> Captured:
        """Capture launches as a CUDA graph. Unlike `torch.cuda.graph`, this method does not free cached memory of
        device and host, and collects no garbage. Freeing and collecting together would take as long as a hundred
        frames.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.clock.device)
        with torch.cuda.stream(stream), collection_paused(collect=False):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU during the capture
            try:
                launches()
            finally:
                graph.capture_end()
        return graph, tuple(self.clock.events)

    def emit(
        self,
        targets: Any,
        light: Any,
        lights: Any,
        surfaces: Any,
        outputs: Collection[str],
        pictures: Mapping[str, torch.Tensor],
        plain: bool,
        attributes: bool,
    ) -> None:
        """Compute the named outputs from the visibility buffer.

        Args:
            targets, pictures: `buffers.Targets`, and the tensors that it refers to, by name.
            light: unit vector towards the default light.
            lights: `buffers.Lights`; its shadow maps must have been drawn.
            surfaces: `texturing.Surfaces`, which may be empty if no output has colours.
            outputs: names of the outputs.
            plain: whether the scene has neither lights nor materials.
            attributes: whether any mesh has vertex attributes.
        """
        shared = (*self._inputs, self.memory.frame, targets)
        base = not OF_BASE_PASS.isdisjoint(outputs)
        texels = threads = self.memory.canvas.tiled_texels
        if not base and not OF_DEPTH_TARGETS.isdisjoint(outputs):
            with self.clock.of("emit_depth_targets"):
                self._launch(emit_depth_targets.emit_depth_targets, *shared, texels, threads=threads)
        of_pixels = (*self._inputs[:2], self.memory.frame, targets)
        if "shadow" in outputs:
            with self.clock.of("shadows"):
                self._launch(shadows.shadows, *of_pixels, lights, texels, threads=threads)
        if "base_color" in outputs:
            with self.clock.of("base_colors"):
                self._launch(base_colors.base_colors, *of_pixels, surfaces, texels, threads=threads)
        if base and plain and self._has_plain_pixels(outputs):
            with self.clock.of("base_pass"):
                base_pixels.draw(self.resident, self.now, self.then, self.memory, pictures, light, attributes)
        elif base:
            with self.clock.of("base_pass"):
                self._launch(base_pass.base_pass, *shared, lights, surfaces, light, texels, threads=threads)

    def _has_plain_pixels(self, outputs: Collection[str]) -> bool:
        """Whether `base_pixels` can write these outputs, if the scene has neither lights nor materials. The caller
        checks the scene."""
        return self.cuda_cpp and self.memory.canvas.same > 0 and set(outputs) <= {*base_pixels.OUTPUTS, "overdraw"}

    def keep_depths(self, which: Any, texel_at: Any, depths: Any) -> None:
        """Store the nearest depths of the drawn shadow maps: the k-th drawn map becomes map number which[k] of
        `buffers.Lights`."""
        self._launch(shadows.keep_depths, self.now.values, self.memory.frame, which, texel_at, depths)

    def _sorts(self, second: int) -> bool:
        """Whether the kernel of `sort_clusters`, and not torch, sorts the visible clusters of a pass."""
        most = sort_clusters.MOST_OF_SECOND if second else sort_clusters.MOST
        return self.cuda_cpp and self.memory.room["visible"] <= most

    @property
    def _inputs(self) -> tuple[Any, Any, Any]:
        return self.resident.values, self.now.values, self.then.values

    def _clear_lists(self, second: int) -> None:
        """Before a pass, fill the queue of nodes with EMPTY if CUDA C++ is used, and the list `found` with LAST if
        torch sorts it."""
        if self.cuda_cpp:
            self.memory.clear_queue()
        if not self._sorts(second):
            self.memory.clear_found()

    def _cull(self, history: int, second: int) -> None:
        """Traverse the meshes' trees to find the visible clusters. The second pass starts from the items that the first
        pass found hidden, and tests them against the first pass's picture."""
        with self.clock.of("cull"):
            if self.cuda_cpp:
                persistent_cull.cull(self.resident, self.now, self.then, self.memory, history, second, self.requests)
                return
            arguments = (*self._inputs, self.memory.frame, history, second)
            for level in range(self.depth):
                self._launch(level_cull.cull_nodes, *arguments, level)
            if self.requests is None:
                self._launch(level_cull.cull_clusters, *arguments)
            else:
                self._launch(streamed_cull.cull_clusters, *arguments, self.requests.values)

    def _rasterize(self, second: int) -> None:
        memory, frame = self.memory, self.memory.frame
        with self.clock.of("sort"):
            found = memory.tensors["found"]
            if self._sorts(second):
                counter = second * buffers.PASS + buffers.VISIBLE
                sort_clusters.sort(found, memory.tensors["counters"], counter, memory.tensors["visible"][second])
            else:
                memory.sort_found(second)
            self._launch(rasterize.rank_clusters, self.resident.values, frame, second)
            if second:
                texels = memory.canvas.camera_texels
                self._launch(rasterize.rank_pixels, frame, texels, threads=texels)
        with self.clock.of("rasterize"):
            sides = int(self.one_sided)
            if self.cuda_cpp:
                rasterize_clusters.draw(self.resident, self.now, memory, second, sides)
            else:
                self._launch(rasterize.rasterize, *self._inputs[:2], frame, second, sides)
            few = max(1, self.threads // 16)  # fewer threads, because polygons use each thread's local memory
            self._launch(rasterize.clip_large, *self._inputs[:2], frame, second, sides, threads=few)
            self._launch(rasterize.find_tiles, self.now.values, frame, second)
            self._launch(rasterize.draw_tiles, self.now.values, frame, second)

    def _build_hzb(self) -> None:
        with self.clock.of("hzb"):
            if self.cuda_cpp:
                reduce_tiles.reduce_depths(self.now, self.memory)
                return
            for step in self.memory.canvas.hzb_steps:
                self._launch(hzb.reduce_depths, self.now.values, self.memory.frame, *step)

    def _launch(self, kernel: Any, *arguments: Any, threads: int | None = None) -> None:
        threads = threads or self.threads
        self.memory.launches(kernel, threads, *arguments, threads)
