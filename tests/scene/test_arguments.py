"""Arguments of scenes: wrong ones are refused, with the given value and the expectation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rooftop.errors import InputError
from rooftop.scene import (
    Camera,
    DirectionalLight,
    Geometry,
    Material,
    PointLight,
    Renderer,
    Scene,
    SpotLight,
    build,
    build_file,
)
from rooftop.scene.arguments import short

AHEAD = Camera.look_at((0, 0, 0.5), (5, 0, 0), width=40, height=30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DirectionalLight((1, 0, -1), cascades=2.0), "cascades=2.0: expected an integer from 1 to 8"),  # type: ignore[arg-type]
        (lambda: DirectionalLight((1, 0, -1), cascades=np.True_), "cascades="),  # type: ignore[arg-type]
        (lambda: DirectionalLight((1, 0, -1), cascades=np.array([1, 2])), "cascades=ndarray of shape"),  # type: ignore[arg-type]
        (lambda: PointLight((0, 0, 0), range=1e-30), "range=1e-30: expected a number from 1e-27"),
        (lambda: SpotLight((0, 0, 0), (0, 0, 1), range=1e-28), "range=1e-28: expected a number from 1e-27"),
        (lambda: Material(("1", "0", "0")), "color=.*expected red, green and blue"),  # type: ignore[arg-type]
        (lambda: Material([10**400] * 3), "color=.*expected red, green and blue"),
        (lambda: Material(wrap=5), "wrap=5: expected one of repeat, clamp, mirror"),  # type: ignore[arg-type]
        (lambda: Material(texture=np.zeros((0, 0, 3), np.uint8)), "the texture is 0 x 0: it has no texels"),
        (lambda: Renderer(Scene(), "cpu", pixel_error=10**400), "pixel_error=1000.*expected a number of pixels"),
        (lambda: Renderer(Scene(), "cpu").render_each([], outputs="depth"), "outputs='depth': expected a list"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, InputError), match=words):
        make()


def test_meshes_and_lights_are_named_by_whole_numbers(cube: Geometry) -> None:
    scene = Scene()
    scene.add_mesh(cube)
    scene.add_light(PointLight((0, 0, 3)))
    for wrong in (torch.tensor(0.5), np.array(0.7), 0.0, True, -1, 1, "0"):
        with pytest.raises(ValueError, match=r"mesh=.*expected a number that add_mesh returned, from 0 to 0"):
            scene.add_instance(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"light=.*expected a number that add_light returned, from 0 to 0"):
            scene.set_light(wrong, PointLight((0, 0, 3)))  # type: ignore[arg-type]
    assert scene.add_instance(np.int64(0)) == 0
    assert scene.add_instance(torch.tensor(0), torch.eye(4, requires_grad=True)) == 1  # type: ignore[arg-type]
    for turned in (torch.eye(4).bfloat16(), torch._neg_view(-torch.eye(4))):
        added = scene.add_instance(0, turned)  # type: ignore[arg-type]
        assert np.array_equal(scene.instances()[1][added], np.eye(4))
    with pytest.raises(ValueError, match="expected"):
        scene.add_instance(0, [["1", "0", "0", "0"]] * 4)


def test_messages_are_short(cube: Geometry) -> None:
    scene = Scene()
    scene.add_mesh(cube)
    for wrong in (
        lambda: scene.remove_all([0.0] * 100_000),  # type: ignore[list-item]
        lambda: scene.add_instances(0, [[[1.0]], *[[[1.0] * 4] * 4] * 10_000]),
        lambda: Material(texture=b"0" * 100_000),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            wrong()
        assert len(str(raised.value)) < 400
    assert short(np.zeros((3, 4))) == "ndarray of shape (3, 4)"
    assert short(2.5) == "2.5"


def test_texels_are_the_caller_s_own() -> None:
    for given in (np.zeros((2, 2, 3), np.uint8), torch.zeros(2, 2, 3, dtype=torch.uint8), np.zeros((2, 2), np.uint8)):
        texture = Material(texture=given).texture
        given[:] = 255
        assert texture is not None
        assert not texture.texels().any()
    half = Material(texture=torch.full((2, 2, 3), 0.5, dtype=torch.bfloat16)).texture
    assert half is not None
    assert (half.texels() == 128).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(cube: Geometry, device: str, dtype: torch.dtype) -> None:
    scene = Scene()
    scene.add_instance(scene.add_mesh(cube), np.diag([1, 1, 1, 1.0]) + np.eye(4)[:, [3]] @ [[0, 0, 0, 0]])
    scene.add_light(DirectionalLight((1, 0, -1), size=32, cascades=1))
    outputs = ("depth", "color", "normal", "shadow", "overdraw")
    expected = Renderer(scene, device).render(AHEAD, outputs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        streamed = Renderer(scene, device, pool_bytes=1 << 20)
        streamed.prefetch([AHEAD, Camera.look_at((0, 0, 0.5), (5, 0, 0), width=30, height=30)])
        for renderer in (Renderer(scene, device), streamed):
            frame = renderer.render(AHEAD, outputs)
            assert all(torch.equal(frame[name].nan_to_num(-7), expected[name].nan_to_num(-7)) for name in outputs)
    finally:
        torch.set_default_dtype(before)


def test_a_folder_is_no_geometry_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder: expected the name of a file"):
        build(np.eye(3), [[0, 1, 2]], tmp_path)


def test_a_pipe_is_refused_before_the_mesh_is_read(tmp_path: Path) -> None:
    """A file that is renamed onto a device or a pipe would replace it."""
    (tmp_path / "mesh.ply").write_text("this is no mesh")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a device or a pipe: expected the name of a file"):
        build_file(tmp_path / "mesh.ply", tmp_path / "pipe")
    assert not (tmp_path / "pipe").is_file()


def test_a_link_into_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link.rtg").symlink_to(tmp_path / "none" / "mesh.rtg")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none to write mesh\.rtg into"):
        build(np.eye(3), [[0, 1, 2]], tmp_path / "link.rtg")


@pytest.mark.parametrize("more", [{"normals": "round"}, {"normals": np.eye(3)}, {"workers": 0}])
def test_options_are_checked_before_the_mesh_is_read(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "mesh.ply").write_text("this is no mesh")
    with pytest.raises(ValueError, match=f"{next(iter(more))}=.*: expected"):
        build_file(tmp_path / "mesh.ply", **more)


def test_tensors_are_built_like_arrays(tmp_path: Path) -> None:
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0.5]])
    faces, ids = np.array([[0, 1, 2], [2, 1, 3]]), np.array([1, 0])
    table = [Material(), Material((1, 0, 0))]
    build(points, faces, tmp_path / "a.rtg", materials=ids, colors=points, material_table=table, workers=1)
    tensors = [torch.tensor(each) for each in (points, faces, ids)]
    half = tensors[0].bfloat16().requires_grad_()
    build(half, tensors[1], tmp_path / "b.rtg", materials=tensors[2], colors=half, material_table=table, workers=1)  # type: ignore[arg-type]
    assert (tmp_path / "a.rtg").read_bytes() == (tmp_path / "b.rtg").read_bytes()


@pytest.mark.filterwarnings("error")
def test_attributes_of_unused_vertices_may_be_anything(tmp_path: Path) -> None:
    points = np.vstack([np.eye(3), [[np.nan] * 3]])
    report = build(points, [[0, 1, 2]], tmp_path / "a.rtg", points, points[:, :2], colors=points, workers=1)
    assert report.repairs.unused_vertices == 1


def test_a_link_to_a_geometry_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.rtg").symlink_to(tmp_path / "mesh.rtg")
    build(np.eye(3), [[0, 1, 2]], tmp_path / "link.rtg", workers=1)
    assert (tmp_path / "link.rtg").is_symlink()
    assert (tmp_path / "mesh.rtg").is_file()
