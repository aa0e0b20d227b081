"""Laws of every built geometry: exactly one level everywhere, no cracks, and errors that hold.

A renderer draws a cluster if the cluster's error is small enough and its group's is not. The set of drawn clusters is a
cut. The tests make cuts by thresholds and by cameras, and examine every triangle of each cut.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
import warp as wp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Geometry, layouts
from rooftop.scene.building import grouping, levels, normals, orders, welding
from rooftop.scene.building import workers as worker_pool
from rooftop.scene.geometry import DecodedCluster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GROWTH = 1 + 2**-10
INNER = layouts.INNER


def ball(subdivisions: int, noise: float = 0.0) -> tuple[Floats, Ints]:
    sphere = trimesh.creation.icosphere(subdivisions)
    radii = 1 + noise * np.random.default_rng(subdivisions).normal(size=len(sphere.vertices))
    return sphere.vertices * radii[:, None], sphere.faces


def ring(long: int, short: int) -> tuple[Floats, Ints, Floats]:
    """A closed torus with texture coordinates (u, v) in [0, 1] and a seam in each direction."""
    u, v = np.meshgrid(np.linspace(0, 1, long + 1), np.linspace(0, 1, short + 1), indexing="ij")
    around, about = 2 * np.pi * (u % 1), 2 * np.pi * (v % 1)
    radius = 1 + 0.3 * np.cos(about)
    points = np.stack([radius * np.cos(around), radius * np.sin(around), 0.3 * np.sin(about)], -1)
    corner = (np.arange(long)[:, None] * (short + 1) + np.arange(short)).ravel()
    right, above = corner + short + 1, corner + 1
    faces = np.stack([corner, right, above, above, right, right + 1], 1).reshape(-1, 3)
    return points.reshape(-1, 3), faces, np.stack([u, v], -1).reshape(-1, 2)


def two_balls() -> tuple[Floats, Ints]:
    points, faces = ball(4)
    return np.concatenate([points, points * 0.3 + [20, 0, 0]]), np.concatenate([faces, faces + len(points)])


def _ring_with_uv() -> tuple[Floats, Ints, dict[str, Any]]:
    points, faces, uv = ring(96, 48)
    return points, faces, {"uv": uv, "normals": "smooth"}


def _two_materials() -> tuple[Floats, Ints, dict[str, Any]]:
    points, faces = ball(5)
    return points, faces, {"materials": (points[faces].mean(1)[:, 0] > 0.2) * 7}


def _own_normals() -> tuple[Floats, Ints, dict[str, Any]]:
    """Every face has separate vertices, each with the face's normal."""
    points, faces = ball(5)
    corners = points[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    return corners.reshape(-1, 3), np.arange(3 * len(faces)).reshape(-1, 3), {"normals": np.repeat(normals, 3, axis=0)}


CLOSED: dict[str, Callable[[], tuple[Floats, Ints, dict[str, Any]]]] = {
    "ball": lambda: (*ball(5), {}),
    "noisy ball": lambda: (*ball(5, 0.02), {"normals": "smooth"}),
    "ring with seams": _ring_with_uv,
    "two balls": lambda: (*two_balls(), {}),
    "two materials": _two_materials,
    "faces with normals of their own": _own_normals,
    "both sides of each face": lambda: (ball(5)[0], np.concatenate([ball(5)[1], ball(5)[1][:, ::-1]]), {}),
}


class Built:
    """A completely decoded geometry."""

    def __init__(self, path: Path, points: Floats, faces: Ints, **options: Any) -> None:
        self.points, self.faces = points, faces
        self.report = scene.build(points, faces, path, **options)
        self.geometry = Geometry.open(path)
        self.groups = self.geometry.groups().view(np.float32)
        self.records = self.geometry.groups().view(np.int32)
        self.heads = self.geometry.clusters().view(np.float32)
        words = self.geometry.clusters().view(np.int32)
        self.sources = words[:, layouts.CLUSTER_SOURCE]
        self.levels = words[:, layouts.CLUSTER_COUNTS] >> 24 & 255
        self.owners = np.repeat(np.arange(len(self.groups)), self.records[:, layouts.GROUP_COUNT])
        self.clusters = [self.geometry.decode(number) for number in range(len(self.heads))]

    def triangles(self, chosen: Ints) -> Ints:
        """The grid points (T, 3, 3) of the triangles of clusters."""
        parts = [self.clusters[number].grid[self.clusters[number].triangles] for number in chosen.tolist()]
        return np.concatenate(parts)

    def cut(self, wanted: Callable[[Any, Any], Any]) -> Ints:
        """The drawn clusters, where `wanted(sphere, error)` says whether an error (with its sphere) is small enough."""
        own = wanted(self.heads[:, :4].astype(float), self.heads[:, 4].astype(float))
        parent = wanted(self.groups[self.owners, :4].astype(float), self.groups[self.owners, 4].astype(float))
        return np.flatnonzero(own & ~parent)


def leaves(count: int, size: float) -> tuple[Floats, Ints]:
    """Squares at random angles in a ball of radius 1."""
    random = np.random.default_rng(count)
    middles = random.normal(size=(count, 3))
    middles *= (random.random(count) ** (1 / 3) / np.linalg.norm(middles, axis=1))[:, None]
    along, across = np.linalg.qr(random.normal(size=(count, 3, 2)))[0].transpose(2, 0, 1)
    corners = [middles + size / 2 * (a * along + b * across) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    faces = 4 * np.arange(count)[:, None] + np.array([0, 1, 2, 0, 2, 3])
    return np.stack(corners, 1).reshape(-1, 3), faces.reshape(-1, 3)


def _leaves() -> tuple[Floats, Ints, dict[str, Any]]:
    """Squares of two materials, with separate normals and texture coordinates."""
    points, faces = leaves(6000, 0.06)
    options = {"materials": np.arange(len(faces)) // 2 % 2, "normals": "smooth", "uv": points[:, :2]}
    return points, faces, options


EACH = {**CLOSED, "leaves": _leaves}


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The geometry of this kind; each is built once."""
    folder = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def built(kind: str) -> Built:
        points, faces, options = EACH[kind]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouping, "LEAST", 3)
            # small groups, so that even a small mesh has many of them, and many levels side by side
            patch.setattr(grouping, "USUAL", 6)
            return Built(folder / f"{kind}.rtg", points, faces, **options)

    return built


@pytest.fixture(params=CLOSED)
def closed(request: pytest.FixtureRequest, of_kind: Callable[[str], Built]) -> Built:
    return of_kind(request.param)


@pytest.fixture(params=EACH)
def each(request: pytest.FixtureRequest, of_kind: Callable[[str], Built]) -> Built:
    return of_kind(request.param)


def open_edges(triangles: Ints) -> int:
    """Edges of triangles (T, 3, 3), given by their points, without a counterpart in the opposite direction."""
    corners = numbered(triangles)
    begin, end = corners.ravel(), np.roll(corners, -1, axis=1).ravel()
    size = len(triangles) * 3 + 1
    assert (begin != end).all()
    return int((~np.isin(begin * size + end, end * size + begin)).sum())


def numbered(triangles: Ints) -> Ints:
    """Triangles (T, 3, 3) as numbers (T, 3) of their sorted points."""
    points = triangles.reshape(-1, 3) - triangles.min((0, 1))
    size = int(points.max()) + 1
    keys = (points[:, 0] * size + points[:, 1]) * size + points[:, 2]
    return np.unique(keys, return_inverse=True)[1].reshape(-1, 3)


def cameras(built: Built, seed: int) -> list[Callable[[Any, Any], Any]]:
    """Cuts like a renderer's: errors in pixels, seen from random places near and far."""
    random = np.random.default_rng(seed)
    found: list[Callable[[Any, Any], Any]] = []
    extent = np.ptp(built.points, axis=0).max()
    # the allowed error grows with up to the third power of distance, so that more levels are side by side
    for steep in (1, 2, 3, 1, 2, 3):
        eye = random.choice(built.points) - built.geometry.meta["origin"] + random.normal(size=3) * 0.02 * extent
        allowed = np.quantile(built.heads[:, 4], random.uniform(0.5, 1)) * (4 / extent) ** steep

        def fine(
            spheres: Floats, errors: Floats, eye: Floats = eye, allowed: float = allowed, steep: int = steep
        ) -> NDArray[np.bool_]:
            distance = np.linalg.norm(spheres[:, :3] - eye, axis=1) - spheres[:, 3]
            return errors <= allowed * np.maximum(distance, 1e-3 * extent) ** steep

        found.append(fine)
    return found


def test_every_cut_is_watertight(closed: Built) -> None:
    errors = np.unique(closed.heads[:, 4])
    drawn = {
        tuple(closed.cut(lambda _, error, limit=limit: error <= limit)) for limit in errors[:: len(errors) // 8 + 1]
    }
    drawn |= {tuple(closed.cut(fine)) for seed in range(2) for fine in cameras(closed, seed)}
    mixed = [chosen for chosen in drawn if len(np.unique(closed.levels[list(chosen)])) >= 3]
    assert len(drawn) > 5
    assert mixed  # cuts through several levels at once
    for chosen in drawn:
        assert open_edges(closed.triangles(np.array(chosen))) == 0


def test_every_way_to_the_root_crosses_a_cut_once(each: Built) -> None:
    """On each path from a finest cluster up through the groups, exactly one cluster is drawn."""
    replaced_by = {int(source): number for number, source in enumerate(each.sources) if source >= 0}
    for fine in cameras(each, 7):
        drawn = np.zeros(len(each.heads), bool)
        drawn[each.cut(fine)] = True
        for cluster in np.flatnonzero(each.levels == 0).tolist():
            states = [drawn[cluster]]
            while (above := replaced_by.get(int(each.owners[cluster]))) is not None:
                cluster = above
                states.append(drawn[cluster])
            assert sum(states) == 1


def test_errors_grow_and_spheres_enclose(each: Built) -> None:
    groups = each.groups[each.owners].astype(float)
    own = each.heads.astype(float)
    assert (groups[:, 4] >= GROWTH * own[:, 4]).all()
    away = np.linalg.norm(groups[:, :3] - own[:, :3], axis=1)
    replaces = each.sources >= 0
    assert (away + own[:, 3] <= groups[:, 3])[replaces].all()
    origin = np.array(each.geometry.meta["origin"])
    for number, cluster in enumerate(each.clusters):
        for sphere in (groups[number], own[number])[: 1 + replaces[number]]:  # the finest level has no error
            distances = np.linalg.norm(cluster.positions - origin - sphere[:3], axis=1)
            assert (distances <= sphere[3]).all()


def test_clusters_share_the_bits_of_the_group_that_they_replace(each: Built) -> None:
    replacing = each.sources >= 0
    assert replacing.any()
    assert (each.heads[replacing, :5].view(np.uint32) == each.groups[each.sources[replacing], :5].view(np.uint32)).all()
    assert (each.heads[~replacing, 4] == 0).all()
    assert (each.levels[~replacing] == 0).all()
    sources = each.levels[replacing] - 1
    assert (sources >= 0).all()


def test_one_cluster_is_left(each: Built) -> None:
    assert each.report.roots == 1
    assert each.report.why_several is None
    terminal = each.groups[:, layouts.GROUP_ERROR] == np.float32(layouts.NEVER)
    assert each.records[terminal, layouts.GROUP_COUNT].tolist() == [1]
    assert len(each.report.levels) >= 5


def test_the_finest_level_is_the_mesh(each: Built) -> None:
    """The finest level has exactly the mesh's triangles, with the same orientation, on the grid."""
    origin, step = np.array(each.geometry.meta["origin"]), each.report.precision
    wanted = np.rint((each.points - origin) / step).astype(np.int64)[each.faces]
    found = each.triangles(np.flatnonzero(each.levels == 0))
    assert (canonical(found) == canonical(wanted)).all()


def canonical(triangles: Ints) -> Ints:
    """Triangles (T, 3, 3) in a fixed order, each rotated (not mirrored) to begin with its lowest corner."""
    first = numbered(triangles).argmin(1)
    turned = np.take_along_axis(triangles, ((first[:, None] + np.arange(3)) % 3)[:, :, None], 1).reshape(-1, 9)
    return turned[np.lexsort(turned.T)]


def test_the_tree_leads_to_each_group_once_and_bounds_what_is_below(each: Built) -> None:
    nodes = each.geometry.nodes
    reals = nodes.view(np.float32).astype(float)
    seen: list[int] = []
    deepest = 0

    def visit(node: int, depth: int) -> tuple[Floats, Floats, Floats, float]:
        """Box, spheres and largest error of everything below a node."""
        nonlocal deepest
        deepest = max(deepest, depth)
        low, high, spheres, worst = [], [], [], 0.0
        for child, real in zip(nodes[node], reals[node], strict=True):
            if child[layouts.CHILD_KIND] == 0:
                continue
            center, half, sphere, error = real[0:3], real[3:6], real[6:10], real[10]
            if child[layouts.CHILD_KIND] == INNER:
                below_low, below_high, below, largest = visit(int(child[layouts.CHILD_AT]), depth + 1)
                assert error == largest
            else:
                group = int(child[layouts.CHILD_GROUP])
                seen.append(group)
                assert child[layouts.CHILD_KIND] == each.records[group, layouts.GROUP_COUNT]
                assert (nodes[node].view(np.float32)[nodes[node, :, layouts.CHILD_GROUP] == group, 6:11] != 0).any()
                assert (sphere == each.groups[group, :4]).all()
                assert error == each.groups[group, layouts.GROUP_ERROR]
                words = each.geometry.page(int(child[layouts.CHILD_AT]))
                first = int(words[layouts.PAGE_FIRST_CLUSTER] + child[layouts.CHILD_FIRST])
                inside = range(first, first + int(child[layouts.CHILD_KIND]))
                assert (each.owners[inside] == group).all()
                assert first == 0 or each.owners[first - 1] != group
                points = np.concatenate([each.clusters[number].positions for number in inside])
                points -= each.geometry.meta["origin"]
                below_low, below_high, below = points.min(0), points.max(0), sphere[None]
            assert (center - half <= below_low).all()
            assert (center + half >= below_high).all()
            assert (np.linalg.norm(below[:, :3] - sphere[:3], axis=1) + below[:, 3] <= sphere[3] * (1 + 1e-12)).all()
            low.append(center - half)
            high.append(center + half)
            spheres.append(sphere)
            worst = max(worst, error)
        return np.min(low, 0), np.max(high, 0), np.array(spheres), worst

    visit(0, 1)
    assert sorted(seen) == list(range(len(each.groups)))
    assert deepest == each.geometry.meta["depth"]


def test_clusters_are_full_and_pages_hold_whole_groups_from_coarse_to_fine(closed: Built) -> None:
    # clusters that are not limited by their vertices
    if max(len(cluster.positions) for cluster in closed.clusters) < 250:
        assert closed.report.fill >= 0.85
    of_group = np.zeros(len(closed.groups), int)
    np.maximum.at(of_group, closed.owners, closed.levels)
    assert (np.diff(of_group) <= 0).all()
    assert closed.records[:, layouts.GROUP_NUMBER].tolist() == list(range(len(closed.groups)))
    first = 0
    for number in range(closed.geometry.pages):
        page = closed.geometry.page(number)
        assert 4 * len(page) <= layouts.PAGE_BYTES
        assert page[-1] == 0
        assert page[layouts.PAGE_FIRST_CLUSTER] == first
        first += int(page[layouts.PAGE_CLUSTERS])
    assert first == len(closed.heads)


# ---- errors ----------------------------------------------------------------------------------------------------------


@wp.kernel
def nearest(mesh: wp.uint64, points: wp.array(dtype=wp.vec3), distances: wp.array(dtype=wp.float32)):  # type: ignore[no-untyped-def, valid-type]
    index = wp.tid()
    found = wp.mesh_query_point_no_sign(mesh, points[index], wp.float32(1e6))
    distances[index] = wp.length(points[index] - wp.mesh_eval_position(mesh, found.face, found.u, found.v))


def distances_from(points: Floats, faces: Ints, samples: Floats) -> Floats:
    """The distance of each sample (N, 3) from the surface."""
    surface = wp.Mesh(
        wp.array(points.astype(np.float32), dtype=wp.vec3, device="cpu"),
        wp.array(faces.astype(np.int32).ravel(), dtype=wp.int32, device="cpu"),
    )
    distances = wp.zeros(len(samples), dtype=wp.float32, device="cpu")
    places = wp.array(samples.astype(np.float32), dtype=wp.vec3, device="cpu")
    wp.launch(nearest, len(samples), [surface.id, places, distances], device="cpu")
    return distances.numpy().astype(float)


def test_the_surface_is_within_the_stated_error(closed: Built) -> None:
    """The surface is sampled. meshoptimizer's own error is a mean over planes, which the stored error allows for."""
    random = np.random.default_rng(0)
    samples, stated, counts = [], [], []
    for number, cluster in enumerate(closed.clusters):
        if closed.levels[number]:
            corners = cluster.positions[cluster.triangles]
            weights = random.dirichlet([1, 1, 1], (len(corners), 8))
            samples.append(np.einsum("tsc,tcx->tsx", weights, corners).reshape(-1, 3))
            stated.append(float(closed.heads[number, 4]))
            counts.append(len(samples[-1]))
    distances = distances_from(closed.points, closed.faces, np.concatenate(samples))
    farthest = np.maximum.reduceat(distances, np.cumsum([0, *counts[:-1]]))
    limits = np.array(stated) + closed.report.precision  # positions are rounded by up to 0.87 of a step
    assert np.median(farthest / limits) > 0.2  # the stated error is not much larger than necessary
    assert np.quantile(farthest / limits, 0.95) <= 1.1
    assert (farthest / limits).max() <= 1.4


def test_a_flat_surface_has_no_error(tmp_path: Path) -> None:
    x, y = np.meshgrid(np.arange(60.0), np.arange(60.0), indexing="ij")
    corner = (np.arange(59)[:, None] * 60 + np.arange(59)).ravel()
    faces = np.stack([corner, corner + 60, corner + 1, corner + 1, corner + 60, corner + 61], 1).reshape(-1, 3)
    report = scene.build(np.stack([x, y, 0 * x], -1).reshape(-1, 3), faces, tmp_path / "flat.rtg")
    assert len(report.levels) > 3
    assert report.levels[-1].error < 1e-4 * report.precision


# ---- sizes, threads, interruptions -----------------------------------------------------------------------------------


def test_a_geometry_with_normals_takes_less_than_15_bytes_a_triangle(tmp_path: Path) -> None:
    points, faces, _ = ring(160, 160)
    report = scene.build(points, faces, tmp_path / "mesh.rtg", normals="smooth")
    assert report.triangles == 51200
    assert report.bytes_per_triangle < 15
    assert report.size_bytes == (tmp_path / "mesh.rtg").stat().st_size
    assert report.fill >= 0.85


def test_references_are_short(of_kind: Callable[[str], Built]) -> None:
    """Without reordering, references would take 5.8 bits on average."""
    for kind in ("ball", "noisy ball", "ring with seams"):
        words = of_kind(kind).geometry.clusters()[:, layouts.CLUSTER_COUNTS]
        assert (words >> 16 & 255).mean() < 4.8


def test_uv_are_within_a_sixteenth_of_an_edge(of_kind: Callable[[str], Built]) -> None:
    built = of_kind("ring with seams")
    _, faces, options = EACH["ring with seams"]()
    step = 2.0 ** built.geometry.meta["uv_exponent"]
    assert step <= np.linalg.norm(options["uv"][faces[:, 0]] - options["uv"][faces[:, 1]], axis=1).mean() / 8
    places = {tuple(place) for place in np.rint(options["uv"] / step).astype(int).tolist()}
    for cluster in built.clusters[:20]:
        assert cluster.uv is not None
        assert {tuple(place) for place in np.rint(cluster.uv / step).astype(int).tolist()} <= places


@pytest.mark.parametrize("kind", ["ring", "leaves", "scattered"])
def test_the_file_does_not_depend_on_workers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, faces, uv = ring(96, 64)
    if kind == "leaves":
        points, faces = leaves(4000, 0.06)
        uv = points[:, :2]
    if kind == "scattered":  # vertices and faces in random order, and each face with separate vertices
        random = np.random.default_rng(0)
        faces = random.permutation(faces)
        points, uv = points[faces].reshape(-1, 3), uv[faces].reshape(-1, 2)
        order = random.permutation(len(points))
        points, uv, faces = points[order], uv[order], np.argsort(order).reshape(-1, 3)
    monkeypatch.setattr(levels, "PIECE_TRIANGLES", 1000)  # small pieces, so that there is work for several workers
    monkeypatch.setattr(levels, "LEAST_TRIANGLES", 2000)
    monkeypatch.setattr(levels, "RUN_CLUSTERS", 60)
    monkeypatch.setattr(welding, "PART", 2000)
    monkeypatch.setattr(worker_pool, "CHUNK", 3000)
    monkeypatch.setattr(orders, "CHUNK", 3000)
    monkeypatch.setattr(normals, "FACES", 3000)
    forked: list[int] = []
    fork = os.fork

    def counted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", counted)
    for workers in (1, 3):
        forked.clear()
        scene.build(points, faces, tmp_path / f"{workers}.rtg", "smooth", uv, workers=workers)
        # workers are forked twice for normals, once for equal vertices and faces, and once for the levels
        assert (len(forked) >= 4 * workers) == (workers > 1 and sys.platform == "linux")
    assert (tmp_path / "1.rtg").read_bytes() == (tmp_path / "3.rtg").read_bytes()


@pytest.mark.parametrize("when", ["checking", "cutting", "simplifying", "writing"])
def test_what_is_interrupted_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    points, faces = ball(3)

    def stop(what: str, fraction: float) -> None:
        if what.startswith(when):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.build(points, faces, tmp_path / "mesh.rtg", progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_midst_of_writing_keeps_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points, faces = ball(2)
    (tmp_path / "mesh.rtg").write_bytes(b"former")
    monkeypatch.setattr("rooftop.scene.building.writing.tree", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scene.build(points, faces, tmp_path / "mesh.rtg")
    assert [path.name for path in tmp_path.iterdir()] == ["mesh.rtg"]
    assert (tmp_path / "mesh.rtg").read_bytes() == b"former"


# ---- meshes that are hard to simplify --------------------------------------------------------------------------------


def test_thousands_of_lonely_triangles_come_to_one_cluster(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    points = random.random((3000, 1, 3)) * 100 + 0.1 * random.normal(size=(3000, 3, 3))
    report = scene.build(points.reshape(-1, 3), np.arange(9000).reshape(-1, 3), tmp_path / "mesh.rtg")
    assert report.roots == 1
    assert report.levels[0].triangles == 3000


def test_what_cannot_be_simplified_is_kept_and_said(tmp_path: Path) -> None:
    """A triangle soup in which every vertex belongs to dozens of distant faces, so no group has an inside."""
    random = np.random.default_rng(0)
    report = scene.build(random.random((500, 3)), random.integers(0, 500, (9000, 3)), tmp_path / "mesh.rtg")
    assert report.roots > 1
    assert report.why_several is not None
    assert f"{report.roots} clusters" in report.why_several
    built = Geometry.open(tmp_path / "mesh.rtg")
    assert built.meta["why_several_roots"] == report.why_several


def test_a_single_triangle(tmp_path: Path) -> None:
    built = Built(tmp_path / "mesh.rtg", np.eye(3), np.array([[0, 1, 2]]))
    assert built.report.roots == 1
    assert len(built.clusters) == 1
    assert built.clusters[0].triangles.tolist() == [[0, 1, 2]]
    assert np.abs(built.clusters[0].positions - np.eye(3)).max() <= built.report.precision


def test_random_materials_still_have_levels(tmp_path: Path) -> None:
    points, faces = ball(4)
    materials = np.random.default_rng(0).integers(0, 5, len(faces))
    report = scene.build(points, faces, tmp_path / "mesh.rtg", materials=materials)
    assert report.roots == 1
    built = Geometry.open(tmp_path / "mesh.rtg")
    found: list[DecodedCluster] = [built.decode(number) for number in range(built.meta["clusters"])]
    assert set(np.concatenate([each.materials for each in found]).tolist()) <= set(range(5))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_mesh_is_built_or_refused_and_its_finest_level_is_itself(tmp_path: Path, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    count = data.draw(st.sampled_from([3, 4, 20, 300]))
    points = np.round(random.normal(size=(count, 3)) * 4) / 4 * 10 ** data.draw(st.floats(-6, 6))
    faces = random.integers(0, count, (data.draw(st.sampled_from([1, 7, 150, 1500])), 3))
    try:
        built = Built(tmp_path / "mesh.rtg", points, faces)
    except ValueError as error:
        assert "place" in str(error) or "area" in str(error)  # noqa: PT017
        return
    repairs = built.report.repairs
    dropped = repairs.degenerate_faces + repairs.small_faces
    assert built.report.triangles == len(faces) - dropped - repairs.duplicate_faces
    wanted = np.rint((points - built.geometry.meta["origin"]) / built.report.precision).astype(np.int64)[faces]
    flat = (wanted == np.roll(wanted, 1, axis=1)).all(2).any(1)
    assert dropped == flat.sum()
    found = built.triangles(np.flatnonzero(built.levels == 0))
    assert (np.unique(canonical(found), axis=0) == np.unique(canonical(wanted[~flat]), axis=0)).all()
    assert len(found) == built.report.triangles
