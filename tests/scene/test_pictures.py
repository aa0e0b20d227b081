"""Outputs as colours, and as points in the world."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene.gbuffers import OUTPUTS, FrameStats, GBuffer
from rooftop.scene.pictures import NIGHT

STATS = FrameStats(0, 0, (), 0, 0, 0)


def shown(name: str, values: object, dtype: torch.dtype = torch.float32) -> NDArray[np.uint8]:
    """The picture of one row of pixels."""
    output = torch.as_tensor(values, dtype=dtype)[None, None]  # (1, 1, W[, C])
    return scene.picture(GBuffer(STATS, **{name: output}), name)[0]


def lightness(colors: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Relative luminance of sRGB colours (N, 3) (IEC 61966-2-1)."""
    linear = np.where(colors <= 10, colors / 255 / 12.92, ((colors / 255 + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


def test_background_is_dark_in_every_picture() -> None:
    inf, nan = torch.inf, torch.nan
    backgrounds = {"depth": inf, "normal": (0, 0, 0), "uv": (nan, nan), "velocity": (0, 0), "color": (0, 0, 0)}
    backgrounds |= {"vertex_color": (nan, nan, nan), "base_color": (nan, nan, nan), "shadow": (nan,)}
    backgrounds |= {"material_depth": 0.0, "coverage": False}
    for name in OUTPUTS:
        floats = name in backgrounds
        value = backgrounds.get(name, 0 if name == "overdraw" else -1)
        dtype = torch.bool if name == "coverage" else torch.float32 if floats else torch.int32
        found = shown(name, [value, value], dtype)
        assert found.dtype == np.uint8, name
        assert found.tolist() == [list(NIGHT)] * 2, name


def test_shadows_are_the_lighter_the_more_of_all_lights_arrives() -> None:
    assert shown("shadow", [[1.0], [0.5], [0.0]]).tolist() == [[242] * 3, [147] * 3, [51] * 3]
    assert shown("shadow", [[1.0, 0.0]]).tolist() == [[147] * 3]


def test_colors_and_normals_are_what_they_are() -> None:
    assert shown("color", [[1, 0.5, 0.2], [2, 0, 0]]).tolist() == [[255, 128, 51], [255, 0, 0]]
    assert shown("vertex_color", [[1, 0.5, 0.2], [0, 0, 0]]).tolist() == [[255, 128, 51], [0, 0, 0]]
    assert shown("normal", [[0, 0, 1], [-1, 0, 0]]).tolist() == [[128, 128, 255], [0, 128, 128]]
    assert shown("uv", [[0.25, 3.5], [-0.75, 0.5]]).tolist() == [[64, 128, 76]] * 2  # colours repeat at whole numbers


def test_near_is_light_and_far_is_dark_in_equal_steps() -> None:
    colors = shown("depth", [1.0, 2.0, 3.0, 4.0, 5.0, torch.inf])
    assert (np.diff(lightness(colors)) < 0).all()
    halves = shown("depth", [100.0, 150.0, 200.0])
    assert np.array_equal(halves, colors[[0, 2, 4]])
    assert np.array_equal(shown("depth", [7.0, 7.0]), colors[[0, 0]])


def test_more_overdraw_is_lighter_up_to_thirty_two() -> None:
    light = lightness(shown("overdraw", [1, 2, 4, 8, 16, 32], torch.int32))
    assert (np.diff(light) > 0).all()
    assert np.array_equal(shown("overdraw", [32], torch.int32), shown("overdraw", [1000], torch.int32))


@pytest.mark.parametrize("name", ["instance", "cluster", "triangle", "material"])
def test_numbers_have_colors_of_their_own_that_stay(name: str) -> None:
    colors = shown(name, torch.arange(256), torch.int32)
    assert len(np.unique(colors, axis=0)) >= 254  # numbers of 24 bits, two of which may round to one
    beside = np.abs(np.diff(colors.astype(int), axis=0)).max(1)
    assert np.median(beside) > 60
    assert (lightness(colors) > 4 * lightness(np.array([NIGHT]))).all()
    assert np.array_equal(shown(name, [200, 3], torch.int32), colors[[200, 3]])  # whatever the other pixels show
    assert shown(name, [2**31 - 1], torch.int32).shape == (1, 3)


def test_levels_are_told_apart() -> None:
    colors = shown("level", torch.arange(12), torch.int32).astype(int)
    apart = np.abs(colors[:, None] - colors).max(2) + 255 * np.eye(12, dtype=int)
    assert apart.min() > 40
    assert np.array_equal(shown("level", [31], torch.int32)[0], colors[11])


def test_velocity_is_a_hue_for_each_direction_and_lighter_when_faster() -> None:
    colors = shown("velocity", [[8, 0], [4, 0], [1, 0], [0, -8], [-8, 0], [0, 8]])
    assert (np.diff(lightness(colors[:3])) < 0).all()
    ways = colors[[0, 3, 4, 5]].astype(int)
    behind = shown("velocity", [[8, 0], [torch.nan, torch.nan]])  # the surface's previous place is not known
    assert behind.tolist() == [colors[0].tolist(), list(NIGHT)]
    assert (np.abs(ways[:, None] - ways).max(2) + 255 * np.eye(4) > 60).all()


def test_columns_of_points_are_a_list() -> None:
    frame = GBuffer(STATS, depth=torch.ones(1, 2, 3), color=torch.ones(1, 2, 3, 3))
    camera = scene.Camera.look_at((0, 0, 1), (1, 0, 0), width=3, height=2)
    assert scene.points(frame, camera, ["color"]).columns["color"].shape == (6, 3)
    with pytest.raises(ValueError, match=r"columns='color': expected a list of names of outputs, such as \['color'\]"):
        scene.points(frame, camera, "color")


def test_each_view_has_its_picture() -> None:
    frame = GBuffer(STATS, instance=torch.tensor([[[0, -1]], [[-1, 1]]], dtype=torch.int32))
    first, second = (scene.picture(frame, "instance", view) for view in (0, 1))
    assert first.shape == (1, 2, 3)
    assert (first[0, 1].tolist(), second[0, 0].tolist()) == ([*NIGHT], [*NIGHT])
    assert np.array_equal(scene.picture(frame, "instance", -1), second)
    with pytest.raises(IndexError, match="view 2 does not exist: the frame has 2"):
        scene.picture(frame, "instance", 2)
    for name in ("depth", "stats", "nothing"):
        with pytest.raises(KeyError, match="was not rendered"):
            scene.picture(frame, name)


# ---- points ----------------------------------------------------------------------------------------------------------


def test_a_plane_at_a_known_depth_is_known_points() -> None:
    K = [[10, 0, 1], [0, 20, 0], [0, 0, 1]]
    camera = scene.Camera.from_intrinsics(K, np.eye(4), 3, 2)
    depth = torch.tensor([[[5.0, 5.0, torch.inf], [5.0, 10.0, 5.0]]])
    found = scene.points(GBuffer(STATS, depth=depth), camera)
    assert found.xyz.dtype == torch.float32
    # x = (column - 1) z / 10, y = row z / 20.
    assert found.xyz.tolist() == [[-0.5, 0, 5], [0, 0, 5], [-0.5, 0.25, 5], [0, 0.5, 10], [0.5, 0.25, 5]]
    assert found.view.tolist() == [0] * 5
    assert found.columns == {}


def random_cameras(count: int, orthographic: bool) -> list[scene.Camera]:
    random = np.random.default_rng(5)
    cameras = []
    for _ in range(count):
        eye, target, up = random.normal(size=(3, 3))
        make, extent = (scene.Camera.parallel, 3.0) if orthographic else (scene.Camera.look_at, 70.0)
        cameras.append(make(eye * 3, target, up, extent, 24, 18))
    return cameras


@pytest.mark.parametrize("orthographic", [False, True])
def test_points_come_back_to_their_pixels(orthographic: bool) -> None:
    cameras = random_cameras(3, orthographic)
    chance = torch.Generator().manual_seed(0)
    depth = torch.rand(3, 18, 24, generator=chance) * 5 + 0.5
    depth[torch.rand(depth.shape, generator=chance) < 0.3] = torch.inf
    numbers = torch.arange(depth.numel(), dtype=torch.int32).view(depth.shape)
    frame = GBuffer(STATS, depth=depth, instance=numbers)
    found = scene.points(frame, cameras, columns=("instance",), dtype=torch.float64)
    assert 0 < len(found.xyz) < depth.numel()
    assert torch.equal(found.columns["instance"], numbers[depth.isfinite()])
    for view, camera in enumerate(cameras):
        seen = found.xyz[found.view == view].numpy() @ camera.world_to_camera[:3, :3].T + camera.world_to_camera[:3, 3]
        rows, columns = depth[view].isfinite().nonzero().T.numpy()
        scale = 1 if orthographic else seen[:, 2]
        np.testing.assert_allclose(seen[:, 2], depth[view][rows, columns], rtol=1e-12)
        np.testing.assert_allclose(seen[:, 0] * camera.fx / scale + camera.cx, columns, atol=1e-9)
        np.testing.assert_allclose(seen[:, 1] * camera.fy / scale + camera.cy, rows, atol=1e-9)


def test_no_points_of_an_empty_picture() -> None:
    frame = GBuffer(STATS, depth=torch.full((1, 4, 6), torch.inf), color=torch.zeros(1, 4, 6, 3))
    camera = scene.Camera.look_at((1, 0, 0), (0, 0, 0), width=6, height=4)
    found = scene.points(frame, camera, columns=("color",))
    assert (found.xyz.shape, found.view.shape, found.columns["color"].shape) == ((0, 3), (0,), (0, 3))


def test_points_of_other_cameras_are_refused() -> None:
    frame = GBuffer(STATS, depth=torch.ones(1, 4, 6))
    camera = scene.Camera.look_at((1, 0, 0), (0, 0, 0), width=6, height=4)
    with pytest.raises(ValueError, match="2 cameras of 6 x 4 pixels for a frame of 1 views of 6 x 4"):
        scene.points(frame, [camera, camera])
    with pytest.raises(ValueError, match="1 cameras of 4 x 6"):
        scene.points(frame, scene.Camera.look_at((1, 0, 0), (0, 0, 0), width=4, height=6))
    with pytest.raises(KeyError, match="'normal' was not rendered"):
        scene.points(frame, camera, columns=("normal",))


def test_what_is_rendered_lies_on_its_mesh(tmp_path: Path) -> None:
    pytest.importorskip("warp")
    trimesh = pytest.importorskip("trimesh")
    ball = trimesh.creation.icosphere(4)
    center = np.array([500.0, -300.0, 20.0])
    scene.build(ball.vertices, ball.faces, tmp_path / "ball.rtg")
    world = scene.Scene()
    transform = np.eye(4)
    transform[:3, 3] = center
    world.add_instance(world.add_mesh(tmp_path / "ball.rtg"), transform)
    cameras = [
        scene.Camera.look_at(center + eye, center, width=64, height=48, fov_y_degrees=50)
        for eye in ((3, 1, 0.5), (-1, 2.5, -1))
    ]
    frame = scene.Renderer(world, "cpu", pixel_error=0).render(cameras, outputs=("depth", "normal"))
    found = scene.points(frame, cameras, columns=("normal",), dtype=torch.float64)
    assert found.view.bincount().min() > 500
    from_center = found.xyz - torch.from_numpy(center)
    radius = from_center.norm(dim=1)
    assert radius.max() < 1 + 1e-3
    assert radius.min() > 0.99
    towards = (from_center * found.columns["normal"]).sum(1) / radius
    assert towards.min() > 0.99
