"""Cameras of different sizes and shadow maps in one chain of launches: each picture equals the one drawn alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop.scene import Camera, DirectionalLight, GBuffer, Geometry, PointLight, Renderer, Scene, SpotLight
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering import shadow_maps
from rooftop.scene.rendering.canvases import MOST_LEVELS, Canvas
from rooftop.scene.rendering.chains import MOST_CHAINS

Floats = NDArray[np.float64]
ALL = tuple(OUTPUTS)
SIDES = [1, 2, 7, 31, 64, 65, 100, 130]


def moved(*shift: float, scale: float = 1.0) -> Floats:
    matrix = np.diag([scale, scale, scale, 1.0])
    matrix[:3, 3] = shift
    return matrix


@pytest.fixture
def world(ball: Geometry, cube: Geometry) -> Scene:
    """Balls behind a wall of cubes with a gap."""
    scene = Scene()
    a_ball, a_cube = scene.add_mesh(ball), scene.add_mesh(cube)
    for y in range(-2, 3):
        scene.add_instance(a_ball, moved(9.0 + abs(y), 2.2 * y, 0.3 * y))
        if y != 1:
            scene.add_instance(a_cube, moved(5.0, 2.0 * y, 0.0) @ np.diag([0.2, 1.0, 1.5, 1.0]))
    return scene


def same(a: GBuffer, b: GBuffer) -> bool:
    return all(torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)) for name in ALL if name != "overdraw")


def cameras_of(random: np.random.Generator, step: int) -> list[Camera]:
    """Cameras whose sizes depend on a seed and stay the same in all steps."""
    sizes = [(int(random.choice(SIDES)), int(random.choice(SIDES))) for _ in range(random.integers(1, 5))]
    cameras = []
    for k, (width, height) in enumerate(sizes):
        eye, target = (0.0, 0.4 * k + 0.5 * step - 1.0, 0.3 * step), (9.0, 0.3 * k, 0.0)
        if random.integers(4):
            camera = Camera.look_at(eye, target, fov_y_degrees=65, width=width, height=height)
        else:
            camera = Camera.parallel(eye, target, view_height=9, width=width, height=height)
        cameras.append(camera)
    return cameras


def test_each_picture_is_the_one_that_it_is_alone(world: Scene, device: str) -> None:
    met = Counter[str]()

    @settings(max_examples=8, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def hold(seed: int) -> None:
        renderer, alone = Renderer(world, device), [Renderer(world, device, occlusion=False) for _ in range(4)]
        for step in range(3):
            cameras = cameras_of(np.random.default_rng(seed), step)
            frames = renderer.render_each(cameras, ALL)
            for camera, frame, other in zip(cameras, frames, alone, strict=False):
                assert frame["depth"].shape == (1, camera.height, camera.width)
                assert frame["normal"].shape == (1, camera.height, camera.width, 3)
                expected = other.render(camera, ALL)
                assert same(frame, expected)
                if len(cameras) == 1:
                    assert not step or frame.stats.triangles <= expected.stats.triangles
            met["sizes"] += len({(camera.width, camera.height) for camera in cameras}) > 1
            met["occluded"] += frames[0].stats.occluded
            met["second pass"] += frames[0].stats.second_pass_clusters

    hold()
    assert min(met.values()) > 0


def test_cuda_cpp_draws_views_of_different_sizes_as_warp_does(world: Scene, cuda_on_cpu: Counter[str]) -> None:
    draws_what_warp_draws(world, "cpu")
    assert cuda_on_cpu["reduce_tiles"] >= 3
    assert cuda_on_cpu["reduce_rest"] >= 3


@pytest.mark.gpu
def test_cuda_cpp_draws_views_of_different_sizes_as_warp_does_on_a_gpu(world: Scene) -> None:
    draws_what_warp_draws(world, "cuda", steps=8)  # some of them replayed from graphs


def draws_what_warp_draws(world: Scene, device: str, steps: int = 3) -> None:
    """A light moves in every second frame, so that chains with and without its map alternate."""
    light = SpotLight((2, 0, 6), (1, 0, -1), angle_degrees=60, size=48)
    world.add_light(light)
    cuda, warp = (Renderer(world, device, kernels=kernels) for kernels in ("cuda", "warp"))
    maps = 0
    for step in range(steps):
        cameras = [
            Camera.look_at((0, 0.5 * step - 1, 0.2), (9, 0.3 * k, 0), fov_y_degrees=65, width=width, height=height)
            for k, (width, height) in enumerate([(70, 31), (1, 1), (65, 130), (130, 40)])
        ]
        world.move(1, moved(5.0, -4 + 0.2 * (step // 2), 0.0, scale=0.8))
        ours, theirs = cuda.render_each(cameras, ALL), warp.render_each(cameras, ALL)
        assert all(same(a, b) and torch.equal(a["overdraw"], b["overdraw"]) for a, b in zip(ours, theirs, strict=True))
        assert ours[0].stats == theirs[0].stats
        maps += ours[0].stats.shadow_maps
        hzbs = [renderer._memory.tensors["hzb_before"] for renderer in (cuda, warp) if renderer._memory]
        assert torch.equal(*hzbs)
    assert 0 < maps < steps


def test_squares_of_too_many_threads_are_not_used() -> None:
    """A launch has at most 2^30 threads: narrow pictures of fewer pixels would need more in squares of 16 x 16."""
    narrow, wide = Canvas(((17, 16384),) * 3000, 3000), Canvas(((32, 16384),) * 2048, 2048)
    assert narrow.same == 0
    assert narrow.tiled_texels == narrow.texels < 2**30
    assert wide.same == 32 * 16384
    assert wide.tiled_texels == wide.texels == 2**30


def test_of_one_size_it_is_a_batch(world: Scene, device: str) -> None:
    cameras = [Camera.look_at((0, k, 0), (9, 0, 0), width=60, height=50) for k in range(3)]
    together = Renderer(world, device).render(cameras, ALL)
    each = Renderer(world, device).render_each(cameras, ALL)
    assert together["depth"].shape == (3, 50, 60)
    for k, frame in enumerate(each):
        assert torch.equal(together["color"][k], frame["color"][0])
        assert torch.equal(together["overdraw"][k], frame["overdraw"][0])
    assert Renderer(world, device).render_each([]) == ()


def test_cameras_of_one_chain_have_their_own_frames_before(world: Scene, device: str) -> None:
    renderer, alone = Renderer(world, device), [Renderer(world, device) for _ in range(2)]
    for step in range(3):
        cameras = [
            Camera.look_at((0, 0.6 * step, 0), (9, 0, 0), width=80, height=33),
            Camera.look_at((0, 0, 0.4 * step), (9, 0, 0), width=41, height=60),
        ]
        frames = renderer.render_each(cameras, ("velocity",))
        for camera, frame, other in zip(cameras, frames, alone, strict=True):
            assert torch.equal(frame["velocity"], other.render(camera, ("velocity",))["velocity"])
    assert frames[0]["velocity"].abs().max() > 1


def test_lights_and_cameras_share_a_chain(world: Scene, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shadows are the same whether all maps are drawn together with the pictures, or some maps are drawn later."""
    world.add_light(DirectionalLight((1, 0.4, -1.5), size=64, cascades=3))
    world.add_light(SpotLight((2, 0, 6), (1, 0, -1), angle_degrees=60, size=48))
    world.add_light(PointLight((4, 3, 3), size=32))
    cameras = [Camera.look_at((0, k, 1), (9, 0, 0), width=70 - 20 * k, height=50 + 9 * k) for k in range(2)]
    beside, alone = Renderer(world, device), [Renderer(world, device) for _ in range(2)]
    frames = beside.render_each(cameras, ALL)
    assert frames[0].stats.shadow_maps == 2 * 3 + 1 + 6
    with monkeypatch.context() as few:
        few.setattr(shadow_maps, "MOST_AT_ONCE", 2 * 64 * 64)
        split = Renderer(world, device).render_each(cameras, ALL)
    for camera, frame, in_parts, other in zip(cameras, frames, split, alone, strict=True):
        assert same(frame, in_parts)
        assert same(frame, other.render(camera, ALL))
        assert 0 < frame["shadow"].nan_to_num(0.0).mean() < 1
    again = beside.render_each(cameras, ALL)
    assert again[0].stats.shadow_maps == 0
    for before, after in zip(frames, again, strict=True):
        assert torch.equal(before["shadow"].nan_to_num(-7.0), after["shadow"].nan_to_num(-7.0))


def test_few_chains_are_kept(world: Scene, device: str) -> None:
    for k in range(6):
        world.add_light(SpotLight((3 * k, 0, 6), (0, 0, -1), angle_degrees=30, size=16 + k))
    renderer = Renderer(world, device)
    camera = Camera.look_at((0, 0, 1), (9, 0, 0), width=50, height=40)
    for k in range(6):
        world.set_light(k, SpotLight((3 * k, 0, 7), (0, 0, -1), angle_degrees=30, size=16 + k))
        ours = renderer.render(camera, ALL)
        assert same(ours, Renderer(world, device).render(camera, ALL)) or k  # velocity is 0 in a first frame
        assert len(renderer._chains._chains) <= MOST_CHAINS
    assert len(renderer._chains._chains) == MOST_CHAINS


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6),
    cameras=st.integers(0, 6),
)
def test_a_canvas_divides_memory(sizes: list[tuple[int, int]], cameras: int) -> None:
    canvas = Canvas(tuple(sizes), min(cameras, len(sizes)))
    taken = np.zeros(canvas.texels, int)
    for width, height, start, levels in canvas.table.tolist():
        taken[start : start + width * height] += 1
        assert 1 << (levels - 1) >= max(width, height)
        assert levels == 1 or 1 << (levels - 2) < max(width, height)
    assert (taken == 1).all()
    levels_taken = np.zeros(canvas.hzb_texels, int)
    for view, (width, height) in enumerate(sizes[: canvas.cameras]):
        for level in range(1, canvas.table[view, 3]):
            texels = -(-width // 2**level) * -(-height // 2**level)
            start = canvas.hzb_at[view, level]
            levels_taken[start : start + texels] += 1
    assert (levels_taken == 1).all()
    reduced = {level for step in canvas.hzb_steps for level in step}
    assert reduced == set(range(1, canvas.levels))
    assert canvas.levels <= MOST_LEVELS
    assert {canvas: 1}[Canvas(tuple(sizes), canvas.cameras)]
