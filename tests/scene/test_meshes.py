"""A mesh is refused, or repaired with a report. The repaired mesh is on its grid and has every vertex once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.errors import InputError
from rooftop.scene import Geometry
from rooftop.scene.building.borders import Whole
from rooftop.scene.building.meshes import Mesh, checked_mesh
from rooftop.scene.building.normals import from_octahedral, smooth_normals

BALL = trimesh.creation.icosphere(3)
POINTS, FACES = np.array(BALL.vertices), np.array(BALL.faces)


def with_one(values: NDArray[Any], at: Any, value: Any) -> NDArray[Any]:
    changed = values.copy()
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((POINTS, FACES[:0]), ValueError, "but no faces"),
        ((POINTS[:0], []), ValueError, "but no faces"),
        ((POINTS, with_one(FACES, (7, 1), 642)), ValueError, r"face 7 is \[.*642.*but the mesh has 642 vertices"),
        ((POINTS, with_one(FACES, (9, 2), -1)), ValueError, "face 9"),
        ((with_one(POINTS, 5, np.nan), FACES), ValueError, "vertex 5 is not finite"),
        ((with_one(POINTS, [5, 8], np.inf), FACES), ValueError, "vertex 5 is not finite .*; others like it: 1"),
        ((POINTS, FACES, with_one(POINTS, 3, np.nan)), ValueError, "normal 3"),
        ((POINTS, FACES, None, with_one(POINTS[:, :2], 3, np.inf)), ValueError, "uv 3"),
        ((POINTS, FACES, "rough"), ValueError, "rough"),
        ((POINTS[:, :2], FACES), ValueError, r"\(V, 3\).*\(642, 2\)"),
        ((POINTS, FACES.ravel()), ValueError, r"\(F, 3\)"),
        ((POINTS, FACES, POINTS[:-1]), ValueError, r"\(642, 3\)"),
        ((POINTS, FACES, None, None, [1, 2]), ValueError, r"\(1,280,\)"),
        ((POINTS, FACES, None, None, np.full(len(FACES), 65536)), ValueError, "65535"),
        ((POINTS, FACES.astype(float)), TypeError, "integers, not float64"),
        ((POINTS.astype(str), FACES), TypeError, "numbers"),
        ((POINTS * 0 + 3, FACES), ValueError, "same place"),
        ((np.repeat(np.eye(3), 3, axis=0), np.arange(9).reshape(3, 3)), ValueError, "3 faces has an area"),
        ((POINTS, np.array([[1, 1, 2], [3, 4, 3]])), ValueError, "2 faces has an area"),
        ((POINTS * 1e30, FACES), ValueError, "float32"),
        ((POINTS * 1e-30, FACES), ValueError, "scale it"),
        ((POINTS, FACES, None, None, None, 1e-9), ValueError, "precision 1e-09 is too fine"),
        ((POINTS, FACES, None, None, None, 5.0), ValueError, "exceeds the length of the whole mesh"),
        ((POINTS, FACES, None, None, None, 0.0), ValueError, "precision"),
    ],
)
def test_what_cannot_be_built_is_refused_and_the_message_says_why(
    arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        checked_mesh(*arguments)


def test_repairs_are_counted() -> None:
    points = np.concatenate([POINTS, POINTS[:3], [[np.nan] * 3, [9, 9, 9]]])  # three copies, and two unused vertices
    faces = with_one(FACES, (0, FACES[0].argmin()), FACES[0].min())
    copied = np.where(faces < 3, faces + 642, faces)
    faces = np.concatenate([faces[:640], copied[640:], faces[:2], faces[5:6, [1, 2, 0]], [[4, 4, 5], [0, 642, 7]]])
    mesh = checked_mesh(points, faces)
    used = int(np.isin([642, 643, 644], faces).sum())
    assert mesh.repairs.duplicate_faces == 3
    assert mesh.repairs.degenerate_faces == 2  # the second such face has two corners at the same place
    assert mesh.repairs.unused_vertices == 2 + 3 - used
    assert mesh.repairs.equal_vertices >= 1
    assert len(mesh.faces) == 1280
    assert len(mesh.vertices.grid) == 642


def non_manifold_edges(mesh: Mesh) -> int:
    return Whole.of_faces(mesh.vertices, mesh.faces).non_manifold_edges


def test_edges_that_more_than_two_faces_share_are_kept_and_counted(tmp_path: Path) -> None:
    fin = np.concatenate([FACES, [[FACES[0, 0], FACES[0, 1], 642]]])
    points = np.concatenate([POINTS, [[2, 2, 2]]])
    assert non_manifold_edges(checked_mesh(points, fin)) == 1
    assert non_manifold_edges(checked_mesh(POINTS, FACES)) == 0
    assert non_manifold_edges(checked_mesh(POINTS, np.concatenate([FACES, FACES[:, ::-1]]))) == 1920  # every edge
    report = scene.build(points, fin, tmp_path / "mesh.rtg")
    assert report.triangles == 1281
    assert report.repairs.non_manifold_edges == 1


def test_both_sides_of_a_face_are_two_faces() -> None:
    mesh = checked_mesh(POINTS, np.concatenate([FACES, FACES[:, ::-1]]))
    assert len(mesh.faces) == 2560
    assert mesh.repairs.duplicate_faces == 0


@pytest.mark.parametrize("offset", [0.0, 1e5, -3e9])
def test_positions_are_within_half_a_step_wherever_the_mesh_is(offset: float) -> None:
    points = POINTS * [1, 2, 0.5] + offset
    mesh = checked_mesh(points, FACES)
    step = 2.0**mesh.vertices.exponent
    assert mesh.vertices.grid.dtype == np.int32
    assert (mesh.origin / step == np.rint(mesh.origin / step)).all()
    back = mesh.vertices.grid[mesh.faces] * step + mesh.origin
    assert np.abs(back - points[FACES]).max() <= step / 2 + 2e-16 * abs(offset) * 4
    assert step <= 4 / 2**14


def test_the_step_is_at_most_the_precision_asked_for() -> None:
    for precision in (1e-5, 0.001, 0.25):
        step = 2.0 ** checked_mesh(POINTS, FACES, precision=precision).vertices.exponent
        assert precision / 2 < step <= precision


def test_a_mesh_too_large_for_its_edges_gets_a_coarser_grid_and_says_so() -> None:
    far = np.concatenate([POINTS, POINTS[FACES[0]] + 2e5])
    mesh = checked_mesh(far, np.concatenate([FACES, [[642, 643, 644]]]))
    assert mesh.repairs.coarser_grid
    assert mesh.vertices.grid.max() <= 1 << 24
    assert not checked_mesh(POINTS, FACES).repairs.coarser_grid


def test_materials_split_vertices_and_stay_with_their_faces() -> None:
    materials = np.arange(len(FACES)) % 3 * 1000
    mesh = checked_mesh(POINTS, FACES, materials=materials)
    assert mesh.vertices.materials is not None
    owners = mesh.vertices.materials[mesh.faces]
    assert (owners == owners[:, :1]).all()
    assert sorted(owners[:, 0].tolist()) == sorted(materials.tolist())
    assert len(np.unique(mesh.vertices.place)) == 642
    assert checked_mesh(POINTS, FACES, materials=np.zeros(len(FACES), int)).vertices.materials is None


def test_places_with_several_vertices_have_one_that_stands_for_them() -> None:
    corners = POINTS[FACES]
    normals = np.repeat(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), 3, axis=0)
    vertices = checked_mesh(corners.reshape(-1, 3), np.arange(3840).reshape(-1, 3), normals).vertices
    assert len(vertices.grid) == 3840 + 642
    assert (vertices.place[vertices.merged] == vertices.place).all()
    assert len(np.unique(vertices.merged)) == 642
    assert vertices.normals is not None
    mean = from_octahedral(vertices.normals[vertices.merged])
    assert (mean * POINTS[FACES].reshape(-1, 3)[:1]).sum(1).max() > 0.99
    outward = vertices.grid / np.linalg.norm(vertices.grid, axis=1, keepdims=True)
    assert (mean * outward).sum(1).min() > 0.99


def test_smooth_normals_of_a_sphere_point_outwards_and_seams_share_them() -> None:
    normals = smooth_normals(POINTS, FACES)
    assert np.abs(normals - POINTS).max() < 0.01
    loose = smooth_normals(POINTS[FACES].reshape(-1, 3), np.arange(3840).reshape(-1, 3))
    assert np.abs(loose - normals[FACES].reshape(-1, 3)).max() < 1e-12


def test_smooth_normals_weigh_angles_not_triangles() -> None:
    """At a cube's corner, each of the three sides has the same weight, however it is divided into triangles."""
    box = trimesh.creation.box()
    normals = smooth_normals(np.array(box.vertices), np.array(box.faces))
    assert np.allclose(np.abs(normals), 3**-0.5)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_scene_of_several_parts_is_put_together_at_their_places(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(3)
    placed = trimesh.Scene()
    placed.add_geometry(ball, geom_name="ball")
    mirrored = np.diag([2.0, 2.0, -2.0, 1.0])
    mirrored[:3, 3] = [7, 0, 0]
    placed.add_geometry(trimesh.creation.box(), transform=mirrored, geom_name="box")
    placed.add_geometry(ball, transform=trimesh.transformations.translation_matrix([0, 9, 0]), geom_name="ball again")
    placed.export(tmp_path / "scene.glb", include_normals=False)
    report = scene.build_file(tmp_path / "scene.glb")
    assert report.path == tmp_path / "scene.rtg"
    assert report.triangles == 2 * 1280 + 12
    geometry = Geometry.open(report.path)
    assert geometry.meta["materials"] == 3
    box = [[], []]
    for number in range(geometry.meta["clusters"]):
        if geometry.clusters()[number, 12] >> 24 == 0:
            cluster = geometry.decode(number)
            corners = cluster.positions[cluster.triangles]
            own = np.abs(corners[:, :, 0] - 7).max(1) <= 1.01
            across = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
            box[0] += corners[own].tolist()
            box[1] += (np.einsum("ij,ij->i", across[own], corners[own].mean(1) - [7, 0, 0]) > 0).tolist()
    assert len(box[0]) == 12
    assert all(box[1])  # although mirrored, it shows its outside
    assert np.abs(np.abs(np.array(box[0]) - [7, 0, 0]) - 1).max() < 1e-3


@pytest.mark.parametrize("suffix", ["glb", "obj", "ply", "stl", "off"])
def test_files_of_several_kinds_give_the_same_triangles(tmp_path: Path, suffix: str) -> None:
    BALL.export(tmp_path / f"ball.{suffix}")
    report = scene.build_file(tmp_path / f"ball.{suffix}", tmp_path / "ball.rtg", normals="smooth")
    assert report.triangles == 1280
    geometry = Geometry.open(tmp_path / "ball.rtg")
    assert geometry.meta["has_normals"]
    for number in range(geometry.meta["clusters"]):
        cluster = geometry.decode(number)
        assert cluster.normals is not None
        assert np.abs(cluster.normals - cluster.positions).max() < 0.02


def test_normals_and_uv_of_a_file_are_kept(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(3)
    ball.visual = trimesh.visual.TextureVisuals(uv=ball.vertices[:, :2])
    assert ball.vertex_normals.shape == (642, 3)
    ball.export(tmp_path / "ball.obj", include_normals=True)
    scene.build_file(tmp_path / "ball.obj")
    geometry = Geometry.open(tmp_path / "ball.rtg")
    assert geometry.meta["has_normals"]
    cluster = geometry.decode(0)
    assert cluster.uv is not None
    assert np.abs(cluster.uv - cluster.positions[:, :2]).max() < 2e-3
    scene.build_file(tmp_path / "ball.obj", normals="flat")
    assert not Geometry.open(tmp_path / "ball.rtg").meta["has_normals"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("notes.txt", b"hello", "not in a supported format"),
        ("bad.ply", b"ply\nxx", "cannot be read"),
        ("points.xyz", b"1 2 3\n4 5 6\n7 8 9\n", "no triangles"),
    ],
)
def test_files_that_are_no_meshes_are_refused(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=match):
        scene.build_file(tmp_path / name, tmp_path / "out.rtg")
    assert not (tmp_path / "out.rtg").exists()


def test_the_mesh_is_not_replaced_by_what_is_built_from_it(tmp_path: Path) -> None:
    BALL.export(tmp_path / "ball.stl")
    before = (tmp_path / "ball.stl").read_bytes()
    (tmp_path / "link.rtg").symlink_to(tmp_path / "ball.stl")
    for output in ("ball.stl", "link.rtg"):
        with pytest.raises(InputError, match="would overwrite the mesh"):
            scene.build_file(tmp_path / "ball.stl", tmp_path / output)
    with pytest.raises(FileNotFoundError, match="no folder"):
        scene.build_file(tmp_path / "ball.stl", tmp_path / "none" / "ball.rtg")
    assert (tmp_path / "ball.stl").read_bytes() == before


def terrain_and_ball(radius: float) -> tuple[np.ndarray, np.ndarray]:
    """3 km of terrain in faces of 30 m, and a ball of 1,280 faces above it."""
    side = np.linspace(0, 3000, 101)
    x, y = np.meshgrid(side, side)
    ground = np.stack([x, y, 30 * np.sin(x / 200) * np.cos(y / 170)], -1).reshape(-1, 3)
    number = np.arange(len(ground)).reshape(x.shape)
    corners = [number[:-1, :-1], number[:-1, 1:], number[1:, 1:], number[1:, :-1]]
    faces = np.concatenate([np.stack([corners[0], b, c], -1).reshape(-1, 3) for b, c in (corners[1:3], corners[2:])])
    ball = trimesh.creation.icosphere(3, radius)
    points = np.concatenate([ground, np.add(ball.vertices, [1500, 1500, 40])])
    return points, np.concatenate([faces, ball.faces + len(ground)])


def test_a_small_part_of_a_large_mesh_keeps_its_faces() -> None:
    points, faces = terrain_and_ball(0.1)
    mesh = checked_mesh(points, faces)
    assert len(mesh.faces) == len(faces)
    assert (mesh.repairs.small_faces, mesh.repairs.degenerate_faces) == (0, 0)
    step = 2.0**mesh.vertices.exponent
    ball = (mesh.vertices.grid * step + mesh.origin)[mesh.vertices.grid[:, 2] * step + mesh.origin[2] > 39.8]
    away = np.linalg.norm(ball - [1500, 1500, 40], axis=1)
    np.testing.assert_allclose(away[away < 0.2], 0.1, atol=step)
    alone = checked_mesh(points[:10201], faces[:20000])
    assert alone.vertices.exponent > mesh.vertices.exponent  # the ball needs a less fine grid


def test_what_a_given_grid_swallows_is_named_as_small() -> None:
    points, faces = terrain_and_ball(0.1)
    repairs = checked_mesh(points, faces, precision=0.1).repairs
    assert repairs.small_faces > 1000
    assert repairs.degenerate_faces == 0


def test_what_no_grid_keeps_makes_it_no_finer() -> None:
    points, faces = terrain_and_ball(1e-5)
    mesh, alone = checked_mesh(points, faces), checked_mesh(points[:10201], faces[:20000])
    assert (mesh.repairs.small_faces, mesh.vertices.exponent) == (1280, alone.vertices.exponent)


def test_needles_and_points_have_no_area() -> None:
    points, faces = terrain_and_ball(10.0)
    needle = np.array([[0, 0, 50], [500, 0, 50], [500, 1e-7, 50]], float)
    points, count = np.concatenate([points, needle]), len(points)
    faces = np.concatenate([faces, [[count, count + 1, count + 2], [5, 5, 6], [count, count, count]]])
    mesh = checked_mesh(points, faces)
    assert (mesh.repairs.degenerate_faces, mesh.repairs.small_faces) == (3, 0)
