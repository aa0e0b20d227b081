"""`rooftop scene render`: render pictures of virtual geometry, and show the time of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table

from rooftop import scene
from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import check_json, check_writable, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.scene_cameras import Choice, Numbers, chosen_cameras, turned
from rooftop.errors import InputError, RooftopError
from rooftop.scene.framing import around, outline
from rooftop.scene.gbuffers import FrameStats
from rooftop.scene.rendering.renderer import LIGHT
from rooftop.scene.scenes import MAX_INSTANCES
from rooftop.whole_files import whole_file

Bytes = NDArray[np.uint8]

NIGHT, INK = (16, 19, 26), (226, 230, 238)  # colours of captions
SPACING = 1.2  # distance between the centers of neighbouring instances, as a multiple of the widest mesh's width


def run_render(
    files: tuple[Path, ...],
    out: Path,
    shows: tuple[str, ...],
    orbit: Numbers | None,
    eye: Numbers | None,
    target: Numbers | None,
    up: Numbers | None,
    fov: float | None,
    parallel: float | None,
    intrinsics: str | None,
    pose: Path | None,
    camera: Path | None,
    path: Path | None,
    near: float | None,
    size: tuple[int, int] | None,
    frames: int | None,
    instances: int | None,
    pixel_error: float,
    pool: int | None,
    no_occlusion: bool,
    light: Numbers | None,
    shadows: bool,
    device: str,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.scene_render:render_command` describes."""
    where = pick_device(None if device == "auto" else device)
    shows = tuple(dict.fromkeys(shows))
    world = world_of(files, instances, up or (0.0, 0.0, 1.0))
    if "uv" in shows and not any(mesh.meta["has_uv"] for mesh in world.meshes):
        raise click.UsageError("--show uv: no FILE has texture coordinates")
    if "vertex_color" in shows and not any(mesh.meta["has_colors"] for mesh in world.meshes):
        raise click.UsageError("--show vertex_color: no FILE has colours of vertices")
    if shadows or "shadow" in shows:
        with wrong_call():
            world.add_light(scene.DirectionalLight([-number for number in light or LIGHT]))
    bounds = world.bounds()
    choice = Choice(eye, target, up, fov, orbit, parallel, intrinsics, pose, camera, size, near, path, frames)
    cameras = chosen_cameras(choice, outline(world))
    if frames is not None and frames > 1 and path is None:
        if len(cameras) > 1:
            raise click.UsageError(
                f"--frames rotates a single camera, but {camera} has {len(cameras)}: leave --frames out"
            )
        center = np.asarray(bounds.mean(0) if target is None else target)
        axis = around(up or (0.0, 0.0, 1.0))[2]
        cameras = [turned(cameras[0], 360 * step / frames, center, tuple(axis)) for step in range(frames)]
    names = _names(out, shows, len(cameras))
    read = [*files, *(each for each in (pose, camera, path) if each is not None)]
    read += [Path(intrinsics)] if intrinsics is not None and "," not in intrinsics else []
    for name in (each for of_frame in names for each in of_frame.values()):
        check_writable(name, read)
    check_json(json_path, read)

    with wrong_call():
        renderer = scene.Renderer(
            *(world, where),
            pixel_error=pixel_error,
            occlusion=not no_occlusion,
            light=light or LIGHT,
            pool_bytes=pool,
        )
    found: list[FrameStats] = []
    with progress_bar() as progress, _memory_of(where):
        progress("loading kernels and pages", 0.0)
        for number, (each, of_frame) in enumerate(zip(cameras, names, strict=True)):
            # repeat the first frame: it builds the kernels and the CUDA graph, and yields depths for occlusion culling
            for timed in (True,) if number else (False, True, True) if where.type == "cuda" else (True, True):
                with wrong_call():
                    frame = renderer.render(each, shows, timings=timed)
            found.append(frame.stats)
            progress(f"frame {number + 1} of {len(cameras)}", (number + 0.5) / len(cameras))
            colored = {show: scene.picture(frame, show) for show in shows}
            for picture, name in _pictures(colored, of_frame):
                _save(picture, name)
            progress(f"frame {number + 1} of {len(cameras)}", (number + 1) / len(cameras))

    if json_path is not None and write_json(json_path, _plain(files, world, where, cameras, names, found)):
        return
    console = output_console()
    console.print(_table(found))
    for line in _lines(found, world):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    written = [name for of_frame in names for name in dict.fromkeys(of_frame.values())]
    dots = f", ..., {written[-1]}" if len(written) > 3 else ""
    click.echo(f"pictures: {', '.join(map(str, written[: 1 if dots else 3]))}{dots}")
    if json_path is not None:
        click.echo(f"statistics: {json_path}")


def world_of(files: Sequence[Path], instances: int | None, up: Numbers) -> scene.Scene:
    """Return a scene with each mesh once or, if `instances` is given, with that many instances in all, in a square grid
    on the ground. The instances take the meshes in turn."""
    if instances is not None and instances > MAX_INSTANCES:
        raise InputError(f"--instances {instances:,}: a scene has at most {MAX_INSTANCES:,} instances")
    world = scene.Scene()
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        world.add_mesh(path)
    if instances is None:
        for mesh in range(len(files)):
            world.add_instance(mesh)
        return world
    directions = around(up)[:2]  # (2, 3)
    boxes = np.array([np.add(mesh.meta["bounds"], mesh.meta["origin"]) for mesh in world.meshes])  # (meshes, 2, 3)
    step = SPACING * (abs(directions) @ (boxes[:, 1] - boxes[:, 0]).T).max()
    side = int(np.ceil(np.sqrt(instances)))
    number = np.arange(instances)
    place = np.stack([number % side, number // side], 1) - (side - 1) / 2
    transforms = np.tile(np.eye(4), (instances, 1, 1))
    # Center each mesh in its cell of the grid. `place` and `middles` have the two coordinates along the ground.
    middles = (boxes.mean(1) @ directions.T)[number % len(files)]
    transforms[:, :3, 3] = (place * step - middles) @ directions
    for mesh in range(len(files)):
        world.add_instances(mesh, transforms[mesh :: len(files)])
    return world


def _names(out: Path, shows: Sequence[str], frames: int) -> list[dict[str, Path]]:
    """For each frame, return the path of the output file for each --show value."""
    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out}: expected a name that ends in .png", param_hint="--out")
    if frames > 1 and "{frame}" not in out.name:
        out = out.with_name(f"{out.stem}-{{frame}}{out.suffix}")
    digits = max(4, len(str(frames - 1)))
    numbered = [out.name.replace("{frame}", str(frame).zfill(digits)) for frame in range(frames)]
    return [{show: out.with_name(name.replace("{show}", show)) for show in shows} for name in numbered]


def _pictures(pictures: Mapping[str, Bytes], names: Mapping[str, Path]) -> Iterator[tuple[Image.Image, Path]]:
    """Yield each image of a frame with its output file. If all images have the same file, yield one sheet of all images
    instead.
    """
    if len(set(names.values())) == len(pictures):
        yield from ((Image.fromarray(picture), names[show]) for show, picture in pictures.items())
    else:
        yield _sheet(pictures), next(iter(names.values()))


def _sheet(pictures: Mapping[str, Bytes]) -> Image.Image:
    """Arrange equally large images with captions on one sheet, in about as many rows as columns."""
    height, width = next(iter(pictures.values())).shape[:2]
    columns = int(np.ceil(np.sqrt(len(pictures))))
    rows = -(-len(pictures) // columns)
    line = max(16, height // 24)
    sheet = Image.new("RGB", (columns * width, rows * (height + line)), NIGHT)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(0.7 * line)
    for number, (show, picture) in enumerate(pictures.items()):
        left, top = number % columns * width, number // columns * (height + line)
        pen.text((left + width // 2, top + line // 2), show, INK, font, "mm")
        sheet.paste(Image.fromarray(picture), (left, top + line))
    return sheet


def _save(picture: Image.Image, path: Path) -> None:
    """Write a picture completely or not at all. A device or a pipe is written directly."""
    with whole_file(path) as partial, partial.open("wb") as file:
        picture.save(file, format="PNG")


def _table(found: Sequence[FrameStats]) -> Table:
    """A table with the milliseconds of each stage, averaged over the frames."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage")
    table.add_column("ms" if len(found) == 1 else f"ms, mean of {len(found)} frames", justify="right")
    stages = _mean_ms(found)
    for stage, ms in [*stages.items(), ("together", sum(stages.values()))]:
        table.add_row(stage, f"{ms:,.3f}")
    return table


def _mean_ms(found: Sequence[FrameStats]) -> dict[str, float]:
    stages = dict.fromkeys(stage for each in found for stage in each.stage_ms)
    return {stage: sum(each.stage_ms.get(stage, 0.0) for each in found) / len(found) for stage in stages}


def _lines(found: Sequence[FrameStats], world: scene.Scene) -> list[str]:
    whole = world.triangles
    levels = sorted({level for each in found for level in each.levels})
    drawn, clusters, hidden = (
        _span([getattr(each, name) for each in found]) for name in ("triangles", "clusters", "occluded")
    )
    lines = [
        f"drawn: {drawn} of {whole:,} triangles, in {clusters} clusters",
        f"levels of detail: {_runs(levels) or 'none'}; hidden by surfaces of the previous frame: {hidden} instances, "
        "nodes, groups and clusters",
    ]
    streaming = [each.streaming for each in found if each.streaming is not None]
    if streaming:
        wanted, resident = (_span([getattr(each, name) for each in streaming]) for name in ("wanted", "resident"))
        lines.append(
            f"pages: {wanted} wanted, {resident} resident in {streaming[0].pool_bytes:,} bytes; the surface is off by "
            f"at most {max(each.error_pixels for each in streaming):.3g} pixels"
        )
    if not all(each.triangles for each in found):
        lines.append(
            "nothing is in view in one of the pictures: look elsewhere (--eye, --target), or show nearer surfaces "
            "(--near)"
        )
    return lines


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _runs(numbers: Sequence[int]) -> str:
    """Format sorted numbers as runs: 0, 1, 2, 5 become "0 to 2, 5"."""
    starts = [0, *(place + 1 for place, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    runs = [numbers[a:b] for a, b in pairwise(starts)] if numbers else []
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _plain(
    files: Sequence[Path],
    world: scene.Scene,
    where: torch.device,
    cameras: Sequence[scene.Camera],
    names: Sequence[Mapping[str, Path]],
    found: Sequence[FrameStats],
) -> dict[str, Any]:
    """The results for JSON. Perspective cameras have the format that --camera reads."""
    frames = []
    for camera, of_frame, stats in zip(cameras, names, found, strict=True):
        plain: dict[str, Any] = {
            "K": [[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]],
            "world_to_camera": camera.world_to_camera.tolist(),
            "width": camera.width,
            "height": camera.height,
            "near": camera.near,
        }
        pictures = {show: str(path) for show, path in of_frame.items()}
        frames.append(
            {"camera": plain | ({"orthographic": True} if camera.orthographic else {}), "pictures": pictures}
            | {"statistics": asdict(stats)}
        )
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    return {
        "files": [str(path) for path in files],
        "instances": len(world),
        "bounds": world.bounds().tolist(),
        "device": name,
        "frames": frames,
    }


@contextmanager
def wrong_call() -> Iterator[None]:
    """Turn a ValueError of the library into an `InputError`, since the options caused the error."""
    try:
        yield
    except RooftopError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from None


@contextmanager
def _memory_of(where: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise RooftopError(
            f"the scene or the picture does not fit into the memory of {where}; try a smaller --size, --pool SIZE "
            "to keep only a part of the scene in that memory, or --device cpu"
        ) from error
