"""Files of earlier versions are still read and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from rooftop import scene
from rooftop.scene import Camera, Geometry, Renderer, Scene, layouts
from rooftop.scene.gbuffers import OUTPUTS

SIZE = {"width": 80, "height": 60}
NAMES = tuple(OUTPUTS)


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    """A file in the current version: a ball and far smaller ones around it, with every kind of data."""
    points, faces = [], []
    for k, (size, radius, away) in enumerate([(4, 1.0, 0.0), *((1, 0.05, 1.3 + 0.02 * k) for k in range(40))]):
        ball = trimesh.creation.icosphere(size)
        direction = np.array([np.cos(k), np.sin(k), np.sin(3 * k)])
        faces.append(ball.faces + sum(map(len, points)))
        points.append(ball.vertices * radius + away * direction / np.linalg.norm(direction))
    vertices, triangles = np.concatenate(points), np.concatenate(faces)
    path = tmp_path_factory.mktemp("versions") / "today.rtg"
    colors = (vertices - vertices.min(0)) / np.ptp(vertices, axis=0)
    materials = (vertices[triangles].mean(1)[:, 0] > 0.2) * 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "PAGE_BYTES", 64 << 10)  # pages of old layouts are longer
        scene.build(vertices, triangles, path, "smooth", vertices[:, :2] * 3, materials, colors=colors)
    found = Geometry.open(path)
    assert found.pages > 2
    kinds = found.clusters()[:, layouts.CLUSTER_MASKS]
    assert set(kinds.tolist()) == {layouts.FANS, layouts.FANS_AND_EXPLICIT}
    words = [int(found.page(page)[layouts.PAGE_GROUPS]) for page in range(found.pages)]
    assert len({word & layouts.PAGE_REPLACES for word in words}) == 2  # pages of both kinds
    return found


def test_a_file_of_version_3_is_what_it_was_built_of(old_file: Geometry) -> None:
    """The place of a vertex determines its texture coordinates and its colour."""
    assert old_file.version == 3
    ball = trimesh.creation.icosphere(3)
    radii = 1 + 0.05 * np.random.default_rng(3).normal(size=len(ball.vertices))
    points = ball.vertices * radii[:, None]
    low, high = points.min(0), points.max(0)
    step, uv_step = (2.0 ** old_file.meta[name] for name in ("grid_exponent", "uv_exponent"))
    levels = old_file.clusters()[:, layouts.CLUSTER_COUNTS] >> 24
    assert levels.tolist().count(0) == 8
    triangles = 0
    for number in np.flatnonzero(levels == 0).tolist():
        cluster = old_file.decode(number)
        assert cluster.normals is not None
        assert cluster.uv is not None
        assert cluster.colors is not None
        x, y, z = cluster.positions.T
        u = np.arctan2(y, x) / 6.2832 + 0.5
        close = 4 * step + uv_step
        assert np.abs(np.remainder(cluster.uv[:, 0] - u + 0.5, 1) - 0.5)[np.hypot(x, y) > 0.3].max() <= close
        assert np.abs(cluster.uv[:, 1] - (z / 2 + 0.5)).max() <= close
        assert np.abs(cluster.colors - (cluster.positions - low) / (high - low)).max() <= 0.5 / 255 + step
        assert (cluster.normals * cluster.positions).sum(1).min() > 0.5
        middles = cluster.positions[cluster.triangles].mean(1)
        clear = np.abs(middles[:, 0] - 0.2) > step
        assert (cluster.materials == (middles[:, 0] > 0.2) * 7)[clear].all()
        triangles += len(cluster.triangles)
    assert triangles == 900


def test_the_old_layout_of_the_tests_is_what_version_3_wrote(
    old_file: Geometry, in_old_layout: Callable[..., Geometry], tmp_path: Path
) -> None:
    again = in_old_layout(old_file, tmp_path / "again.rtg")
    assert again.pages == old_file.pages
    for page in range(old_file.pages):
        assert (again.page(page) == old_file.page(page)).all()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_cluster_is_the_same_in_the_old_layout(
    today: Geometry, in_old_layout: Callable[..., Geometry], tmp_path: Path, version: int
) -> None:
    old = in_old_layout(today, tmp_path / "old.rtg", version)
    assert old.version == version
    assert old.size_bytes > 1.05 * today.size_bytes
    for number in range(today.meta["clusters"]):
        ours, theirs = today.decode(number), old.decode(number)
        for name in ("grid", "positions", "triangles", "normals", "uv", "colors", "materials"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))


def pictures_are_the_same(a: Geometry, b: Geometry, device: str, kernels: str) -> None:
    for pixel_error in (0.5, 4.0):
        renderers = []
        for mesh in (a, b):
            world = Scene()
            number = world.add_mesh(mesh)
            for shift in (0.0, 4.0):
                place = np.eye(4)
                place[0, 3] = shift
                world.add_instance(number, place)
            renderers.append(Renderer(world, device, pixel_error=pixel_error, kernels=kernels))
        for eye in [(-3, 0, 1), (-2.5, 0.4, 0.2), (-40, 0, 3), (0, 0.2, 1.2)]:
            camera = Camera.look_at(eye, (0, 0, 0), **SIZE)
            ours, theirs = (renderer.render(camera, NAMES) for renderer in renderers)
            assert ours["depth"].isfinite().any()
            for name in NAMES:
                assert torch.equal(ours[name].nan_to_num(-7.0), theirs[name].nan_to_num(-7.0)), name
            assert ours.stats.triangles == theirs.stats.triangles


def test_pictures_of_both_layouts_are_the_same(
    today: Geometry, in_old_layout: Callable[..., Geometry], tmp_path: Path, device: str
) -> None:
    pictures_are_the_same(today, in_old_layout(today, tmp_path / "old.rtg"), device, "warp")


def test_pictures_of_both_layouts_are_the_same_in_cuda_cpp(
    today: Geometry, in_old_layout: Callable[..., Geometry], tmp_path: Path, cuda_on_cpu: Counter[str]
) -> None:
    pictures_are_the_same(today, in_old_layout(today, tmp_path / "old.rtg"), "cpu", "cuda")
    assert cuda_on_cpu["rasterize_clusters"] >= 16
    assert cuda_on_cpu["persistent_cull"] >= 16


def test_a_file_of_version_3_is_drawn(old_file: Geometry, device: str) -> None:
    """Each pixel has the colour of the point that it shows."""
    world = Scene()
    world.add_instance(world.add_mesh(old_file))
    camera = Camera.look_at((0.2, 0.1, 3), (0, 0, 0), (0, 1, 0), **SIZE)
    frame = Renderer(world, device, pixel_error=0.0).render(camera, ("depth", "vertex_color", "normal"))
    seen = frame["depth"][0].isfinite()
    assert seen.sum() > 200
    colors = frame["vertex_color"][0][seen]
    assert (colors >= 0).all()
    assert (colors <= 1).all()
    assert colors.std(0).min() > 0.1
    assert torch.allclose(frame["normal"][0][seen].norm(dim=-1), colors.new_ones(()), atol=1e-5)
