"""The host's cost of a frame: the number of launches, and microseconds in Python.

    python benchmarks/scene_host.py [--out benchmarks/results/cpu/scene_host.json] [--frames 400]

On a GPU, one call replays the stages up to hierarchical z from a CUDA graph. Python launches all other stages for each
frame, and the caller waits for these launches. This script runs on the CPU. It leaves out the stages in the graph, and
replaces each kernel by nothing: Warp's launch returns before it calls the kernel. So only Python's time is measured.
The cases are:

    resident         nothing has changed
    moved            100 of 1,000 instances have moved
    kept             a sun with four cascades whose shadow maps are kept, with the output `shadow`
    cameras          64 cameras in one call

The script counts Warp's launches, and the torch operators that would be a kernel or a copy on a GPU. `replayed` is the
number of launches that the graph would have, if Warp's kernels draw. Times are medians over all frames, for depth alone
and for a G-buffer. Cases take turns, frame by frame.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import trimesh
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop import scene
from rooftop.launch.triton_launch import count_launches
from rooftop.scene.rendering.stages import Stages
from rooftop.whole_files import write_json

OUTPUTS = {"depth": ("depth",), "g_buffer": ("depth", "normal", "instance", "material", "velocity", "color")}
NO_LAUNCH = {"empty", "view", "as_strided", "slice", "select", "_unsafe_view", "split", "alias", "detach", "empty_like"}
SIDE = 16  # pixels


class Operators(TorchDispatchMode):
    """Counts the operators of torch that a GPU would run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH and not name.startswith("_local_scalar"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def camera(number: int = 0) -> scene.Camera:
    return scene.Camera.look_at((9 + 0.01 * number, 1, 2), (0, 0, 0), width=SIDE, height=SIDE)


def case(what: str, mesh: Path, outputs: tuple[str, ...]) -> Callable[[int], Callable[[], object]]:
    """Return a function that changes the scene for a frame, which is not timed, and returns the function that draws the
    frame."""
    world, random = scene.Scene(), np.random.default_rng(0)
    count = 1000 if what == "moved" else 4
    places = np.tile(np.eye(4), (count, 1, 1))
    places[:, :3, 3] = random.normal(0, 1, (count, 3))
    world.add_instances(world.add_mesh(mesh), places)
    if what == "kept":
        world.add_light(scene.DirectionalLight((1, 0.6, -0.7), size=16, cascades=4))
        outputs = (*outputs, "shadow")
    renderer = scene.Renderer(world, "cpu")

    def frame(number: int) -> Callable[[], object]:
        """Change the scene for this frame, and return its draw call. The camera moves, unless shadow maps are to be
        kept."""
        if what == "moved":
            chosen = random.permutation(count)[:100]
            moved = places[chosen]
            moved[:, :3, 3] += random.normal(0, 0.01, (100, 3))
            world.move_all(chosen, moved)
        if what == "cameras":
            views = [camera(number + k) for k in range(64)]
            return lambda: renderer.render(views, outputs)
        view = camera(0 if what == "kept" else number)
        return lambda: renderer.render(view, outputs)

    for number in range(3):
        frame(number)()
    return frame


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--frames", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[tuple[str, str], Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        box = trimesh.creation.box((2, 2, 2))
        scene.build(box.vertices, box.faces, Path(folder) / "cube.rtg")
        for what in ("resident", "moved", "kept", "cameras"):
            for name, outputs in OUTPUTS.items():
                cases[what, name] = case(what, Path(folder) / "cube.rtg", outputs)
        took: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
        rows, whole = [], {}
        for key, frame in cases.items():
            draw = frame(3)
            with count_launches() as launches, Operators() as operators:
                draw()
            whole[key] = launches.total() + operators.counts.total()
        # Skip the graph's replay, and return from each launch before its kernel.
        with patch.object(Stages, "draw", lambda *_: None), patch("warp._src.context.invoke", lambda *_: None):
            for number in range(4, 4 + options.frames):
                for key, frame in cases.items():
                    draw = frame(number)
                    start = time.thread_time()
                    draw()
                    took[key].append(1e6 * (time.thread_time() - start))
            for (what, name), frame in cases.items():
                draw = frame(5 + options.frames)
                with count_launches() as launches, Operators() as operators:
                    draw()
                row = {"what": what, "outputs": name, "microseconds": round(statistics.median(took[what, name]), 1)}
                total = launches.total() + operators.counts.total()
                row |= {"launches": total, "replayed": whole[what, name] - total}
                rows.append(row | {"warp": dict(launches), "torch": dict(operators.counts)})
                print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        write_json(options.out, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
