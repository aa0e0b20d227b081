"""A flight over mountains of any number of triangles, and pictures of it.

    python examples/terrain.py [--triangles 500000] [--ground 2048] [--frames 6] [--size 960x540] [--out terrain]

The mountains are ridged noise (Musgrave, in Ebert et al. 2003, "Texturing and Modeling", chapter 16). The mountains are
built once into levels of detail (`terrain.rtg` in the folder). Each frame draws only as many triangles as its pixels
need, whether the mountains have a hundred thousand or a hundred million. A picture of the levels comes with each shaded
picture: red is the original mesh, and each further colour has half the triangles. --ground paints grass, rock and snow
on a texture of that width in texels. The texture is finer than the triangles, and the renderer filters it.

For each frame the script prints the drawn triangles, holes (pixels without a surface in the middle of one), and the
difference from the previous picture. A visible switch of levels would show as a frame unlike its neighbours.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from rooftop import scene

Floats = NDArray[np.float64]

SIDE_M = 4000.0  # side of the square on which the mountains stand
HEIGHT_M = 900.0
OCTAVES = 11
STEP_M = 12.0  # distance that the camera flies from frame to frame
ABOVE_M = 130.0  # height above the highest ground under its path


def heights(x: Floats, y: Floats, seed: int = 0) -> Floats:
    """Heights above the plain in metres, for positions (0..1) in the square."""
    random = np.random.default_rng(seed)
    total, weight, size = np.zeros_like(x), np.ones_like(x), 1.0
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])  # rotates the grid of each octave, so that no two grids align
    place = np.stack([x, y], -1) * 3.0
    for _ in range(OCTAVES):
        ridge = (1.0 - np.abs(_noise(place + random.uniform(0, 64, 2), random))) ** 2
        total += size * weight * ridge
        weight = np.clip(1.6 * ridge * weight, 0, 1)  # ridges are rough, valleys smooth
        place, size = 2.02 * place @ turn, 0.48 * size
    return HEIGHT_M * (total / 1.9) ** 1.5


def _noise(place: Floats, random: np.random.Generator) -> Floats:
    """Gradient noise, about -1..1 (Perlin 2002)."""
    angles = random.uniform(0, 2 * np.pi, (256, 256))
    gradients = np.stack([np.cos(angles), np.sin(angles)], -1)
    cell = np.floor(place)
    inside = place - cell
    fade = inside**3 * (inside * (inside * 6 - 15) + 10)
    cell = cell.astype(np.int64)
    corners = []
    for down in (0, 1):
        for right in (0, 1):
            gradient = gradients[(cell[..., 0] + right) % 256, (cell[..., 1] + down) % 256]
            corners.append(gradient[..., 0] * (inside[..., 0] - right) + gradient[..., 1] * (inside[..., 1] - down))
    above = corners[0] + fade[..., 0] * (corners[1] - corners[0])
    below = corners[2] + fade[..., 0] * (corners[3] - corners[2])
    noise: Floats = 1.5 * (above + fade[..., 1] * (below - above))
    return noise


def grid(side: int) -> tuple[Floats, NDArray[np.int64]]:
    """Positions (side^2, 2) in 0..1 and the faces (2 (side - 1)^2, 3) between them, counterclockwise from above."""
    steps = np.linspace(0, 1, side)
    places = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)
    corner = (np.arange(side - 1)[:, None] * side + np.arange(side - 1)).reshape(-1, 1)
    faces = np.concatenate([corner + np.array((0, 1, side + 1)), corner + np.array((0, side + 1, side))])
    return places, faces


def heights_of(places: Floats, seed: int) -> Floats:
    """The heights at many positions (N, 2), computed in parts."""
    parts = np.array_split(places, len(places) >> 18 or 1)
    return np.concatenate([heights(part[:, 0], part[:, 1], seed) for part in parts])


def ground(texels: int, seed: int = 0) -> NDArray[np.uint8]:
    """The texture (texels, texels, 3), north on top: grass low, snow high, rock on steep ground."""
    steps = (np.arange(texels) + 0.5) / texels
    x, y = np.meshgrid(steps, steps[::-1])
    z = heights_of(np.stack([x, y], -1).reshape(-1, 2), seed).reshape(texels, texels)
    steep = np.hypot(*np.gradient(z, SIDE_M / texels))
    speckles = np.random.default_rng(seed).normal(0, 1, (texels, texels))
    snow = np.clip((z + 25 * speckles - 0.42 * HEIGHT_M) / 80, 0, 1)[..., None]
    rock = np.clip(1.5 * (steep + 0.1 * speckles - 1.1), 0, 1)[..., None]
    colors = (1 - snow) * (0.40, 0.48, 0.22) + snow * (0.96, 0.97, 1.0)
    colors = (1 - rock) * colors + rock * (0.58, 0.52, 0.47)
    return np.rint(255 * np.clip(colors * (1 + 0.06 * speckles[..., None]), 0, 1)).astype(np.uint8)


def mountains(triangles: int, path: Path, seed: int = 0, texels: int = 0) -> scene.BuildReport:
    """The mountains, built from at least this many triangles, with a texture of this width in texels."""
    places, faces = grid(int(np.ceil((triangles / 2) ** 0.5)) + 1)
    points = np.column_stack([places * SIDE_M, heights_of(places, seed)])
    if not texels:
        return scene.build(points, faces, path, normals="smooth")
    table = [scene.Material(texture=ground(texels, seed), wrap="clamp", name="ground")]
    return scene.build(points, faces, path, normals="smooth", uv=places, material_table=table)


def flight(frames: int, seed: int, width: int, height: int) -> list[scene.Camera]:
    """A straight flight over the mountains, with the camera tilted down a little."""
    along = np.linspace(0, 1, 512)
    direction = np.array([0.94, 0.34])
    start = np.array([0.12, 0.3])
    under = start + along[:, None] * 0.5 * direction
    z = heights(under[:, 0], under[:, 1], seed).max() + ABOVE_M
    cameras = []
    for frame in range(frames):
        eye = np.append(start * SIDE_M + frame * STEP_M * direction, z)
        target = eye + np.append(direction * 100, -32.0)
        cameras.append(scene.Camera.look_at(eye, target, fov_y_degrees=55, width=width, height=height, near=1.0))
    return cameras


def holes(depth: torch.Tensor) -> int:
    """The number of pixels of a picture (H, W) without a surface, although all eight neighbours show one."""
    there = depth.isfinite().float()[None, None]
    around = 9 * torch.nn.functional.avg_pool2d(there, 3, stride=1)  # number of surface pixels among nine
    return int(((around.round() == 8) & (there[..., 1:-1, 1:-1] == 0)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--triangles", type=int, default=500_000, help="number of triangles of the mountains; 10000000 and more work"
    )
    parser.add_argument(
        "--ground",
        type=int,
        default=0,
        metavar="TEXELS",
        help="width of the texture in texels; 2048 is good, 0 paints nothing",
    )
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--size", default="960x540", metavar="WIDTHxHEIGHT")
    parser.add_argument("--seed", type=int, default=4, help="each seed gives other mountains")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("terrain"), metavar="FOLDER")
    options = parser.parse_args()
    try:
        width, height = map(int, options.size.split("x"))
    except ValueError:
        parser.error(f"--size {options.size}: expected WIDTHxHEIGHT in pixels, such as 960x540")
    if options.triangles < 2 or options.frames < 1:
        parser.error("expected at least 2 triangles and 1 frame")
    if not 0 <= options.ground <= 8192:
        parser.error(f"--ground {options.ground}: expected 0 to 8192 texels")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"{options.out} is not a folder")
    options.out.mkdir(parents=True, exist_ok=True)

    began = time.perf_counter()
    report = mountains(options.triangles, options.out / "terrain.rtg", options.seed, options.ground)
    print(f"{report.triangles:,} triangles in {len(report.levels)} levels, {report.size_bytes:,} bytes")
    print(f"made and built in {time.perf_counter() - began:.1f} s, once", flush=True)

    world = scene.Scene()
    world.add_instance(world.add_mesh(report.path))
    renderer = scene.Renderer(world, options.device)
    before = None
    for number, camera in enumerate(flight(options.frames, options.seed, width, height)):
        frame = renderer.render(camera, outputs=("color", "level", "depth"))
        for show in ("color", "level"):
            Image.fromarray(scene.picture(frame, show)).save(options.out / f"{show}-{number:03}.png")
        color, depth = frame["color"], frame["depth"][0]
        change = "" if before is None else f", {float((color - before).abs().mean()) * 255:.2f} of 255 unlike the last"
        levels = f"{frame.stats.levels[0]} to {frame.stats.levels[-1]}" if frame.stats.levels else "none"
        print(
            f"frame {number}: {frame.stats.triangles:,} triangles of levels {levels}, "
            f"{float(depth.isfinite().float().mean()):.1%} of the picture, {holes(depth)} holes{change}",
            flush=True,
        )
        before = color
    print(f"pictures: {options.out}")


if __name__ == "__main__":
    main()
