"""Coverage and material depth: what a stencil and a depth of materials say of each pixel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Camera, Geometry, Renderer, Scene

Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]
NAMES = ("depth", "instance", "material", "coverage", "material_depth")


@pytest.fixture(scope="module")
def many(built: Callable[..., Geometry], small_ball: Arrays) -> Geometry:
    """A ball with material numbers from 0 to the highest that there can be; several in a cluster."""
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


def test_material_depth_equals_that_of_a_materials_pixels_and_no_others(many: Geometry, device: str) -> None:
    """Exactly, up to the highest number; background is nearer than all."""
    world = Scene()
    world.add_instance(world.add_mesh(many))
    camera = Camera.look_at((3, 0, 1), (0, 0, 0), width=160, height=120)
    frame = Renderer(world, device).render(camera, NAMES)
    material, depth = frame["material"], frame["material_depth"]
    assert depth.dtype == torch.float32
    assert material.unique().tolist() == [-1, 0, 1, 2, 40_000, 65_534, 65_535]
    numbers = np.arange(1, 65_537)
    assert ((numbers / 65_536).astype(np.float32) * 65_536.0 == numbers).all()  # no two are the same float32
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
