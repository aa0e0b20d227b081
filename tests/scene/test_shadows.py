"""Shadows agree with rays to the light, maps are reused as long as they are valid, and lights have the right views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop.scene import Camera, DirectionalLight, GBuffer, Geometry, PointLight, Renderer, Scene, SpotLight
from rooftop.scene.lights import MARGIN, Light, borders
from rooftop.scene.pictures import points
from rooftop.scene.rendering import shadow_maps
from rooftop.scene.rendering.stages import Stages

Floats = NDArray[np.float64]
LIGHTS: dict[str, Light] = {
    "directional": DirectionalLight((1, 0.6, -1.5), size=256, cascades=2, distance=12.0),
    "spot": SpotLight((-3, -2, 3), (3, 2, -2.5), angle_degrees=60, size=128),
    "point": PointLight((2, 2, 2.5), size=128),
}
CAMERA = Camera.look_at((5, -5, 4), (0, 0, 0.5), fov_y_degrees=50, width=96, height=72)
PLACES = {"floor": (0, 0, -0.1, 1), "ball": (0, 0, 1.3, 0.8), "near": (1.5, -1, 0.5, 0.4)}
OUTPUTS = ("shadow", "depth", "normal", "color")


def placed(x: float, y: float, z: float, scale: float) -> Floats:
    matrix = np.diag([scale, scale, scale, 1.0])
    matrix[:3, 3] = x, y, z
    return matrix


@pytest.fixture(scope="session")
def sphere(built: Callable[..., Geometry]) -> Geometry:
    mesh = trimesh.creation.icosphere(3)
    return built("sphere", mesh.vertices, mesh.faces)


@pytest.fixture(scope="session")
def floor(built: Callable[..., Geometry]) -> Geometry:
    mesh = trimesh.creation.box((8, 8, 0.2))
    return built("floor", mesh.vertices, mesh.faces)


@pytest.fixture
def world(sphere: Geometry, floor: Geometry) -> Scene:
    """A floor (0), a ball above it (1), and a smaller one (2)."""
    scene = Scene()
    meshes = {"floor": scene.add_mesh(floor), "ball": scene.add_mesh(sphere)}
    for name, place in PLACES.items():
        scene.add_instance(meshes.get(name, meshes["ball"]), placed(*place))
    return scene


def triangles() -> Floats:
    """The triangles (N, 3, 3) of the world."""
    found = []
    for name, place in PLACES.items():
        mesh = trimesh.creation.box((8, 8, 0.2)) if name == "floor" else trimesh.creation.icosphere(3)
        matrix = placed(*place)
        found.append(mesh.vertices[mesh.faces] @ matrix[:3, :3].T + matrix[:3, 3])
    return np.concatenate(found)


def blocked(origins: Floats, toward: Floats, reach: Floats, corners: Floats) -> NDArray[np.bool_]:
    """Whether rays (N, 3) with directions of length 1 meet a triangle (T, 3, 3) within these distances (N,)."""
    rays = np.concatenate([toward, -np.cross(toward, origins)], 1)
    begin, end = corners, np.roll(corners, -1, 1)
    edges = np.concatenate([np.cross(begin, end), end - begin], 2)  # (T, 3, 6)
    sides = np.stack([rays @ edges[:, edge].T for edge in range(3)])  # the sign is the side on which the ray passes
    ray, face = np.nonzero((sides.min(0) >= 0) | (sides.max(0) <= 0))
    a, b, c = corners[face].transpose(1, 0, 2)
    normal = np.cross(b - a, c - a)
    along = (normal * (a - origins[ray])).sum(1) / (normal * toward[ray]).sum(1)
    return np.isin(np.arange(len(origins)), ray[(along > 1e-9) & (along < reach[ray])])


def texel_of(light: Light, points: Floats) -> float:
    """The largest texel of those in which the points lie, in world units."""
    views = light.maps([CAMERA], np.array([[-4.0, -4, -0.2], [4, 4, 2.1]]))
    if isinstance(light, DirectionalLight):
        return max(1 / view.fx for view in views)
    return float(np.linalg.norm(points - np.array(light.position), axis=1).max()) / views[0].fx


@pytest.mark.parametrize("name", LIGHTS)
def test_shadows_are_those_that_rays_find(name: str, world: Scene, device: str) -> None:
    """The test compares only points whose neighbourhood, as large as the stated bias, is completely in light or in
    shadow."""
    light = LIGHTS[name]
    world.add_light(light)
    frame = Renderer(world, device, pixel_error=0.0).render(CAMERA, OUTPUTS)
    seen = points(frame, CAMERA, ("shadow", "normal"), dtype=torch.float64)
    xyz, normal = seen.xyz.cpu().numpy(), seen.columns["normal"].double().cpu().numpy()
    shares = seen.columns["shadow"][:, 0].cpu().numpy()
    if isinstance(light, DirectionalLight):
        toward, reach = np.broadcast_to(-np.array(light.direction), xyz.shape), np.full(len(xyz), 1e3)
    else:
        away = np.array(light.position) - xyz
        reach = np.linalg.norm(away, axis=1)
        toward = away / reach[:, None]
    facing = (toward * normal).sum(1)
    assert (shares[facing < -1e-3] == 0).all()
    random = np.random.default_rng(0)
    few = [random.permutation(np.flatnonzero((facing > 0.3) & side))[:100] for side in (shares == 0, shares > 0)]
    clear = np.concatenate(few)
    xyz, normal, shares, toward, reach = (each[clear] for each in (xyz, normal, shares, toward, reach))
    bias = texel_of(light, xyz)
    side = np.cross(toward, normal + np.array((0.01, 0.02, 0.03)))
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    other = np.cross(toward, side)
    steps = np.linspace(-1.5, 1.5, 4)
    around = [xyz + 0.05 * bias * normal]
    around += [xyz + bias * (1.6 * normal + a * side + b * other) for a in steps for b in steps]
    corners = triangles()
    hits = np.stack([blocked(each, toward, reach, corners) for each in around])
    lit, dark = ~hits.any(0), hits.all(0)
    assert lit.sum() > 50
    assert dark.sum() > 5
    assert (shares[lit] == 1).all()
    assert (shares[dark] == 0).all()


def shadow_of(frame: GBuffer) -> torch.Tensor:
    """The shadow, with -1 for background."""
    return frame["shadow"].nan_to_num(-1.0)


def drawn(renderer: Renderer, camera: Camera = CAMERA) -> int:
    return renderer.render(camera, ("shadow",)).stats.shadow_maps


def nudged(x: float, y: float = 0.0) -> Camera:
    return Camera.look_at((5 + x, -5 + y, 4), (x, y, 0.5), fov_y_degrees=50, width=96, height=72)


def test_small_moves_of_the_camera_change_no_texel(world: Scene, device: str) -> None:
    """A cascade moves in steps of whole texels, and stays unchanged between these steps."""
    light = DirectionalLight((1, 0.6, -1.5), size=128, cascades=3)
    world.add_light(light)
    renderer = Renderer(world, device)
    assert drawn(renderer, nudged(0)) == 3
    finest = min(1 / view.fx for view in light.maps([CAMERA], world.bounds()))
    total = 0
    for step in range(1, 61):
        before = renderer._shadows._depths.clone()
        maps = drawn(renderer, nudged(finest * step / 40))
        total += maps
        texels = 128 * 128
        changed = sum(
            not torch.equal(renderer._shadows._depths[at : at + texels], before[at : at + texels])
            for at in range(0, 3 * texels, texels)
        )
        assert changed <= maps
    assert 1 <= total <= 10  # each move is 1.5 texels of the finest cascade, and less in the others


def test_maps_are_drawn_again_only_where_casters_moved(world: Scene, device: str) -> None:
    world.add_light(SpotLight((0, 0, 6), (0, 0, -1), angle_degrees=30, size=64))
    world.add_light(SpotLight((30, 0, 6), (0, 0, -1), angle_degrees=30, size=64))
    renderer = Renderer(world, device)
    assert drawn(renderer) == 2
    assert drawn(renderer) == 0
    world.move(1, placed(0.2, 0, 1.3, 0.8))  # below the first light
    assert drawn(renderer) == 1
    world.move(2, placed(0, 60, 0.5, 0.4))  # from below the first light to where no light shines
    assert drawn(renderer) == 1
    world.move(2, placed(0, 70, 0.5, 0.4))
    assert drawn(renderer) == 0
    world.add_instance(1, placed(30, 0, 0, 1))
    assert drawn(renderer) == 1
    renderer.pixel_error = 2.0
    assert drawn(renderer) == 2
    world.set_light(0, SpotLight((0, 0, 7), (0, 0, -1), angle_degrees=30, size=64))
    assert drawn(renderer) == 1
    world.set_light(0, SpotLight((0, 0, 7), (0, 0, -1), angle_degrees=30, size=32))
    assert drawn(renderer) == 2


@pytest.mark.parametrize("name", LIGHTS)
def test_kept_maps_give_the_shadows_of_new_ones(name: str, world: Scene, device: str) -> None:
    world.add_light(LIGHTS[name])
    renderer = Renderer(world, device)
    renderer.render(CAMERA, OUTPUTS)
    world.move(1, placed(0.4, 0.3, 1.1, 0.7))
    kept = renderer.render(CAMERA, OUTPUTS)
    new = Renderer(world, device).render(CAMERA, OUTPUTS)
    assert torch.equal(shadow_of(kept), shadow_of(new))


def test_each_camera_has_cascades_of_its_own(world: Scene, device: str) -> None:
    world.add_light(LIGHTS["directional"])
    world.add_light(LIGHTS["point"])
    cameras = [CAMERA, Camera.look_at((-4, 3, 2), (0, 0, 0.5), width=96, height=72)]
    renderer = Renderer(world, device)
    both = renderer.render(cameras, ("shadow",))
    assert both.stats.shadow_maps == 2 + 2 + 6
    for number, camera in enumerate(cameras):
        alone = Renderer(world, device).render(camera, ("shadow",))
        assert torch.equal(shadow_of(both)[number], shadow_of(alone)[0])


def test_colour_is_of_the_lights_and_their_shadows(world: Scene, device: str) -> None:
    plain = Renderer(world, device).render(CAMERA, ("color",))["color"]
    world.add_light(DirectionalLight((1, 0.6, -1.5), color=(1, 0, 0), size=128, cascades=2))
    frame = Renderer(world, device).render(CAMERA, ("color", "shadow"))
    alone = Renderer(world, device).render(CAMERA, ("color",))
    assert alone.shadow is None
    assert torch.equal(alone["color"], frame["color"])
    lit, dark = (frame["color"][shadow_of(frame)[..., 0] == share] for share in (1, 0))
    assert len(lit) > 100
    assert len(dark) > 20
    assert (dark[:, 0] < 0.3).all()  # in full shadow, red has only ambient light, like the other channels
    assert (lit[:, 0] > lit[:, 1] + 0.05).float().mean() > 0.9
    assert not torch.equal(plain, frame["color"])


def test_a_spot_lights_its_cone_alone_and_fades(world: Scene, device: str) -> None:
    world.add_light(SpotLight((0, 0, 5), (0, 0, -1), angle_degrees=20, color=(20, 20, 20), range=50, size=64))
    frame = Renderer(world, device).render(CAMERA, OUTPUTS)
    seen = points(frame, CAMERA, ("color",), dtype=torch.float64)
    xyz, color = seen.xyz.cpu().numpy(), seen.columns["color"][:, 0].cpu().numpy()
    floor = abs(xyz[:, 2]) < 1e-3
    aside = np.degrees(np.arctan2(np.hypot(xyz[:, 0], xyz[:, 1]), 5 - xyz[:, 2]))
    assert color[floor & (aside > 10.01)].max() < 0.3
    assert color[(xyz[:, 2] > 2.0) & (aside < 5)].min() > 0.5


def test_a_scene_without_lights_or_instances(world: Scene, device: str) -> None:
    frame = Renderer(world, device).render(CAMERA, ("shadow",))
    assert frame["shadow"].shape == (1, 72, 96, 0)
    empty = Scene()
    empty.add_light(PointLight((0, 0, 0)))
    frame = Renderer(empty, device).render(CAMERA, ("shadow", "color"))
    assert frame["shadow"].shape == (1, 72, 96, 1)
    assert frame["shadow"].isnan().all()


def test_more_maps_than_memory_takes_at_once(world: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_light(PointLight((2, 2, 2.5), size=64))
    whole = Renderer(world, "cpu").render(CAMERA, ("shadow",))
    monkeypatch.setattr(shadow_maps, "MOST_AT_ONCE", 2 * 64 * 64)
    parts = Renderer(world, "cpu").render(CAMERA, ("shadow",))
    assert whole.stats.shadow_maps == parts.stats.shadow_maps == 6
    assert torch.equal(shadow_of(whole), shadow_of(parts))


# ---- views of lights ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    eye=st.tuples(*[st.floats(-50, 50)] * 3),
    direction=st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda each: max(map(abs, each)) > 0.01),
    fov=st.floats(5, 120),
    parallel=st.booleans(),
    cascades=st.integers(1, 8),
)
def test_cascades_hold_all_that_the_camera_sees(
    eye: Sequence[float], direction: Sequence[float], fov: float, parallel: bool, cascades: int
) -> None:
    target = np.array(eye) + np.array((1.0, 0.3, -0.2))
    camera = (
        Camera.parallel(eye, target, view_height=fov / 10, width=64, height=40)
        if parallel
        else Camera.look_at(eye, target, fov_y_degrees=fov, width=64, height=40)
    )
    light = DirectionalLight(direction, size=64, cascades=cascades, distance=20.0)
    views = light.maps([camera], np.array([[-1.0, -1, -1], [1, 1, 1]]))
    assert len(views) == cascades
    depths = borders(max(camera.near, 20 / 500), 20.0, cascades)
    assert depths[0] < depths[-1] == pytest.approx(20.0)
    assert all(a < b for a, b in pairwise(depths))
    turn, shift = camera.world_to_camera[:3, :3], camera.world_to_camera[:3, 3]
    for view, (near, far) in zip(views, pairwise(depths), strict=True):
        for z in (near, far):
            for x, y in ((-0.5, -0.5), (63.5, -0.5), (-0.5, 39.5), (63.5, 39.5)):
                scale = 1.0 if parallel else z
                seen = np.array([(x - camera.cx) / camera.fx * scale, (y - camera.cy) / camera.fy * scale, z])
                at = view.world_to_camera[:3, :3] @ (turn.T @ (seen - shift)) + view.world_to_camera[:3, 3]
                place = view.fx * at[:2] + view.cx
                assert (place >= MARGIN - 1.01).all()
                assert (place <= view.width - MARGIN + 0.01).all()


def test_six_maps_of_a_point_hold_every_direction() -> None:
    views = PointLight((1, 2, 3), size=32).maps([CAMERA], np.zeros((2, 3)))
    directions = np.random.default_rng(0).normal(size=(1000, 3))
    for direction in directions:
        axis = int(abs(direction).argmax())
        view = views[2 * axis + (direction[axis] < 0)]
        at = view.world_to_camera[:3, :3] @ direction
        place = view.fx * at[:2] / at[2] + view.cx
        assert at[2] > 0
        assert (place >= MARGIN - 0.51).all()
        assert (place <= 31 - MARGIN + 0.51).all()


WRONG: dict[str, Callable[[], Any]] = {
    "expected a direction that is not all zeros": lambda: DirectionalLight((0, 0, 0)),
    "direction=.*: expected three finite numbers": lambda: DirectionalLight((0, 0, float("nan"))),
    "cascades=9: expected an integer from 1 to 8": lambda: DirectionalLight((0, 0, 1), cascades=9),
    "at least 16 texels": lambda: DirectionalLight((0, 0, 1), size=8),
    "size=70000: expected an integer number of pixels": lambda: PointLight((0, 0, 1), size=70000),
    "color=.*: expected three finite numbers, 0 or more": lambda: PointLight((0, 0, 1), color=(1, 1, -1)),
    "angle_degrees=180": lambda: SpotLight((0, 0, 1), (0, 0, 1), angle_degrees=180),
    "range=0": lambda: SpotLight((0, 0, 1), (0, 0, 1), range=0),
    "expected a scene.DirectionalLight, SpotLight or PointLight": lambda: Scene().add_light("sun"),  # type: ignore[arg-type]
    "the scene has no light yet: add_light adds one": lambda: Scene().set_light(0, PointLight((0, 0, 0))),
    "a scene has at most 32 lights": lambda: [scene.add_light(PointLight((0, 0, 0))) for scene in [Scene()] * 33],
    "position=.*: expected three finite numbers": lambda: PointLight((0, 0)),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_said(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WRONG[said]()


def test_maps_beyond_memory_are_refused(world: Scene) -> None:
    world.add_light(PointLight((0, 0, 0), size=16384))
    with pytest.raises(ValueError, match="6 shadow maps have 1,610,612,736 texels: a frame has at most 2\\^30"):
        Renderer(world, "cpu").render(CAMERA, ("shadow",))


def test_a_frame_after_one_that_was_refused_has_its_own_maps(world: Scene, device: str) -> None:
    world.add_light(LIGHTS["point"])
    renderer = Renderer(world, device)
    before = renderer.render(CAMERA, OUTPUTS)
    world.set_light(0, PointLight((0, 0, 0), size=16384))
    with pytest.raises(ValueError, match="6 shadow maps"):
        renderer.render(CAMERA, OUTPUTS)
    world.set_light(0, LIGHTS["point"])
    after = renderer.render(CAMERA, OUTPUTS)
    assert after.stats.shadow_maps == 0
    assert torch.equal(shadow_of(before), shadow_of(after))


def test_a_camera_that_is_made_again_sees_the_same_maps(world: Scene, device: str) -> None:
    world.add_light(LIGHTS["directional"])
    renderer = Renderer(world, device)
    assert drawn(renderer, nudged(0.0)) == 2
    kept = renderer._shadows.views
    assert drawn(renderer, nudged(0.0)) == 0
    assert renderer._shadows.views is kept


def test_a_frame_that_fails_spoils_no_kept_map(world: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed frame of another camera has overwritten the cascades. The next frame draws them again."""
    world.add_light(DirectionalLight((1, 0.6, -1.5), size=64, cascades=2))
    renderer = Renderer(world, "cpu")
    expected = renderer.render(CAMERA, ("shadow",))
    with monkeypatch.context() as failing:
        failing.setattr(Stages, "emit", None)
        with pytest.raises(TypeError):
            renderer.render(Camera.look_at((-6, -2, 3), (0, 1, 0.5), width=96, height=72), ("shadow",))
    found = renderer.render(CAMERA, ("shadow",))
    assert torch.equal(found["shadow"].nan_to_num(-7.0), expected["shadow"].nan_to_num(-7.0))
    assert found.stats.shadow_maps == 2
