"""One variant of the renderer, as ROOFTOP_SCENE_TRIAL names it: the frames that the goals are about.

    ROOFTOP_SCENE_TRIAL=records,tiles python benchmarks/scene_trials.py --out trials/records,tiles.json
    python benchmarks/scene_trials.py --compile  # only compiles the kernels

`pictures` are checksums: variants that draw the same bits have the same ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rooftop import scene
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.stages import Stages
from scene import G_BUFFER, around, field, middle, of_changes, of_scene, path, rock, sun, waited

ALL = (*G_BUFFER, "cluster", "triangle", "level", "material_depth", "coverage")


def mesh(folder: Path, detail: int) -> Path:
    there = folder / f"rock-{detail}.rtg"
    if not there.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            scene.build(*rock(detail), Path(own) / "rock.rtg")
            (Path(own) / "rock.rtg").rename(there)
    return there


def world_of(rocks: Path, count: int) -> scene.Scene:
    world = scene.Scene()
    world.add_instances(world.add_mesh(rocks), field(count))
    return world


def checksums(world: scene.Scene, cameras: list[scene.Camera], outputs: tuple[str, ...], device: str) -> dict[str, str]:
    renderer = scene.Renderer(world, device)
    for _ in range(2):
        frame = renderer.render(cameras, outputs)
    return {
        name: hashlib.sha256(frame[name].contiguous().view(torch.uint8).cpu().numpy()).hexdigest()[:12]
        for name in outputs
    }


def cascades(world: scene.Scene, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """As `scene.of_cascades`, and the stages of a frame whose maps are drawn again."""
    renderer, camera = scene.Renderer(world, options.device), path(0, *options.small)
    found: dict[str, Any] = {}
    for name, outputs, moves in (
        ("without", ("depth",), 0),
        ("anew", ("depth", "shadow"), 1),
        ("kept", ("depth", "shadow"), 0),
    ):
        took = []
        for frame in range(options.frames):
            world.set_light(0, sun(moves * frame, size))
            took.append(waited(lambda o=outputs: renderer.render(camera, o)))
        found[f"{name}_ms"] = middle(took)
    for frame in range(4):
        world.set_light(0, sun(1 + frame, size))
        stages = renderer.render(camera, ("depth", "shadow"), timings=True).stats
    return found | {"stage_ms": {k: round(v, 4) for k, v in stages.stage_ms.items()}, "clusters": stages.clusters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--meshes", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--frames", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="draw small pictures only, so that kernels get compiled")
    parser.add_argument("--only", nargs="+", default=["frame", "cameras", "cascades", "moved", "timeline", "pictures"])
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.kernels, options.sizes, options.changed = [None], [(1920, 1080)], (0, 100)
    options.small, options.large, cameras, side, counts, size = (
        (1920, 1080),
        (3840, 2160),
        64,
        512,
        (122_071, 12_208),
        2048,
    )
    detail = 6
    if options.compile or options.device == "cpu":
        options.frames, options.small, options.large, cameras, side, counts, size = (
            4,
            (64, 48),
            (96, 64),
            3,
            32,
            (60, 40),
            64,
        )
        options.sizes, detail, options.changed = [options.small], 3, (0, 10)
    rocks, found = mesh(options.meshes, detail), {"trial": os.environ.get("ROOFTOP_SCENE_TRIAL", ""), "at": time.time()}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    everything = {
        "frame": lambda: of_scene(
            world_of(rocks, counts[0]), [path(k, *options.large) for k in range(options.frames)], None, options
        ),
        "cameras": lambda: of_scene(
            world_of(rocks, counts[1]),
            [[around(frame, k, cameras, side) for k in range(cameras)] for frame in range(options.frames)],
            None,
            options,
        ),
        "cascades": lambda: with_sun(rocks, counts[1], size, options),
        "moved": lambda: {
            str(changed): of_changes(mesh(options.meshes, 3), "moved", counts[0], changed, options)
            for changed in options.changed
        },
        "timeline": lambda: {
            "large": timeline(world_of(rocks, counts[0]), [path(k, *options.large) for k in range(24)], options),
            "smallest": timeline(world_of(rocks, 1), [path(k, 64, 48) for k in range(24)], options),
        },
        "pictures": lambda: {
            "frame": checksums(world_of(rocks, counts[0]), [path(3, *options.small)], ALL, options.device),
            "cameras": checksums(
                world_of(rocks, counts[1]), [around(0, k, 5, 200) for k in range(5)], ALL, options.device
            ),
        },
    }
    for name in options.only:
        start = time.perf_counter()
        try:
            found[name] = everything[name]()
        except Exception as error:  # the others are worth having
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(found["trial"], name, f"{time.perf_counter() - start:.1f} s", json.dumps(found[name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def timeline(world: scene.Scene, cameras: list[scene.Camera], options: argparse.Namespace) -> dict[str, Any]:
    """Where the host is during a frame: microseconds from the call to each of these."""
    stamps: dict[str, list[float]] = {}
    start = 0.0

    def stamp(name: str) -> None:
        stamps.setdefault(name, []).append(1e6 * (time.perf_counter() - start))

    def stamped(name: str, call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            stamp(f"{name} begins")
            result = call(*arguments, **named)
            stamp(f"{name} ends")
            return result

        return wrapped

    renderer = scene.Renderer(world, options.device)
    names = ("draw_captured", "emit") if options.device == "cuda" else ("draw", "emit")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(patch.object(Stages, name, stamped(name, getattr(Stages, name))))
        patches.enter_context(patch.object(FrameMemory, "wanted_room", stamped("room", FrameMemory.wanted_room)))
        for camera in cameras:
            if options.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            frame = renderer.render(camera, G_BUFFER)
            stamp("returns")
            if options.device == "cuda":
                torch.cuda.synchronize()
            stamp("done")
            del frame
    return {name: round(statistics.median(found[len(found) // 2 :]), 1) for name, found in stamps.items()}


def with_sun(rocks: Path, count: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    world = world_of(rocks, count)
    world.add_light(sun(0, size))
    return cascades(world, size, options)


if __name__ == "__main__":
    raise SystemExit(main())
