"""Virtual geometry: build times, and frame times of growing scenes compared with a brute-force rasterizer.

    python benchmarks/scene.py [--out benchmarks/results/h200/scene.json] [--only frames] [--rocks 1000 100000]

A rough rock of 81,920 triangles is instanced into a field of up to ten billion triangles. A camera sees it at 1920 x
1080 (and 3840 x 2160) and moves a little with each frame, so that consecutive frames hide nearly the same parts. Each
row has

- the median time in ms that a caller waits for a frame, with depth alone and with the whole G-buffer;
- the time of each stage, from device events in separate frames;
- the numbers of items that the renderer draws;
- the time of `scene_brute_force.py` to draw all triangles, if that takes less than a second, and the share of pixels
  whose depth is within 2% of the brute-force picture.

Frames are drawn by the Warp kernels and by the CUDA C++ kernels. Further cases are

- the same view of the same rocks with more and more triangles each;
- 64 cameras at once;
- hills of ten million triangles as a single mesh, compared with brute force and with one ray per pixel through Warp's
  BVH;
- 64 cameras over hills of 60 million triangles as a single mesh, compared with rays through two kinds of Warp's BVH;
- a field in which some rocks move, appear and disappear, compared with a static one;
- shadow maps of four cascades of 2048 x 2048, redrawn for each frame and kept;
- cameras of several sizes, drawn together and one by one;
- hills with and without a texture;
- a tree of 200,000 leaves: the area it covers at increasing distances, relative to all its triangles seen from near;
  and a forest of this tree.

Builds of such hills on all CPU threads are timed, too.

`--quick` tests the script on a CPU, with few and small pictures. Rows are written after each case.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh
from scene_brute_force import BruteForce
from scene_rays import Rays
from scene_rows import picture_size, waited, writer
from scene_trees import DISTANCES, NARROWEST, PIXELS_SEEN, WIDEST, covered, grove, tree

from rooftop import scene
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.whole_files import write_json

SPACING = 3.0
G_BUFFER = ("depth", "normal", "instance", "material", "velocity", "color")
LONGEST_BRUTE_FORCE_MS = 1000.0
CLOSE = 0.02  # relative tolerance of depths


def rock(detail: int) -> tuple[np.ndarray, np.ndarray]:
    """A closed rock of 20 * 4^detail triangles, with a radius of about 1."""
    random = np.random.default_rng(0)
    ball = trimesh.creation.icosphere(detail)
    way, radius = ball.vertices, np.ones(len(ball.vertices))
    for octave in range(9):
        waves = 3.0 * 1.8**octave * random.normal(size=(3, 6))
        radius += 0.03 * 0.6**octave * np.sin(way @ waves + random.uniform(0, 6.28, 6)).sum(1)
    return way * radius[:, None], ball.faces


def hills(triangles: int) -> tuple[np.ndarray, np.ndarray]:
    """A square terrain of about this many triangles, rough at all scales."""
    side = round((triangles / 2) ** 0.5)
    random = np.random.default_rng(0)
    x, y = np.meshgrid(*[np.linspace(0, 1, side + 1)] * 2, indexing="ij")
    z = np.zeros_like(x)
    for octave in range(10):
        for _ in range(3):
            a, b, shift = 3 * 1.9**octave * random.normal(), 3 * 1.9**octave * random.normal(), random.uniform(0, 6.28)
            z += 0.03 * 0.55**octave * np.sin(a * x + b * y + shift)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    faces = np.stack([corner, corner + side + 1, corner + 1, corner + 1, corner + side + 1, corner + side + 2], 1)
    return np.stack([x, y, z], -1).reshape(-1, 3), faces.reshape(-1, 3)


def field(count: int) -> np.ndarray:
    """Transforms (count, 4, 4) of rocks in a square grid, each rotated and scaled at random."""
    random = np.random.default_rng(1)
    side = int(np.ceil(count**0.5))
    transforms = np.tile(np.eye(4), (count, 1, 1))
    angle, size = random.uniform(0, 6.28, count), random.uniform(0.6, 1.3, count)
    for row, column, value in ((0, 0, np.cos), (1, 1, np.cos), (1, 0, np.sin)):
        transforms[:, row, column] = value(angle)
    transforms[:, 0, 1] = -np.sin(angle)
    transforms[:, :3, :3] *= size[:, None, None]
    at = np.arange(count)
    transforms[:, 0, 3] = SPACING * (at // side - side / 2) + random.uniform(-0.8, 0.8, count)
    transforms[:, 1, 3] = SPACING * (at % side - side / 2) + random.uniform(-0.8, 0.8, count)
    return transforms


def path(frame: int, width: int, height: int) -> scene.Camera:
    """The path of a camera that moves over the middle of the field and looks along it."""
    eye = np.array([0.03 * frame, 0.01 * frame, 2.5])
    return scene.Camera.look_at(
        eye, eye + np.array((10, 1 + 0.01 * frame, -1.6)), fov_y_degrees=60, width=width, height=height
    )


# ---- cases -----------------------------------------------------------------------------------------------------------


def frames(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    vertices, faces = rock(options.detail)
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "rock.rtg"
        scene.build(vertices, faces, mesh)
        for rocks in options.rocks:
            for width, height in options.sizes:
                for kernels in options.kernels:
                    row = {"what": "frame", "rocks": rocks, "triangles": rocks * len(faces), "size": [width, height]}
                    rows(row | {"kernels": kernels} | of_field(mesh, field(rocks), width, height, kernels, options))
                brute = BruteForce(vertices, faces, field(rocks), options.device)
                row = {"what": "brute force", "rocks": rocks, "triangles": brute.triangles, "size": [width, height]}
                rows(row | beside(brute, mesh, field(rocks), width, height, options))
                del brute
                gc.collect()


def of_field(
    mesh: Path, transforms: np.ndarray, width: int, height: int, kernels: str, options: argparse.Namespace
) -> dict[str, Any]:
    world = scene.Scene()
    world.add_instances(world.add_mesh(mesh), transforms)
    return of_scene(world, [path(k, width, height) for k in range(options.frames)], kernels, options)


def of_scene(
    world: scene.Scene, cameras: Sequence[scene.Camera | list[scene.Camera]], kernels: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Time consecutive frames: the whole time that a caller waits, and the time of each stage."""
    renderer = scene.Renderer(world, options.device, kernels=kernels)
    found: dict[str, Any] = {}
    for name, outputs in (("depth", ("depth",)), ("g_buffer", G_BUFFER)):
        found[f"{name}_ms"] = middle([waited(lambda c=c, o=outputs: renderer.render(c, o)) for c in cameras])
    staged = [renderer.render(c, G_BUFFER, timings=True) for c in cameras]
    half = staged[len(staged) // 2 :]
    found["stage_ms"] = {
        stage: round(statistics.median(frame.stats.stage_ms[stage] for frame in half), 4)
        for stage in half[0].stats.stage_ms
    }
    found["drawn"] = {name: value for name, value in asdict(half[-1].stats).items() if name != "stage_ms"}
    return found


def beside(
    brute: BruteForce, mesh: Path, transforms: np.ndarray, width: int, height: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Draw the scene by brute force, and compare the picture with ours."""
    world = scene.Scene()
    world.add_instances(world.add_mesh(mesh), transforms)
    camera = path(0, width, height)
    ours = scene.Renderer(world, options.device).render(camera, ("depth",))["depth"][0]
    once = waited(lambda: brute.draw(camera))
    once = min(once, waited(lambda: brute.draw(camera)))
    if once < LONGEST_BRUTE_FORCE_MS:
        cameras = [path(k, width, height) for k in range(options.frames)]
        once = middle([waited(lambda c=c: brute.draw(c)) for c in cameras])
    return {"ms": once} | agreement(ours, brute.draw(camera))


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Compare two depth pictures: the share of pixels with the same coverage, and the share of covered pixels whose
    depths are close."""
    there = torch.isfinite(ours) & torch.isfinite(theirs)
    close = ((ours - theirs).abs() <= CLOSE * theirs)[there].float().mean().item()
    return {
        "same_coverage": (torch.isfinite(ours) == torch.isfinite(theirs)).float().mean().item(),
        "close": close,
    }


def finer(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Time the same view of rocks that have more and more triangles each."""
    width, height = options.sizes[0]
    for detail in options.details:
        vertices, faces = rock(detail)
        with tempfile.TemporaryDirectory() as folder:
            mesh = Path(folder) / "rock.rtg"
            scene.build(vertices, faces, mesh)
            rocks = options.rocks[-2]
            row = {"what": "finer", "rocks": rocks, "triangles": rocks * len(faces), "size": [width, height]}
            rows(row | of_field(mesh, field(rocks), width, height, options.kernels[-1], options))


def one_mesh(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    vertices, faces = hills(options.hills)
    width, height = options.sizes[0]
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "hills.rtg"
        scene.build(vertices, faces, mesh)
        world = scene.Scene()
        world.add_instance(world.add_mesh(mesh), np.eye(4))
        cameras = [over_hills(k, width, height) for k in range(options.frames)]
        row = {"what": "hills", "triangles": len(faces), "size": [width, height]}
        for kernels in options.kernels:
            rows(row | {"by": kernels} | of_scene(world, cameras, kernels, options))
        ours = scene.Renderer(world, options.device).render(cameras[0], ("depth",))["depth"][0]
        for name, peer in (
            ("brute force", lambda: BruteForce(vertices, faces, np.eye(4)[None], options.device)),
            ("rays", lambda: Rays(vertices, faces, options.device)),
        ):
            start = time.perf_counter()
            made = peer()
            prepared = round(time.perf_counter() - start, 3)
            took = middle([waited(lambda c=c, m=made: m.draw(c)) for c in cameras])
            rows(row | {"by": name, "prepared_s": prepared, "depth_ms": took} | agreement(ours, made.draw(cameras[0])))
            del made


def many_views(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Many cameras over one mesh, ours and a ray for each pixel through each of Warp's trees."""
    vertices, faces = hills(options.viewed)
    count, side = (64, 512) if not options.quick else (4, 32)
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "hills.rtg"
        scene.build(vertices, faces, mesh)
        world = scene.Scene()
        world.add_instance(world.add_mesh(mesh), np.eye(4))
        cameras = [[above(frame, k, count, side) for k in range(count)] for frame in range(options.frames)]
        row = {"what": "views", "cameras": count, "triangles": len(faces), "size": [side, side]}
        rows(row | {"by": options.kernels[-1]} | of_scene(world, cameras, options.kernels[-1], options))
        ours = scene.Renderer(world, options.device).render(cameras[0], ("depth",))["depth"]
        for tree in options.ray_trees:
            start = time.perf_counter()
            try:
                rays = Rays(vertices, faces, options.device, tree)
            except (RuntimeError, ValueError) as error:  # a tree that this Warp or this device does not have
                rows(row | {"by": f"rays, {tree}", "failed": str(error).splitlines()[0]})
                continue
            prepared = round(time.perf_counter() - start, 3)
            took = middle([waited(lambda c=c, r=rays: r.draw_all(c)) for c in cameras])
            found = agreement(ours, rays.draw_all(cameras[0]))
            rows(row | {"by": f"rays, {tree}", "prepared_s": prepared, "depth_ms": took} | found)
            del rays


def above(frame: int, number: int, count: int, side: int) -> scene.Camera:
    """One of the cameras on a grid above the hills, each of which looks at another part of them."""
    across = round(count**0.5)
    place = np.array([(number % across + 0.5) / across, (number // across + 0.5) / across])
    eye = np.array([*(place + 0.0002 * frame), 0.35])
    target = np.array([*(0.5 + 0.6 * (place[::-1] - 0.5)), 0.0])
    return scene.Camera.look_at(eye, target, fov_y_degrees=60, width=side, height=side)


def over_hills(frame: int, width: int, height: int) -> scene.Camera:
    eye = np.array([0.5 + 0.0005 * frame, 0.05, 0.35])
    return scene.Camera.look_at(eye, (0.5, 0.6, 0), fov_y_degrees=60, width=width, height=height)


def many_cameras(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    vertices, faces = rock(options.detail)
    count, side = (64, 512) if not options.quick else (4, 32)
    rocks = options.rocks[-2] if len(options.rocks) > 1 else options.rocks[-1]
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "rock.rtg"
        scene.build(vertices, faces, mesh)
        world = scene.Scene()
        world.add_instances(world.add_mesh(mesh), field(rocks))
        cameras = [[around(frame, k, count, side) for k in range(count)] for frame in range(options.frames)]
        row = {"what": "cameras", "cameras": count, "size": [side, side], "rocks": rocks}
        rows(row | of_scene(world, cameras, options.kernels[-1], options))


def around(frame: int, number: int, count: int, side: int) -> scene.Camera:
    angle = 6.2832 * number / count + 0.002 * frame
    eye = np.array([6 * np.cos(angle), 6 * np.sin(angle), 2.5])
    return scene.Camera.look_at(eye, eye * np.array((4, 4, -1)), fov_y_degrees=60, width=side, height=side)


def changing(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Move some rocks of a field, or remove some and add others, before each frame. The frame's time excludes the
    change itself, which is timed separately."""
    vertices, faces = rock(min(options.detail, 3))
    count, changes = (100_000, [0, 100, 10_000]) if not options.quick else (200, [0, 10])
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "rock.rtg"
        scene.build(vertices, faces, mesh)
        for what in ("moved", "replaced"):
            for changed in changes:
                row = {"what": what, "instances": count, "changed": changed, "size": list(options.sizes[0])}
                rows(row | of_changes(mesh, what, count, changed, options))


def of_changes(mesh: Path, what: str, count: int, changed: int, options: argparse.Namespace) -> dict[str, Any]:
    world, random = scene.Scene(), np.random.default_rng(2)
    world.add_instances(world.add_mesh(mesh), field(count))
    there = np.arange(count)
    renderer = scene.Renderer(world, options.device, kernels=options.kernels[-1])
    taken, drawn = [], []

    def change(at: np.ndarray, places: np.ndarray) -> None:
        if what == "moved":
            world.move_all(there[at], places)
        elif len(at):
            world.remove_all(there[at])
            there[at] = world.add_instances(0, places)

    for frame in range(options.frames):
        at = random.permutation(count)[:changed]
        places = world.instances()[1][there[at]]
        places[:, :3, 3] += random.normal(0, 0.1, (changed, 3))
        camera = path(frame, *options.sizes[0])
        taken.append(waited(lambda a=at, p=places: change(a, p)))
        drawn.append(waited(lambda c=camera: renderer.render(c, G_BUFFER)))
    return {"change_ms": middle(taken), "g_buffer_ms": middle(drawn)}


def lights(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Time frames without a sun, with a sun whose four cascades are redrawn for each frame, and with cascades that are
    kept."""
    vertices, faces = rock(options.detail)
    size = 2048 if not options.quick else 64
    rocks = options.rocks[-2] if len(options.rocks) > 1 else options.rocks[-1]
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "rock.rtg"
        scene.build(vertices, faces, mesh)
        world = scene.Scene()
        world.add_instances(world.add_mesh(mesh), field(rocks))
        world.add_light(sun(0, size))
        for kernels in options.kernels:
            row = {"what": "cascades", "maps": 4, "map_size": size, "rocks": rocks, "size": list(options.sizes[0])}
            rows(row | {"kernels": kernels} | of_cascades(world, size, kernels, options))


def of_cascades(world: scene.Scene, size: int, kernels: str, options: argparse.Namespace) -> dict[str, Any]:
    renderer, camera = scene.Renderer(world, options.device, kernels=kernels), path(0, *options.sizes[0])
    found = {}
    for name, outputs, moves, maps in (
        ("without_ms", ("depth",), 0, 0),
        ("anew_ms", ("depth", "shadow"), 1, 4),
        ("kept_ms", ("depth", "shadow"), 0, 0),
    ):
        took, frames = [], []
        for frame in range(options.frames):
            world.set_light(0, sun(moves * frame, size))
            took.append(waited(lambda o=outputs, f=frames: f.append(renderer.render(camera, o))))
        assert frames[-1].stats.shadow_maps == maps
        found[name] = middle(took)
    return found


def sun(frame: int, size: int) -> scene.DirectionalLight:
    """The sun, whose direction changes a little with each frame."""
    return scene.DirectionalLight((1, 0.6 + 0.001 * frame, -0.7), size=size, cascades=4)


def mixed_sizes(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Time sixteen cameras of four sizes: drawn together in one chain of launches, and each by its own renderer."""
    vertices, faces = rock(options.detail)
    sides = [(1280, 720), (640, 480), (512, 512), (256, 256)] if not options.quick else [(32, 24), (16, 16)]
    rocks = options.rocks[-2] if len(options.rocks) > 1 else options.rocks[-1]
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "rock.rtg"
        scene.build(vertices, faces, mesh)
        world = scene.Scene()
        world.add_instances(world.add_mesh(mesh), field(rocks))
        count = 4 * len(sides)
        chain = scene.Renderer(world, options.device, kernels=options.kernels[-1])
        alone = [scene.Renderer(world, options.device, kernels=options.kernels[-1]) for _ in range(count)]
        together, apart = [], []
        for frame in range(options.frames):
            cameras = [sized(around(frame, k, count, 64), *sides[k % len(sides)]) for k in range(count)]
            together.append(waited(lambda c=cameras: chain.render_each(c, ("depth",))))
            apart.append(
                waited(lambda c=cameras: [one.render(each, ("depth",)) for one, each in zip(alone, c, strict=True)])
            )
        row = {"what": "mixed sizes", "cameras": count, "sizes": sides, "rocks": rocks}
        rows(row | {"one_chain_ms": middle(together), "one_by_one_ms": middle(apart)})


def sized(camera: scene.Camera, width: int, height: int) -> scene.Camera:
    """A camera with the same position and angle, but another size."""
    focal = camera.fy * height / camera.height
    centre = ((width - 1) / 2, (height - 1) / 2)
    return scene.Camera(camera.world_to_camera, width, height, focal, focal, *centre)


def textures(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Time hills with a noise texture, and the same hills without a texture."""
    triangles, side = (1_000_000, 4096) if not options.quick else (3000, 64)
    vertices, faces = hills(triangles)
    noise = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "hills.rtg"
        scene.build(vertices, faces, mesh, uv=8 * vertices[:, :2])
        for what, materials in (("plain", None), ("textured", [scene.Material(texture=noise)])):
            world = scene.Scene()
            world.add_instance(world.add_mesh(mesh, materials=materials))
            cameras = [over_hills(k, *options.sizes[0]) for k in range(options.frames)]
            row = {"what": what, "triangles": len(faces), "texture": [side, side], "size": list(options.sizes[0])}
            rows(row | of_scene(world, cameras, options.kernels[-1], options))


def builds(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    for triangles in options.builds:
        vertices, faces = hills(triangles)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = scene.build(vertices, faces, Path(folder) / "hills.rtg")
            took = time.perf_counter() - start
        row = {"what": "build", "triangles": len(faces), "seconds": round(took, 3), "roots": report.roots}
        rows(row | {"bytes_per_triangle": round(report.bytes_per_triangle, 3), "fill": round(report.fill, 4)})


def trees(options: argparse.Namespace, rows: Callable[[dict[str, Any]], None]) -> None:
    """Measure a tree of many leaves: its build, its coverage at increasing distances compared with all its triangles,
    and a forest of such trees."""
    vertices, faces, materials = tree(options.leaves)
    width = float(np.ptp(vertices[:, :2], axis=0).max())
    with tempfile.TemporaryDirectory() as folder:
        report = scene.build(vertices, faces, Path(folder) / "tree.rtg", "smooth", materials=materials)
        levels = [[level.triangles, level.error] for level in report.levels]
        row = {"what": "tree", "leaves": options.leaves, "triangles": len(faces)}
        rows(row | {"seconds": round(report.seconds, 3), "roots": report.roots, "levels": levels})
        mesh = scene.Geometry.open(Path(folder) / "tree.rtg")
        whole = covered(mesh, width, WIDEST / (10 if options.quick else 1), 16, options.device, 0.0)
        for pixels in np.geomspace(WIDEST / (10 if options.quick else 1), NARROWEST, DISTANCES).tolist():
            count = max(16, round(PIXELS_SEEN / (100 if options.quick else 1) / (whole["area"] * pixels**2)))
            ours = covered(mesh, width, pixels, count, options.device, 1.0)
            row = {"what": "tree from far", "pixels_wide": round(pixels, 2), "trees": count}
            rows(row | {"covered": round(ours["area"] / whole["area"], 4), "drawn": round(ours["triangles"])})
        world = scene.Scene()
        world.add_instances(world.add_mesh(mesh), grove(options.trees, 0.4 * width))
        cameras = [over_trees(k, *options.sizes[0]) for k in range(options.frames)]
        row = {"what": "forest", "trees": options.trees, "triangles": options.trees * len(faces)}
        rows(row | {"size": list(options.sizes[0])} | of_scene(world, cameras, options.kernels[-1], options))


def over_trees(frame: int, width: int, height: int) -> scene.Camera:
    eye = np.array([0.03 * frame, 0.01 * frame, 16])
    return scene.Camera.look_at(eye, eye + np.array((10, 1, -2.5)), fov_y_degrees=60, width=width, height=height)


CASES = {
    "builds": builds,
    "frames": frames,
    "finer": finer,
    "cameras": many_cameras,
    "changing": changing,
    "lights": lights,
    "mixed": mixed_sizes,
    "textures": textures,
    "hills": one_mesh,
    "views": many_views,
    "trees": trees,
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def middle(took: list[float]) -> float:
    """The median of the second half, since frames of the first half may compile kernels and grow lists."""
    return round(statistics.median(took[len(took) // 2 :]), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rocks", nargs="+", type=int, default=[122, 1221, 12_208, 122_071])
    parser.add_argument("--detail", type=int, default=6, help="detail of the rocks; each has 20 * 4^DETAIL triangles")
    parser.add_argument("--sizes", nargs="+", type=picture_size, default=[(1920, 1080), (3840, 2160)])
    parser.add_argument("--kernels", nargs="+", default=["warp", "cuda"])
    parser.add_argument(
        "--details", nargs="+", type=int, default=[5, 7, 9], help="values of DETAIL for the finer rocks"
    )
    parser.add_argument("--hills", type=int, default=10_000_000, help="number of triangles of the single mesh")
    parser.add_argument("--viewed", type=int, default=60_000_000, help="triangles of the mesh that many cameras see")
    parser.add_argument("--ray-trees", nargs="+", default=["lbvh", "cubql"], help="kinds of Warp's BVH to compare with")
    parser.add_argument(
        "--builds", nargs="+", type=int, default=[1_000_000, 10_000_000], help="triangles of the builds"
    )
    parser.add_argument("--leaves", type=int, default=200_000, help="number of leaves on a tree")
    parser.add_argument("--trees", type=int, default=10_000, help="number of trees in the forest")
    parser.add_argument("--frames", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    options.device = "cuda"
    if options.quick:
        options.device, options.frames, options.rocks, options.detail = "cpu", 2, [49, 81], 3
        options.sizes, options.kernels, options.builds = [(64, 48)], ["warp"], [5000]
        options.details, options.hills, options.leaves, options.trees = [2, 3], 3000, 2000, 16
        options.viewed, options.ray_trees = 3000, ["sah", "median"]
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    found: dict[str, Any] = {"environment": {"device": ceilings.device, "versions": ceilings.versions}}
    found |= {"rows": [], "failed": {}}
    row = writer(found, options.out)
    for name in options.only:
        try:
            CASES[name](options, row)
        except Exception as error:  # continue, because the other cases are still useful
            traceback.print_exc()
            found["failed"][name] = f"{type(error).__name__}: {error}"
            if options.out:
                write_json(options.out, found)
    if found["failed"]:
        print("failed:", *found["failed"])
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
