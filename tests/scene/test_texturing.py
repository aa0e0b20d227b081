"""Textured surfaces, compared with the formula in float64 and with supersampled pictures, and seen from near."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Camera, GBuffer, Geometry, Material, Renderer, Scene
from rooftop.scene.materials import to_displayed, to_linear
from rooftop.scene.rendering.mip_chains import mip_chain
from rooftop.scene.rendering.texturing import ACROSS, MOST_ALONG, ONE_TEXEL

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Build = Callable[..., Geometry]

SAMPLES = 31  # samples of a pixel along each axis; odd, so that one sample is at the centre


def square(points: int, size: float = 1.0) -> tuple[Floats, NDArray[np.int64]]:
    """Points with coordinates 0..size."""
    x, y = np.meshgrid(np.linspace(0, size, points), np.linspace(0, size, points), indexing="ij")
    corner = (np.arange(points - 1)[:, None] * points + np.arange(points - 1)).ravel()
    faces = [np.stack([corner, corner + points, corner + 1], 1)]
    faces += [np.stack([corner + 1, corner + points, corner + points + 1], 1)]
    return np.stack([x, y, 0 * x], -1).reshape(-1, 3), np.concatenate(faces)


def flat(path: Path, material: Material, repeated: float = 1.0, **options: Any) -> Scene:
    """The unit square in z = 0 with an image repeated this many times."""
    points, faces = square(9)
    scene.build(points, faces, path / "flat.rtg", uv=points[:, :2] * repeated, material_table=[material], **options)
    return one(path / "flat.rtg")


def one(path: Path | Geometry, **options: Any) -> Scene:
    world = Scene()
    world.add_instance(world.add_mesh(path, **options))
    return world


def above(width: int, height: int, across: float = 1.0, middle: tuple[float, float] = (0.5, 0.5)) -> Camera:
    """A parallel camera that looks straight down, `across` units wide."""
    x, y = middle
    return Camera.parallel((x, y, 1), (x, y, 0), (0, 1, 0), across * height / width, width, height)


def base_color(world: Scene, camera: Camera, device: str, **options: Any) -> Floats:
    frame = Renderer(world, device, **options).render(camera, ("base_color",))
    return frame["base_color"][0].double().cpu().numpy()


def noise(width: int, height: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def photograph() -> Bytes:
    from skimage import data

    return np.asarray(data.chelsea())


# ---- from near -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_a_pixel_on_a_texel_has_its_colour(size: int, tmp_path: Path, device: str) -> None:
    """The first row of the image is on top, where v is 1."""
    image = noise(size, size)
    world = flat(tmp_path, Material(texture=image))
    for times in (1, 3):
        seen = base_color(world, above(times * size, times * size), device)
        assert np.abs(seen[times // 2 :: times, times // 2 :: times] - to_linear(image / 255)).max() < 2e-6


def bilinear(image: Floats, u: Floats, v: Floats, wrap: tuple[str, str]) -> Floats:
    """The image (H, W, 3) at places (N,), interpolated between four texels."""
    height, width = image.shape[:2]
    x, y = u * width - 0.5, (1 - v) * height - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right, down = (x - left)[:, None], (y - top)[:, None]

    def at(column: NDArray[np.int64], row: NDArray[np.int64]) -> Floats:
        return image[wrapped(row, height, wrap[1]), wrapped(column, width, wrap[0])]

    upper = (1 - right) * at(left, top) + right * at(left + 1, top)
    lower = (1 - right) * at(left, top + 1) + right * at(left + 1, top + 1)
    return (1 - down) * upper + down * lower


def wrapped(index: NDArray[np.int64], size: int, wrap: str) -> NDArray[np.int64]:
    if wrap == "clamp":
        return np.clip(index, 0, size - 1)
    if wrap == "repeat":
        return index % size
    folded = index % (2 * size)
    return np.minimum(folded, 2 * size - 1 - folded)


@pytest.mark.parametrize("wrap", ["repeat", "clamp", "mirror", ("clamp", "repeat"), ("mirror", "clamp")])
def test_between_texels_and_beyond_the_image(wrap: str | tuple[str, str], tmp_path: Path, device: str) -> None:
    """The image is magnified, so that everything is interpolated; uv from -1.5 to 2.5."""
    image = noise(5, 4)
    points, faces = square(9)
    uv = points[:, :2] * 4 - 1.5
    scene.build(points, faces, tmp_path / "a.rtg", uv=uv, material_table=[Material(texture=image, wrap=wrap)])
    seen = base_color(one(tmp_path / "a.rtg"), above(96, 96, 0.95), device).reshape(-1, 3)
    row, column = np.mgrid[:96, :96].reshape(2, -1)
    u, v = 4 * (0.5 + (column - 47.5) * 0.95 / 96) - 1.5, 4 * (0.5 - (row - 47.5) * 0.95 / 96) - 1.5
    both = (wrap, wrap) if isinstance(wrap, str) else wrap
    assert np.abs(seen - bilinear(to_linear(image / 255), u, v, both)).max() < 1e-4


def test_nearest_texels_have_edges(tmp_path: Path, device: str) -> None:
    image = noise(4, 4)
    world = flat(tmp_path, Material(texture=image, magnified="nearest"))
    seen = base_color(world, above(40, 40), device)
    assert np.abs(seen - to_linear(image / 255).repeat(10, 0).repeat(10, 1)).max() < 2e-6
    small = base_color(world, above(2, 2), device)  # the texture is still filtered from far away
    assert np.abs(small - to_linear(image / 255).reshape(2, 2, 2, 2, 3).mean((1, 3))).max() < 0.1


def test_colours_multiply_in_linear_light(tmp_path: Path, device: str) -> None:
    """The picture shows the lit product of the colours of material, texture and vertices, encoded for display."""
    points, faces = square(9)
    image = np.full((2, 2, 3), (200, 100, 50), np.uint8)
    colors = np.tile(np.array([128, 255, 64], np.uint8), (len(points), 1))
    factor = (0.5, 0.75, 1.0)
    scene.build(
        points, faces, tmp_path / "a.rtg", uv=points[:, :2], colors=colors, material_table=[Material(factor, image)]
    )
    outputs = ("base_color", "color", "vertex_color")
    frame = Renderer(one(tmp_path / "a.rtg"), device, light=(0, 0, 1)).render(above(8, 8), outputs)
    expected = to_linear(factor) * to_linear(np.divide((200, 100, 50), 255)) * to_linear(np.divide((128, 255, 64), 255))
    assert np.abs(frame["base_color"][0].cpu().numpy() - expected).max() < 1e-6
    assert np.abs(frame["color"][0].cpu().numpy() - to_displayed(expected)).max() < 1e-6
    assert np.abs(frame["vertex_color"][0].cpu().numpy() - np.divide((128, 255, 64), 255)).max() < 1e-6


def test_a_white_material_changes_nothing_but_hues(tmp_path: Path, device: str) -> None:
    points, faces = square(9)
    colors = np.random.default_rng(0).uniform(size=(len(points), 3))
    scene.build(points, faces, tmp_path / "a.rtg", colors=colors)
    outputs = ("color", "base_color")
    plain = Renderer(one(tmp_path / "a.rtg"), device).render(above(40, 40), outputs)
    white = Renderer(one(tmp_path / "a.rtg", materials=[Material()]), device).render(above(40, 40), outputs)
    for name in outputs:
        assert (plain[name] - white[name]).abs().max() < 2e-6
    assert not torch.equal(plain["base_color"], plain["color"])


def test_colours_of_gltf_are_linear(tmp_path: Path, device: str) -> None:
    ball = trimesh.creation.icosphere(2)
    material = trimesh.visual.material.PBRMaterial(name="half", baseColorFactor=[128, 128, 128, 255])
    visual = trimesh.visual.TextureVisuals(uv=ball.vertices[:, :2], material=material)
    visual.vertex_attributes["color"] = np.tile(np.array([128, 64, 255, 255], np.uint8), (len(ball.vertices), 1))
    trimesh.Trimesh(ball.vertices, ball.faces, visual=visual, process=False).export(tmp_path / "ball.glb")
    scene.build_file(tmp_path / "ball.glb")
    assert Geometry.open(tmp_path / "ball.rtg").meta["linear_colors"] is True
    seen = base_color(one(tmp_path / "ball.rtg"), above(9, 9, 0.5, (0, 0)), device)
    assert np.abs(seen - 128 / 255 * np.divide((128, 64, 255), 255)).max() < 1e-5


# ---- the formula -----------------------------------------------------------------------------------------------------


def footprints(camera: Camera, column: Floats, row: Floats) -> Floats:
    """uv (N, 2) of the points of the plane z = 0 that pixels see, which are their x and y."""
    turn, shift = camera.world_to_camera[:3, :3], camera.world_to_camera[:3, 3]
    eye = -turn.T @ shift
    looking = np.stack([(column - camera.cx) / camera.fx, (row - camera.cy) / camera.fy, np.ones_like(column)], -1)
    if camera.orthographic:
        eyes = (np.stack([looking[:, 0], looking[:, 1], 0 * row], -1) - shift) @ turn
        ahead = np.broadcast_to(turn[2], eyes.shape)
        return (eyes - eyes[:, 2:] / ahead[:, 2:] * ahead)[:, :2]
    ahead = looking @ turn
    return (eye - eye[2] / ahead[:, 2:] * ahead)[:, :2]


def reference(image: Bytes, camera: Camera, column: Floats, row: Floats, times: float) -> Floats:
    """The formula of `rendering/texturing.py` in float64; slopes by differences, axes by an SVD."""
    chain = [to_linear(level / 255) for level in mip_chain(image)]
    size, h = np.array([image.shape[1], image.shape[0]]), 1e-5

    def uv_at(x: Floats, y: Floats) -> Floats:
        return times * footprints(camera, x, y)

    right = (uv_at(column + h, row) - uv_at(column - h, row)) / (2 * h)
    down = (uv_at(column, row + h) - uv_at(column, row - h)) / (2 * h)
    found = []
    for number, place in enumerate(uv_at(column, row)):
        u, lengths, _ = np.linalg.svd(np.stack([right[number] * size, down[number] * size], 1))
        longer, shorter = lengths
        along = min(int(np.ceil(ACROSS * longer / max(shorter, 1))), MOST_ALONG) if longer > ONE_TEXEL else 1
        across = ACROSS if shorter > ONE_TEXEL else 1
        level = np.clip(np.log2(max(longer / along, shorter / across)), 0, len(chain) - 1)
        a, b = np.mgrid[:along, :across].reshape(2, -1)
        axes = u * lengths / size[:, None]
        taps = place + np.outer((a + 0.5) / along - 0.5, axes[:, 0]) + np.outer((b + 0.5) / across - 0.5, axes[:, 1])
        finer = int(level)
        levels = [bilinear(chain[min(k, len(chain) - 1)], *taps.T, ("repeat", "repeat")) for k in (finer, finer + 1)]
        found.append(((1 - level + finer) * levels[0] + (level - finer) * levels[1]).mean(0))
    return np.array(found)


CAMERAS = {
    "from above": Camera.look_at((0.5, 0.45, 2.0), (0.5, 0.5, 0), width=64, height=48, fov_y_degrees=40),
    "from the side": Camera.look_at((0.4, -0.4, 0.35), (0.5, 0.4, 0), width=64, height=48, fov_y_degrees=50),
    "along": Camera.look_at((0.5, -0.15, 0.06), (0.45, 0.6, 0), (0.3, 0, 1), width=64, height=48, fov_y_degrees=50),
    "parallel": Camera.parallel((0.2, -0.6, 0.5), (0.5, 0.5, 0), (0, 0, 1), 0.9, width=64, height=48),
}


@pytest.mark.parametrize("view", CAMERAS)
@pytest.mark.parametrize(("width", "height", "times"), [(64, 64, 1.0), (37, 90, 3.0)])
def test_a_pixel_is_what_the_formula_says(
    view: str, width: int, height: int, times: float, tmp_path: Path, device: str
) -> None:
    camera, image = CAMERAS[view], noise(width, height)
    world = flat(tmp_path, Material(texture=image), times)
    seen = base_color(world, camera, device, pixel_error=0)
    row, column = np.nonzero(np.isfinite(seen).all(-1))
    assert len(row) > 300
    expected = reference(image, camera, column.astype(float), row.astype(float), times)
    error = np.abs(seen[row, column] - expected).max(1)
    assert np.median(error) < 1e-5
    assert np.quantile(error, 0.99) < 1e-3
    assert error.max() < 0.05  # pixels for which float32 takes one tap more or fewer


# ---- against many samples --------------------------------------------------------------------------------------------


def larger(camera: Camera, times: int) -> Camera:
    """The same view with several pixels for each, one of which is in the middle."""
    return replace(
        camera, fx=camera.fx * times, fy=camera.fy * times, width=camera.width * times, height=camera.height * times,
        cx=camera.cx * times + (times - 1) / 2, cy=camera.cy * times + (times - 1) / 2,
    )  # fmt: skip


def chequers() -> Bytes:
    fields = np.kron(np.indices((32, 32)).sum(0) % 2, np.ones((8, 8), int))
    return (255 * fields[:, :, None].repeat(3, 2)).astype(np.uint8)


IMAGES = {"noise": lambda: noise(256, 256), "photograph": photograph, "chequers": chequers}
# The largest allowed mean error of a pixel in linear light, and the smallest factor by which a picture without a filter
# must be worse. Observed: 0.006 to 0.009 and 16 to 27 times; 0.002 to 0.005 and 7 to 12; 0.012 to 0.034 and 13 to 39.
GATES = {"noise": (0.0125, 12), "photograph": (0.0075, 5.5), "chequers": (0.045, 10)}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("view", CAMERAS)
def test_pictures_are_near_to_the_mean_of_many_samples(view: str, image: str, tmp_path: Path, device: str) -> None:
    camera = CAMERAS[view]
    small = replace(
        camera,
        fx=camera.fx / 2,
        fy=camera.fy / 2,
        width=32,
        height=24,
        cx=camera.cx / 2 - 0.25,
        cy=camera.cy / 2 - 0.25,
    )
    world = flat(tmp_path, Material(texture=IMAGES[image]()))
    large = base_color(world, larger(small, SAMPLES), device, pixel_error=0)
    samples = large.reshape(24, SAMPLES, 32, SAMPLES, 3).swapaxes(1, 2)  # (24, 32, SAMPLES, SAMPLES, 3)
    inside = np.isfinite(samples).all((2, 3, 4))
    assert inside.sum() > 50
    mean, unfiltered = samples.mean((2, 3))[inside], samples[:, :, SAMPLES // 2, SAMPLES // 2][inside]
    seen = base_color(world, small, device, pixel_error=0)[inside]
    error, without = np.abs(seen - mean).mean(), np.abs(unfiltered - mean).mean()
    most, times = GATES[image]
    assert error < most
    assert without > times * error, (without, error)


def test_a_camera_that_moves_sees_no_shimmer(tmp_path: Path, device: str) -> None:
    """The camera moves by a fraction of a pixel. Distant parts change as little as the mean of many samples."""
    world = flat(tmp_path, Material(texture=noise(512, 512)))
    renderer = Renderer(world, device)
    pictures = [
        renderer.render(above(24, 24, 1.0, (0.5 + step / 24 / 7, 0.5)), ("base_color",))["base_color"][0, 4:-4, 4:-4]
        for step in range(7)
    ]
    changes = torch.stack([(a - b).abs().mean() for a, b in pairwise(pictures)])
    assert changes.max() < 0.005  # for unfiltered noise it is about 0.25
    assert changes.min() > 0


# ---- levels of detail, several meshes --------------------------------------------------------------------------------


def ring(points: int, tube: int) -> tuple[Floats, NDArray[np.int64], Floats]:
    """A closed torus with seams of the texture coordinates in both directions."""
    u, v = np.meshgrid(np.linspace(0, 1, points + 1), np.linspace(0, 1, tube + 1), indexing="ij")
    wide = 1 + 0.4 * np.cos(2 * np.pi * v)
    places = np.stack([wide * np.cos(2 * np.pi * u), wide * np.sin(2 * np.pi * u), 0.4 * np.sin(2 * np.pi * v)], -1)
    corner = (np.arange(points)[:, None] * (tube + 1) + np.arange(tube)).ravel()
    faces = np.concatenate(
        [
            np.stack([corner, corner + tube + 1, corner + 1], 1),
            np.stack([corner + 1, corner + tube + 1, corner + tube + 2], 1),
        ]
    )
    return places.reshape(-1, 3), faces, np.stack([u, v], -1).reshape(-1, 2)


def test_levels_of_detail_show_the_same_image(tmp_path: Path, device: str) -> None:
    """Coarser levels from farther away, across the seams of the texture coordinates."""
    places, faces, uv = ring(200, 100)
    material = Material(texture=photograph())
    scene.build(places, faces, tmp_path / "ring.rtg", uv=uv * (3, 2), material_table=[material])
    world, coarse = one(tmp_path / "ring.rtg"), set()
    for distance in (3.3, 9.0, 27.0):
        camera = Camera.look_at((0.3 * distance, 0.2 * distance, 0.93 * distance), (0, 0, 0), width=120, height=120)
        fine, usual = (
            Renderer(world, device, pixel_error=error).render(camera, ("base_color", "coverage")) for error in (0, 1)
        )
        coarse |= set(usual.stats.levels)
        both = fine["coverage"] & usual["coverage"]
        assert both.sum() > 50
        ours, theirs = (to_displayed(frame["base_color"][both].cpu().numpy()) for frame in (fine, usual))
        assert np.abs(ours - theirs).mean() < 0.03
    assert max(coarse) >= 4


def test_each_mesh_has_its_materials_and_equal_images_are_there_once(tmp_path: Path, device: str) -> None:
    points, faces = square(9)
    numbers = np.arange(len(faces)) // 32
    scene.build(points, faces, tmp_path / "a.rtg", uv=points[:, :2], materials=numbers)
    image, other = noise(8, 8), noise(16, 8, 1)
    tables = [
        None,
        [Material((k / 4, 0, 0), image if k % 2 else None) for k in range(4)],
        [Material((1, 1, 1), (image.copy(), other)[k % 2]) for k in range(5)],  # more materials than numbers
    ]
    world = Scene()
    for k, table in enumerate(tables):
        shift = np.eye(4)
        shift[0, 3] = 1.5 * k
        world.add_instance(world.add_mesh(tmp_path / "a.rtg", materials=table), shift)
    renderer = Renderer(world, device)
    outputs = ("base_color", "color", "material", "instance", "uv")
    frame = renderer.render(above(180, 60, 4.5, (2.0, 0.5)), outputs)
    assert renderer._surfaces is not None
    assert renderer._surfaces.tensors["images"].tolist() == [[0, 4], [4, 5]]
    assert len(renderer._surfaces.tensors["texels"]) == 85 + 171
    seen, instance, number = (frame[name][0].cpu().numpy() for name in ("base_color", "instance", "material"))
    for k in (0, 2):
        here = (instance == 1) & (number == k)
        assert here.sum() > 50
        assert np.abs(seen[here] - (to_linear(k / 4), 0, 0)).max() < 1e-6
    for k in (1, 3):
        here = (instance == 1) & (number == k)
        assert (seen[here][:, 1:] == 0).all()
        assert seen[here][:, 0].std() > 0
    alone = Renderer(one(tmp_path / "a.rtg"), device).render(above(60, 60, 1.5, (0.5, 0.5)), outputs)
    for name in outputs[:3]:  # a mesh without materials looks the same as alone
        assert torch.equal(frame[name][0, :, :60].cpu().nan_to_num(-7.0), alone[name][0].cpu().nan_to_num(-7.0)), name


def test_materials_of_meshes_that_come_later(tmp_path: Path, device: str) -> None:
    points, faces = square(3)
    scene.build(points, faces, tmp_path / "a.rtg", uv=points[:, :2])
    world = one(tmp_path / "a.rtg", materials=[Material((1, 0, 0))])
    renderer = Renderer(world, device)
    camera = above(64, 32, 2.0, (1.0, 0.5))
    assert renderer.render(camera, ("base_color",))["base_color"][0, 16, 16].tolist() == [1, 0, 0]
    shift = np.eye(4)
    shift[0, 3] = 1
    world.add_instance(world.add_mesh(tmp_path / "a.rtg", materials=[Material((0, 1, 0))]), shift)
    seen = renderer.render(camera, ("base_color",))["base_color"][0]
    assert seen[16, 16].tolist() == [1, 0, 0]
    assert seen[16, 48].tolist() == [0, 1, 0]


def same(a: GBuffer, b: GBuffer, names: Sequence[str]) -> bool:
    return all(torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)) for name in names)


def test_pages_from_a_pool_show_the_same(tmp_path: Path, device: str) -> None:
    """The test also compares two renders, which are equal bit for bit."""
    places, faces, uv = ring(300, 150)
    scene.build(places, faces, tmp_path / "ring.rtg", uv=uv, material_table=[Material(texture=noise(64, 64))])
    world = one(tmp_path / "ring.rtg")
    camera = Camera.look_at((2, 1, 1), (0, 0, 0), width=96, height=64)
    names = ("color", "base_color", "coverage")
    first, again = (Renderer(world, device).render(camera, names) for _ in range(2))
    pooled = Renderer(world, device, pool_bytes=6 * scene.PAGE_BYTES).render(camera, names)
    assert pooled.stats.streaming is not None
    assert pooled.stats.streaming.loaded > 1
    assert same(first, again, names)
    assert same(first, pooled, names)


def test_each_of_several_views_is_filtered_by_its_own_lens(tmp_path: Path, device: str) -> None:
    """Each view equals its separate render, bit for bit."""
    world = flat(tmp_path, Material(texture=noise(128, 128)))
    cameras = list(CAMERAS.values())
    names = ("base_color", "color", "coverage", "material_depth")
    together = Renderer(world, device).render(cameras, names)
    for number, camera in enumerate(cameras):
        alone = Renderer(world, device).render(camera, names)
        for name in names:
            ours, theirs = together[name][number].nan_to_num(-7.0), alone[name][0].nan_to_num(-7.0)
            assert torch.equal(ours, theirs), (number, name)


def test_lights_and_shadows_fall_on_textures(tmp_path: Path, device: str) -> None:
    world = flat(tmp_path, Material(texture=noise(16, 16)))
    world.add_light(scene.DirectionalLight((0, 0, -1), color=(1, 0.5, 0.25)))
    frame = Renderer(world, device).render(above(32, 32), ("color", "base_color"))
    shown = to_displayed(frame["base_color"][0].cpu().numpy())
    lit = 0.25 + 0.75 * np.array([1, 0.5, 0.25])
    assert np.abs(frame["color"][0].cpu().numpy() - shown * lit).max() < 1e-5


def test_surfaces_seen_from_their_edge_are_finite(tmp_path: Path, device: str) -> None:
    """Every pixel of a surface has a colour in the range of the image."""
    places, faces, uv = ring(60, 40)
    scene.build(places, faces, tmp_path / "ring.rtg", uv=uv * 1000, material_table=[Material(texture=noise(64, 64))])
    flat(tmp_path, Material(texture=noise(64, 64)))
    world = one(tmp_path / "ring.rtg")
    world.add_instance(world.add_mesh(tmp_path / "flat.rtg"))
    for eye in ((3, 0, 1e-4), (0.4, 0.3, 1e-6), (0.2, -3, 0.5)):
        camera = Camera.look_at(eye, (0.5, 0.5, 0), width=80, height=60, near=1e-4)
        frame = Renderer(world, device).render(camera, ("base_color", "coverage", "color"))
        seen = frame["base_color"][frame["coverage"]]
        assert len(seen) > 30
        assert ((seen >= 0) & (seen <= 1.000001)).all()
        assert frame["base_color"][~frame["coverage"]].isnan().all()
