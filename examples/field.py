"""Ten thousand rocks on a plain, each of a third of a million triangles, in one picture.

    python examples/field.py [--rocks 10000] [--detail 7] [--size 960x540] [--sun 1,0.6,-0.7] [--out field]

A rock is a ball with random flat cuts and noise like that of a 3D scan. Memory holds one rock; each instance is only a
transform. The pictures show the shaded field, its instances, clusters and levels, and how often each pixel was covered.
The camera moves a little between two frames, and the second frame culls what the surfaces of the first one hide. With
--sun, the direction of the sunlight, rocks and hills cast shadows; the second frame reuses the shadow maps of the
first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import trimesh
from numpy.typing import NDArray
from PIL import Image
from terrain import grid

from rooftop import scene

Floats = NDArray[np.float64]

SHOWN = ("color", "instance", "cluster", "level", "overdraw")
SPACING = 3.0  # units between rocks, whose radius is about 1
CUTS = 24


def rock(detail: int, seed: int = 0) -> tuple[Floats, NDArray[np.int64]]:
    """A closed mesh of 20 * 4^detail triangles, its radius about 1."""
    random = np.random.default_rng(seed)
    ball = trimesh.creation.icosphere(detail)
    way = ball.vertices  # (V, 3) directions
    cuts = random.normal(size=(CUTS, 3))
    cuts /= np.linalg.norm(cuts, axis=1, keepdims=True)
    reach = random.uniform(0.72, 1.0, CUTS) / (way @ cuts.T).clip(1e-3)  # distance to each cut's plane
    radius = np.minimum(reach.min(1), 1.0)
    # Waves in random directions, from a third of the rock down to its grain.
    for octave in range(9):
        waves = random.normal(size=(6, 3)) * 4.0 * 1.8**octave
        shifts = random.uniform(0, 2 * np.pi, 6)
        radius += 0.022 * 0.6**octave * np.sin((way * radius[:, None]) @ waves.T + shifts).sum(1)
    radius += random.normal(0, 0.0004, len(radius))  # the noise of a scanner
    return way * radius[:, None] * (1.15, 0.95, 0.8), ball.faces


def ground(extent: float) -> tuple[Floats, NDArray[np.int64]]:
    """A plain with hills, (V, 3) and its faces."""
    places, faces = grid(256)
    xy = (places - 0.5) * extent
    return np.column_stack([xy, hills(xy)]), faces


def hills(xy: Floats) -> Floats:
    height: Floats = 2.0 * np.sin(xy[:, 0] / 31 + 1) * np.cos(xy[:, 1] / 23) + 0.7 * np.sin(xy.sum(1) / 11)
    return height


def placed(count: int, seed: int = 0) -> Floats:
    """Transforms (N, 4, 4) of rocks: turned at random, of several sizes, sunk a little into the ground."""
    random = np.random.default_rng(seed)
    side = int(np.ceil(count**0.5))
    number = np.arange(count)
    xy = (
        np.column_stack([number % side, number // side]) - (side - 1) / 2 + random.uniform(-0.4, 0.4, (count, 2))
    ) * SPACING
    turns, _ = np.linalg.qr(random.normal(size=(count, 3, 3)))
    turns *= np.linalg.det(turns)[:, None, None]  # none is mirrored
    size = random.lognormal(-0.25, 0.35, count)
    transforms = np.tile(np.eye(4), (count, 1, 1))
    transforms[:, :3, :3] = turns * size[:, None, None]
    transforms[:, :3, 3] = np.column_stack([xy, hills(xy) + 0.5 * size])
    return transforms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rocks", type=int, default=10_000)
    parser.add_argument("--detail", type=int, default=7, help="a rock has 20 * 4^DETAIL triangles")
    parser.add_argument("--size", default="960x540", metavar="WIDTHxHEIGHT")
    parser.add_argument("--sun", metavar="X,Y,Z", help="direction in which sunlight travels; rocks then cast shadows")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("field"), metavar="FOLDER")
    options = parser.parse_args()
    try:
        width, height = map(int, options.size.split("x"))
    except ValueError:
        parser.error(f"--size {options.size}: expected WIDTHxHEIGHT in pixels, such as 960x540")
    if options.rocks < 1 or not 0 <= options.detail <= 10:
        parser.error("expected at least 1 rock, and a detail of 0 to 10")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"{options.out} is not a folder")
    options.out.mkdir(parents=True, exist_ok=True)

    transforms = placed(options.rocks)
    reach = float(np.abs(transforms[:, :2, 3]).max()) + SPACING
    plain = scene.build(*ground(2.4 * reach), options.out / "ground.rtg", normals="smooth")
    stone = scene.build(*rock(options.detail), options.out / "rock.rtg", normals="smooth")
    world = scene.Scene()
    world.add_instance(world.add_mesh(plain.path))
    world.add_instances(world.add_mesh(stone.path), transforms)
    total = plain.triangles + options.rocks * stone.triangles
    print(f"{options.rocks:,} rocks of {stone.triangles:,} triangles, built in {stone.seconds:.1f} s", flush=True)

    shown: tuple[str, ...] = SHOWN
    if options.sun:
        world.add_light(scene.DirectionalLight([float(number) for number in options.sun.split(",")]))
        shown = (*SHOWN, "shadow")
    renderer = scene.Renderer(world, options.device)
    top = float(transforms[:, 2, 3].max())
    for step in (0.0, 0.05):
        eye = (0.1 * reach + step, -0.75 * reach - 4, top + 4)
        camera = scene.Camera.look_at(eye, (0, 0, top - 0.2 * reach), fov_y_degrees=45, width=width, height=height)
        frame = renderer.render(camera, outputs=shown)
        found = frame.stats
        print(
            f"drawn: {found.triangles:,} of {total:,} triangles ({found.triangles / total:.3%}), "
            f"{found.clusters:,} clusters, levels {', '.join(map(str, found.levels))}; hidden: {found.occluded:,}"
            + (f"; shadow maps: {found.shadow_maps}" if options.sun else ""),
            flush=True,
        )
    for show in shown:
        Image.fromarray(scene.picture(frame, show)).save(options.out / f"{show}.png")
    print(f"pictures: {options.out}")


if __name__ == "__main__":
    main()
