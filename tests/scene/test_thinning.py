"""Many small parts cover the same area from far away as from near, and no part of the scene is missing."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Camera, Geometry, Renderer, Scene
from rooftop.scene.building.borders import Whole
from rooftop.scene.building.meshes import checked_mesh
from rooftop.scene.building.thinning import LooseParts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PIXELS = 2 / np.geomspace(60, 1.5, 6)  # the width of a ball of radius 1, in pixels
PIXELS_SEEN, SPACING = 10_000, 2.6


def parts(of: tuple[Floats, Ints], middles: Floats, sizes: Floats, seed: int = 0) -> tuple[Floats, Ints]:
    """The same small mesh at many places and random angles."""
    points, faces = of
    random = np.random.default_rng(seed)
    turns = np.linalg.qr(random.normal(size=(len(middles), 3, 3)))[0]
    placed = np.einsum("nij,vj->nvi", turns, points) * sizes[:, None, None] + middles[:, None]
    first = len(points) * np.arange(len(middles))[:, None, None]
    return placed.reshape(-1, 3), (faces + first).reshape(-1, 3)


def in_ball(count: int, seed: int = 1) -> Floats:
    random = np.random.default_rng(seed)
    middles = random.normal(size=(count, 3))
    return middles * (random.random(count) ** (1 / 3) / np.linalg.norm(middles, axis=1))[:, None]


SQUARE = np.array([[-0.5, -0.5, 0], [0.5, -0.5, 0], [0.5, 0.5, 0], [-0.5, 0.5, 0]]), np.array([[0, 1, 2], [0, 2, 3]])


def grass() -> tuple[Floats, Ints]:
    """Narrow upright blades on a disc."""
    random = np.random.default_rng(2)
    count = 3000
    foot = np.sqrt(random.random(count))[:, None] * np.stack(
        [np.cos(angle := random.uniform(0, 6.28, count)), np.sin(angle)], 1
    )
    way = random.normal(size=(count, 2))
    way *= 0.01 / np.linalg.norm(way, axis=1)[:, None]
    height = random.uniform(0.1, 0.2, count)
    corners = np.zeros((count, 3, 3))
    corners[:, 0, :2], corners[:, 1, :2], corners[:, 2, :2] = foot - way, foot + way, foot + 3 * way
    corners[:, 2, 2] = height
    return corners.reshape(-1, 3), np.arange(3 * count).reshape(-1, 3)


def berries() -> tuple[Floats, Ints]:
    ball = trimesh.creation.icosphere(1)
    middles = in_ball(400)
    return parts((np.array(ball.vertices), np.array(ball.faces)), middles, np.full(len(middles), 0.03))


def tree() -> tuple[Floats, Ints]:
    """A trunk in one piece, and leaves around its upper half."""
    trunk = trimesh.creation.cylinder(0.06, 1.2, sections=24).subdivide().subdivide()
    points, faces = parts(SQUARE, in_ball(5000) * 0.6 + (0, 0, 0.5), np.full(5000, 0.03))
    return np.concatenate([trunk.vertices, points]), np.concatenate([trunk.faces, faces + len(trunk.vertices)])


KINDS: dict[str, Callable[[], tuple[Floats, Ints]]] = {
    "dense leaves": lambda: parts(SQUARE, in_ball(8000), np.full(8000, 0.08)),
    "sparse leaves": lambda: parts(SQUARE, in_ball(3000), np.full(3000, 0.03)),
    "leaves of many sizes": lambda: parts(SQUARE, in_ball(4000), np.random.default_rng(3).uniform(0.01, 0.08, 4000)),
    "grass": grass,
    "berries": berries,
    "tree": tree,
}


def covered(geometry: Geometry, pixel: float, crowns: int, pixel_error: float = 1.0) -> float:
    """The area that each of many instances covers at random angles, side by side in a parallel view."""
    random = np.random.default_rng(0)
    side = math.isqrt(crowns)
    transforms = np.tile(np.eye(4), (side * side, 1, 1))
    transforms[:, :3, :3] = np.linalg.qr(random.normal(size=(len(transforms), 3, 3)))[0]  # the same instances first
    at = SPACING * (np.stack(np.divmod(np.arange(len(transforms)), side), 1) - (side - 1) / 2)
    transforms[:, :2, 3] = at + random.uniform(-0.5, 0.5, (len(transforms), 2)) * pixel
    drawn = Scene()
    drawn.add_instances(drawn.add_mesh(geometry), transforms)
    size = math.ceil(side * SPACING / pixel)
    camera = Camera.parallel((0, 0, 20), (0, 0, 0), (0, 1, 0), size * pixel, size, size)
    frame = Renderer(drawn, "cpu", pixel_error=pixel_error).render(camera, ("depth",))
    return float(torch.isfinite(frame["depth"]).sum()) * pixel**2 / len(transforms)


@pytest.mark.parametrize("kind", KINDS)
def test_from_far_as_much_is_covered_as_by_all_parts(kind: str, tmp_path: Path) -> None:
    report = scene.build(*KINDS[kind](), tmp_path / "parts.rtg")
    assert report.roots == 1
    errors = [level.error for level in report.levels]
    assert errors == sorted(errors)
    geometry = Geometry.open(tmp_path / "parts.rtg")
    whole = covered(geometry, PIXELS[0], 64, pixel_error=0.0)
    ratios = [
        covered(geometry, pixel, max(64, round(PIXELS_SEEN * pixel**2 / whole))) / whole for pixel in PIXELS.tolist()
    ]
    assert all(0.9 < ratio < 1.1 for ratio in ratios), " ".join(f"{ratio:.2f}" for ratio in ratios)


def test_parts_that_hide_nothing_keep_their_area_and_those_in_a_clump_lose_some(tmp_path: Path) -> None:
    apart = in_ball(600) * 10
    clumps = np.repeat(in_ball(60) * 10, 50, axis=0) + 0.04 * np.random.default_rng(6).normal(size=(3000, 3))
    shares = {}
    for name, middles in (("apart", apart), ("clumps", clumps)):
        points, faces = parts(SQUARE, middles, np.full(len(middles), 0.06))
        scene.build(points, faces, tmp_path / "parts.rtg")
        shares[name] = level_areas(Geometry.open(tmp_path / "parts.rtg"))[:, 0] / area(points[faces])
    assert (np.abs(shares["apart"] - 1) < 0.1).all(), shares
    assert shares["clumps"][-1] < 0.8, shares


def area(triangles: Floats) -> float:
    return float(trimesh.triangles.area(triangles).sum())


def drawn_clusters(geometry: Geometry, error: float) -> Ints:
    """The clusters drawn if this error is allowed everywhere."""
    heads, groups = geometry.clusters().view(np.float32), geometry.groups()
    owners = np.repeat(np.arange(len(groups)), groups.view(np.int32)[:, scene.layouts.GROUP_COUNT])
    replaced = groups.view(np.float32)[owners, scene.layouts.GROUP_ERROR] <= error
    return np.flatnonzero((heads[:, scene.layouts.CLUSTER_ERROR] <= error) & ~replaced)


def level_areas(geometry: Geometry, materials: int = 1) -> Floats:
    """(levels, materials): the area that is drawn if the error of each level is allowed everywhere."""
    rows = []
    for level in geometry.meta["levels"]:
        row = np.zeros(materials)
        for number in drawn_clusters(geometry, level["error"]).tolist():
            cluster = geometry.decode(number)
            sizes = trimesh.triangles.area(cluster.positions[cluster.triangles])
            row += np.bincount(cluster.materials, sizes, materials)
        rows.append(row)
    return np.array(rows)


def test_each_material_keeps_its_share(tmp_path: Path) -> None:
    points, faces = KINDS["sparse leaves"]()
    flower = np.random.default_rng(5).random(len(faces) // 2) < 0.1
    scene.build(points, faces, tmp_path / "parts.rtg", materials=np.repeat(flower, 2).astype(int))
    areas = level_areas(Geometry.open(tmp_path / "parts.rtg"), 2)
    assert (np.abs(areas / areas[0] - 1) < 0.15).all(), areas / areas[0]


def test_a_speck_beside_a_large_part_stays_until_the_error_is_as_large(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(5)
    speck = ball.vertices[ball.faces[0]] * 0.3 + (3, 0, 0)
    points = np.concatenate([ball.vertices, speck])
    faces = np.concatenate([ball.faces, len(ball.vertices) + np.arange(3)[None]])
    assert scene.build(points, faces, tmp_path / "parts.rtg").roots == 1
    geometry = Geometry.open(tmp_path / "parts.rtg")
    size = np.ptp(speck, axis=0).max()
    shown = []
    for level in geometry.meta["levels"]:
        far = max(geometry.decode(n).positions[:, 0].max() for n in drawn_clusters(geometry, level["error"]).tolist())
        shown.append(far > 2)
        assert shown[-1] or level["error"] > size / 2
    assert sum(shown) >= 3


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_parts_come_to_one_cluster_within_the_box_of_the_mesh(tmp_path: Path, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.sampled_from([2, 3, 65, 600]))
    flat = np.array(data.draw(st.sampled_from([(1.0, 1, 1), (1, 1, 0), (1, 0.01, 0.01)])))
    kinds = [SQUARE, (np.array(trimesh.creation.box().vertices), np.array(trimesh.creation.box().faces))]
    chosen = data.draw(st.sampled_from([0, 1]))
    sizes = 10.0 ** random.uniform(data.draw(st.sampled_from([-3, -1.5])), -1, count)
    points, faces = parts(kinds[chosen], random.uniform(-1, 1, (count, 3)) * flat, sizes, count)
    narrow = random.random(count) < data.draw(st.sampled_from([0.0, 0.5]))
    each = points.reshape(count, -1, 3)
    each[narrow] = each[narrow].mean(1, keepdims=True) + (each[narrow] - each[narrow].mean(1, keepdims=True)) * (
        1, 1, 1e-3,
    )  # fmt: skip
    materials = random.integers(0, data.draw(st.sampled_from([1, 3, 200])), count)
    of_faces = np.repeat(materials, len(faces) // count)
    report = scene.build(points, faces, tmp_path / "parts.rtg", materials=of_faces)
    assert report.roots == 1
    geometry = Geometry.open(tmp_path / "parts.rtg")
    low, high = (np.array(each) + geometry.meta["origin"] for each in geometry.meta["bounds"])
    step = report.precision
    assert (low >= points.min(0) - step).all()
    assert (high <= points.max(0) + step).all()
    for number in range(geometry.meta["clusters"]):
        positions = geometry.decode(number).positions
        assert (positions >= low).all()
        assert (positions <= high).all()


def test_a_build_takes_no_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build must not import scipy, which takes a third of a second and enlarges the forked processes."""
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    assert scene.build(*SQUARE, tmp_path / "parts.rtg").triangles == 2


def test_half_a_part_too_many_still_comes_to_one_cluster(tmp_path: Path) -> None:
    """65 squares in two clusters: 114 triangles (with 230 vertices) remain, one triangle more than the target."""
    random = np.random.default_rng(4)
    sizes = 10.0 ** random.uniform(-3, -1, 65)
    points, faces = parts(SQUARE, random.uniform(-1, 1, (65, 3)), sizes, 65)
    random.random(65)
    materials = np.repeat(random.integers(0, 3, 65), 2)
    assert scene.build(points, faces, tmp_path / "parts.rtg", materials=materials).roots == 1


@pytest.mark.parametrize("count", [25, 30, 300])
def test_small_bodies_whose_faces_share_no_vertices_come_to_one_cluster(count: int, tmp_path: Path) -> None:
    """120 triangles of 360 vertices need two clusters, although one could hold that many triangles."""
    random = np.random.default_rng(0)
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]])[[[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]]
    points = (random.random((count, 1, 1, 3)) + corners * 0.02).reshape(-1, 3)
    normals = np.repeat(random.normal(size=(4 * count, 3)), 3, axis=0)
    report = scene.build(points, np.arange(len(points)).reshape(-1, 3), tmp_path / "parts.rtg", normals)
    assert report.roots == 1


def test_pictures_of_needles_have_few_samples(tmp_path: Path) -> None:
    """A box around a slanting needle is as wide as it is long. A number of samples in proportion to the box's area
    would be millions."""
    random = np.random.default_rng(0)
    foot, way, side = (
        random.random((300, 3)) * 0.1,
        1 + random.normal(size=(300, 3)) * 0.05,
        random.normal(size=(300, 3)),
    )
    points = np.stack([foot, foot + way, foot + 0.002 * side], 1).reshape(-1, 3)
    corners = np.arange(900, dtype=np.uint32).reshape(-1, 3)
    mesh = checked_mesh(points, corners)
    vertices = dataclasses.replace(mesh.vertices, parts=Whole.of_faces(mesh.vertices, mesh.faces).parts)
    loose = LooseParts(vertices, mesh.faces, np.zeros(len(points), bool))
    assert len(loose) > 200
    assert loose._side < 100
