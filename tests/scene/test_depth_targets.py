"""Coverage and material depth of each pixel, for use as a stencil and as a depth of materials."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Camera, Geometry, Renderer, Scene
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.scene.rendering.targets import BACKGROUND, Outputs

Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]
NAMES = ("depth", "instance", "material", "coverage", "material_depth")


@pytest.fixture(scope="module")
def many(built: Callable[..., Geometry], small_ball: Arrays) -> Geometry:
    """A ball with material numbers from 0 to the highest possible one, with several in a cluster."""
    vertices, faces = small_ball
    numbers = np.array([0, 1, 2, 40_000, 65_534, 65_535])[np.arange(len(faces)) // 7 % 6]
    return built("many", vertices, faces, materials=numbers)


def test_coverage_is_where_there_is_a_surface(many: Geometry, device: str) -> None:
    world = Scene()
    number = world.add_mesh(many)
    for x in (0.0, 4.0, 40.0):
        shift = np.eye(4)
        shift[0, 3] = x
        world.add_instance(number, shift)
    cameras = [Camera.look_at(eye, (1, 0, 0), width=90, height=70) for eye in ((-3, 1, 1), (60, 20, 5))]
    frame = Renderer(world, device).render(cameras, NAMES)
    covered = frame["coverage"]
    assert covered.dtype == torch.bool
    assert covered.shape == (2, 70, 90)
    assert torch.equal(covered, frame["depth"].isfinite())
    assert torch.equal(covered, frame["instance"] >= 0)
    assert 0.02 < covered.float().mean() < 0.9
    assert len(frame["depth"][covered]) == covered.sum()


@pytest.mark.parametrize("names", [OUTPUTS, *((name,) for name in OUTPUTS), NAMES, ("depth", "color", "velocity")])
def test_every_pixel_is_written(
    names: tuple[str, ...], many: Geometry, cube: Geometry, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Background pixels are also written, whatever the output's memory contained before. The cube has no normals, uv or
    colours."""
    world = Scene()
    numbers = world.add_mesh(many), world.add_mesh(cube, materials=[scene.Material((0.2, 0.5, 0.9))])
    for shift, number in zip((-1.5, 1.5), numbers, strict=True):
        matrix = np.eye(4)
        matrix[0, 3] = shift
        world.add_instance(number, matrix)
    world.add_light(scene.DirectionalLight((1, 0.5, -2), size=64, cascades=1))
    frames, new = [], Outputs.new

    def dirty(self: Outputs, value: int) -> dict[str, torch.Tensor]:
        tensors = new(self)
        for tensor in tensors.values():
            tensor.fill_(value)
        return tensors

    for value in (0, 77):
        monkeypatch.setattr(Outputs, "new", partialmethod(dirty, value))
        renderer = Renderer(world, device)
        camera = Camera.look_at((1, -6, 2), (0, 0, 0), width=60, height=40)
        frames.append([renderer.render(camera, names) for _ in range(2)][1])
    for name in names:
        first, second = (frame[name] for frame in frames)
        assert torch.equal(first.nan_to_num(-7.0), second.nan_to_num(-7.0)), name
        if name in BACKGROUND:
            corner = first[0, 0, 0].float()
            assert torch.equal(corner, torch.full_like(corner, float(BACKGROUND[name]))) or corner.isnan().all()
            assert bool(corner.isnan().all()) == bool(np.isnan(BACKGROUND[name]))


def test_a_frame_stays_as_it_is(many: Geometry, device: str) -> None:
    """Later frames write to other memory."""
    world = Scene()
    world.add_instance(world.add_mesh(many))
    renderer = Renderer(world, device)
    cameras = [Camera.look_at((3, y, 1), (0, 0, 0), width=60, height=40) for y in (0.0, 1.0, 2.0, 3.0)]
    frames = [renderer.render(camera, NAMES) for camera in cameras]
    for camera, frame in zip(cameras, frames, strict=True):
        alone = Renderer(world, device).render(camera, NAMES)
        assert all(torch.equal(frame[name], alone[name]) for name in NAMES)


def test_material_depth_equals_that_of_a_materials_pixels_and_no_others(many: Geometry, device: str) -> None:
    """Equality is exact, up to the highest material number. Background is nearer than all materials."""
    world = Scene()
    world.add_instance(world.add_mesh(many))
    camera = Camera.look_at((3, 0, 1), (0, 0, 0), width=160, height=120)
    frame = Renderer(world, device).render(camera, NAMES)
    material, depth = frame["material"], frame["material_depth"]
    assert depth.dtype == torch.float32
    assert material.unique().tolist() == [-1, 0, 1, 2, 40_000, 65_534, 65_535]
    numbers = np.arange(1, 65_537)
    assert ((numbers / 65_536).astype(np.float32) * 65_536.0 == numbers).all()  # no two depths are equal as float32
    for number in material.unique().tolist():
        assert torch.equal(depth == (number + 1) / 65_536, material == number)
    assert (depth[material < 0] == 0).all()
    assert depth.max() == 1


def test_each_alone_is_what_it_is_with_the_others(many: Geometry, device: str) -> None:
    world = Scene()
    world.add_instance(world.add_mesh(many))
    camera = Camera.look_at((3, 0, 1), (0, 0, 0), width=50, height=40)
    together = Renderer(world, device).render(camera, NAMES)
    for name in ("coverage", "material_depth"):
        assert torch.equal(Renderer(world, device).render(camera, (name,))[name], together[name])


def test_a_scene_without_instances_covers_nothing(device: str) -> None:
    frame = Renderer(Scene(), device).render(Camera.look_at((1, 0, 0), (0, 0, 0), width=8, height=4), NAMES)
    assert not frame["coverage"].any()
    assert (frame["material_depth"] == 0).all()


def test_pictures_of_them(many: Geometry) -> None:
    world = Scene()
    world.add_instance(world.add_mesh(many))
    frame = Renderer(world, "cpu").render(Camera.look_at((3, 0, 1), (0, 0, 0), width=50, height=40), NAMES)
    covered = frame["coverage"][0].numpy()
    shown = scene.picture(frame, "coverage")
    assert (shown[covered] > 200).all()
    assert (shown[~covered] < 30).all()
    assert np.array_equal(scene.picture(frame, "material_depth"), scene.picture(frame, "material"))
