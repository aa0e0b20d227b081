"""Streaming of pages: a billion distinct triangles, with two gigabytes of pages on the device.

    python benchmarks/scene_streaming.py --folder /data/rocks [--out benchmarks/results/h200/scene_streaming.json]

A field has a hundred rocks of ten million triangles, each in its own file. Ten rocks are built, and the others are
copies under other names. A camera flies a recorded path over them. Three renderers draw the path. The first has all
pages resident. The second has a pool, and draws each frame from the resident pages while it prefetches the path ahead.
The third has a pool, and waits for the pages of each frame. Each row has p50 and p99 of the time that a caller waits
for a frame. Rows of streaming also have the missing pages, the largest error in a picture, the pages loaded and
evicted, and the number of hole pixels. A hole pixel is a background pixel where the resident picture shows a surface,
farther from the surface's outline than that error. The time of a new renderer's first complete picture is compared with
the time to read and upload the same bytes alone, measured in the same run. Before the first picture, the script drops
the files from the system's cache, if the system allows that (`posix_fadvise`). `cache_dropped` says whether the pages
came from the disk.

`--quick` tests the script on a CPU, with few and small rocks. The goals are: no holes; p99 at most 1.5 times p50; p50
at most 1.15 times the resident renderer's p50; the first picture within 1.25 times the time to read and upload its
bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scene_rows import picture_size, timed, waited, writer

from rooftop import scene
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.scene import layouts
from rooftop.scene.streaming.loading import THREADS
from rooftop.whole_files import write_json

SPACING = 2.6  # distance between rocks, whose radius is about 1
AHEAD = 8  # number of frames to prefetch
GOALS = {"p99_to_p50": 1.5, "p50_to_resident": 1.15, "first_to_bytes": 1.25}


def rock(triangles: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A closed rock of about this many triangles: a cube of grids, inflated to a sphere and made rough at all
    scales."""
    side = max(2, round((triangles / 12) ** 0.5))
    random = np.random.default_rng(seed)
    at = np.linspace(-1, 1, side + 1)
    u, v = (each.ravel() for each in np.meshgrid(at, at, indexing="ij"))
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    right, below, across = corner + side + 1, corner + 1, corner + side + 2
    points, faces = [], []
    for axis in range(3):
        for way in (-1.0, 1.0):
            face = np.empty((len(u), 3))
            face[:, axis], face[:, (axis + 1) % 3], face[:, (axis + 2) % 3] = way, u, v
            quads = np.concatenate([np.stack([corner, right, below], 1), np.stack([below, right, across], 1)])
            faces.append((quads if way > 0 else quads[:, ::-1]) + len(points) * len(u))
            points.append(face)
    way = np.concatenate(points)
    way /= np.sqrt(way[:, 0] ** 2 + way[:, 1] ** 2 + way[:, 2] ** 2)[:, None]
    radius = np.ones(len(way))
    for octave in range(10):
        for _ in range(3):
            radius += (
                0.035 * 0.6**octave * np.sin(way @ (3.0 * 1.9**octave * random.normal(size=3)) + random.uniform(0, 6))
            )
    return way * radius[:, None], np.concatenate(faces)


def files_of(options: argparse.Namespace, folder: Path) -> list[Path]:
    """Create the rocks' files, and reuse existing ones."""
    built = []
    for number in range(options.built):
        path = folder / f"rock-{options.triangles}-{number}.rtg"
        if not path.exists():
            scene.build(*rock(options.triangles, number), path)
        built.append(path)
    files = []
    for number in range(options.files):
        path = folder / f"copy-{options.triangles}-{number}.rtg"
        if not path.exists():
            shutil.copyfile(built[number % len(built)], path)
        files.append(path)
    return files


def world_of(files: Sequence[Path]) -> scene.Scene:
    """A scene with these rocks in a square grid, each rotated."""
    world, side = scene.Scene(), int(np.ceil(len(files) ** 0.5))
    for number, path in enumerate(files):
        turn, place = 2.4 * number, np.eye(4)
        place[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        place[:2, 3] = SPACING * (np.array(divmod(number, side)) - (side - 1) / 2)
        world.add_instance(world.add_mesh(path), place)
    return world


def flight(options: argparse.Namespace) -> list[scene.Camera]:
    """The recorded path: a curve over the field that is partly low, near the rocks."""
    reach = SPACING * options.files**0.5 / 2
    width, height = options.size
    cameras = []
    for frame in range(options.frames):
        t = options.speed * frame
        eye = np.array([0.8 * reach * np.sin(t), 0.8 * reach * np.sin(0.7 * t + 1), 1.9 + 0.5 * np.cos(1.3 * t)])
        ahead = np.array([np.cos(t), 0.7 * np.cos(0.7 * t + 1), -0.45])
        cameras.append(scene.Camera.look_at(eye, eye + ahead, fov_y_degrees=60, width=width, height=height))
    return cameras


# ---- measurements ----------------------------------------------------------------------------------------------------


def frames(
    name: str, renderer: scene.Renderer, cameras: Sequence[scene.Camera], depths: list[torch.Tensor] | None, wait: bool
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Draw the path and measure it. Unless pages are streamed, draw it once before as a warm-up.

    Args:
        depths: depths of the resident renderer's pictures, to find holes; None for the resident renderer itself.
    """
    for camera in cameras if depths is None else cameras[:1]:
        renderer.render(camera, ("depth",))
    took, shown, stats, holes, prefetching = [], [], [], 0, []
    for at, camera in enumerate(cameras):
        frame, ms = timed(lambda c=camera: renderer.render(c, ("depth",), wait=wait))
        took.append(ms)
        stats.append(frame.stats.streaming)
        if depths is None:
            shown.append(frame["depth"][0].cpu())
        else:
            holes += holes_in(frame["depth"][0].cpu(), depths[at], stats[-1].error_pixels)
        if depths is not None and not wait and at + 1 < len(cameras):
            prefetching.append(waited(lambda n=at: renderer.prefetch(cameras[n + 1 : n + 1 + AHEAD : 3])))
    row: dict[str, Any] = {"what": name, "p50_ms": percentile(took, 50), "p99_ms": percentile(took, 99)}
    row |= {"most_ms": round(max(took), 4)}
    if depths is not None:
        row |= {"hole_pixels": holes, "frames_with_missing": sum(each.missing > 0 for each in stats)}
        row |= {"missing_most": max(each.missing for each in stats), "wanted_most": max(each.wanted for each in stats)}
        row |= {"error_pixels_most": round(max(each.error_pixels for each in stats), 3)}
        row |= {n: sum(getattr(each, n) for each in stats) for n in ("loaded", "evicted", "loaded_bytes")}
        row |= {"pool_bytes": stats[0].pool_bytes}
    if prefetching:
        row["prefetch_p50_ms"] = percentile(prefetching, 50)
    return row, shown


def holes_in(depth: torch.Tensor, resident: torch.Tensor, error_pixels: float) -> int:
    """Count background pixels inside the resident picture's surfaces, farther from an outline than the allowed
    error."""
    reach = min(2 * int(np.ceil(error_pixels)) + 3, 2 * min(depth.shape) - 1)
    background = resident.isinf().float()[None, None]
    near_outline = torch.nn.functional.max_pool2d(background, reach, 1, reach // 2)[0, 0] > 0
    return int((depth.isinf() & ~near_outline).sum())


def first_picture(options: argparse.Namespace, files: Sequence[Path], camera: scene.Camera) -> dict[str, Any]:
    """Time a new renderer's first picture with pages from the disk, and the mere reading and uploading of the same
    bytes."""
    world = world_of(files)
    dropped = drop_caches(files)
    renderer = scene.Renderer(world, options.device, pool_bytes=options.pool)
    frame, ms = timed(lambda: renderer.render(camera, ("depth",)))
    stats = frame.stats.streaming
    count, size = stats.loaded, stats.loaded_bytes
    dropped = drop_caches(files) and dropped
    read_s = read_alone(files, count)
    upload_s = uploaded_alone(count, options.device)
    return {
        "what": "first picture", "ms": round(ms, 3), "pages": count, "bytes": size, "cache_dropped": dropped,
        "missing": stats.missing, "read_ms": round(1e3 * read_s, 3), "upload_ms": round(1e3 * upload_s, 3),
        "to_bytes": round(ms / (1e3 * max(read_s, upload_s)), 3),
    }  # fmt: skip


def drop_caches(files: Sequence[Path]) -> bool:
    """Ask the system to drop the files from its cache, and return whether it takes such requests. The system may
    keep mapped pages."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_alone(files: Sequence[Path], pages: int) -> float:
    """Seconds to read this many pages, spread over the files, by as many threads as the renderer has, without
    processing."""
    places = [
        (path, k * layouts.PAGE_BYTES) for path in files for k in range(path.stat().st_size // layouts.PAGE_BYTES)
    ]
    places = places[:: max(1, len(places) // max(1, pages))][:pages]

    def read(place: tuple[Path, int]) -> None:
        file = os.open(place[0], os.O_RDONLY)
        os.preadv(file, [bytearray(layouts.PAGE_BYTES)], place[1])
        os.close(file)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, places))
    return time.perf_counter() - start


def uploaded_alone(pages: int, device: str) -> float:
    """Seconds to copy this many pages to the device, for a GPU from pinned memory."""
    staged = torch.ones(layouts.PAGE_BYTES // 4, dtype=torch.int32, pin_memory=device == "cuda")
    there = torch.empty(64, len(staged), dtype=torch.int32, device=device)
    return waited(lambda: [there[k % 64].copy_(staged, non_blocking=True) for k in range(pages)]) / 1e3


def percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4)


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The goals, and the value that each has reached."""
    by = {row["what"]: row for row in rows}
    streamed, resident = by["streamed"], by["resident"]
    return {
        "goals": GOALS | {"hole_pixels": 0},
        "p99_to_p50": round(streamed["p99_ms"] / streamed["p50_ms"], 3),
        "p50_to_resident": round(streamed["p50_ms"] / resident["p50_ms"], 3),
        "first_to_bytes": by["first picture"]["to_bytes"],
        "hole_pixels": streamed["hole_pixels"] + by["streamed, waited for"]["hole_pixels"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--folder", type=Path, help="folder in which the files (about 11 GB) are kept (default: a temporary folder)"
    )
    parser.add_argument("--triangles", type=int, default=10_000_000, help="number of triangles per rock")
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--built", type=int, default=10)
    parser.add_argument("--pool", type=int, default=2_000_000_000, help="bytes")
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--speed", type=float, default=0.004, help="seconds along the path from one frame to the next")
    parser.add_argument("--size", type=picture_size, default=(1920, 1080))
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    options.device = "cuda"
    if not options.quick:
        os.environ.setdefault("ROOFTOP_COMPILED_CALLS", "wait")  # load by C++ threads from the first frame on
    else:
        options.device, options.triangles, options.files, options.built = "cpu", 60_000, 9, 2
        options.pool, options.frames, options.speed, options.size = 20 * layouts.PAGE_BYTES, 16, 0.2, (240, 180)
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    found: dict[str, Any] = {"environment": {"device": ceilings.device, "versions": ceilings.versions}, "rows": []}
    row = writer(found, options.out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files, cameras = files_of(options, folder), flight(options)
        world = world_of(files)
        row({
            "what": "scene", "files": len(files), "triangles": sum(mesh.meta["triangles"] for mesh in world.meshes),
            "bytes": sum(mesh.size_bytes for mesh in world.meshes), "size": list(options.size), "frames": len(cameras),
        })  # fmt: skip
        values, depths = frames("resident", scene.Renderer(world, options.device), cameras, None, True)
        row(values)
        for name, wait in (("streamed", False), ("streamed, waited for", True)):
            renderer = scene.Renderer(world, options.device, pool_bytes=options.pool)
            row(frames(name, renderer, cameras, depths, wait)[0])
            del renderer
        row(first_picture(options, files, cameras[0]))
    found["judged"] = judged(found["rows"])
    print(json.dumps(found["judged"]))
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
