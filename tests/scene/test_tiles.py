"""Tiles of a scan that are built separately meet along their borders at every level of detail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Geometry

SIDE = 48  # quads along a tile
STEP = 2.0**-6


def tile(row: int, column: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Part of a rough height field, on the grid."""
    x, y = np.meshgrid(np.arange(SIDE + 1.0) + SIDE * row, np.arange(SIDE + 1.0) + SIDE * column, indexing="ij")
    height = 2.5 * np.sin(0.9 * x + 0.4 * y) + 1.5 * np.cos(1.3 * y - 0.7 * x) + 3 * np.sin(0.11 * x) * np.cos(0.13 * y)
    corner = (np.arange(SIDE)[:, None] * (SIDE + 1) + np.arange(SIDE)).ravel()
    faces = np.stack([corner, corner + SIDE + 1, corner + 1, corner + 1, corner + SIDE + 1, corner + SIDE + 2], 1)
    return np.rint(np.stack([x, y, height], -1).reshape(-1, 3) / STEP) * STEP, faces.reshape(-1, 3)


def four(folder: Path, lock_borders: bool) -> list[Geometry]:
    found = []
    for number in range(4):
        path = folder / f"{number}{lock_borders}.rtg"
        scene.build(*tile(*divmod(number, 2)), path, precision=STEP, lock_borders=lock_borders, workers=1)
        found.append(Geometry.open(path))
    return found


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> list[Geometry]:
    return four(tmp_path_factory.mktemp("tiles"), True)


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> list[Geometry]:
    return four(tmp_path_factory.mktemp("tiles"), False)


def holes(tiles: list[Geometry]) -> tuple[int, set[int]]:
    """Pictures show where the four tiles meet, from increasing distances. Returns their numbers of background pixels,
    and the levels drawn."""
    world = scene.Scene()
    for each in tiles:
        world.add_instance(world.add_mesh(each), np.eye(4)[:3])
    renderer = scene.Renderer(world, "cpu", pixel_error=8.0)
    found, levels = 0, set()
    for distance in (20.0, 60.0, 150.0, 400.0):
        side = min(SIDE * 0.7, distance * 0.35)
        for lean in (0.0, 0.35):
            eye = np.array([SIDE - 0.37, SIDE + 0.21 - lean * distance, distance])
            camera = scene.Camera.look_at(
                eye, (SIDE, SIDE, 0), up=(0, 1, 0), fov_y_degrees=2 * np.degrees(np.arctan(side / distance)),
                width=160, height=160,
            )  # fmt: skip
            frame = renderer.render(camera, outputs=("depth", "level"))
            found += int((~np.isfinite(frame["depth"].numpy())).sum())
            levels |= set(frame["level"].unique().tolist()) - {-1}
    return found, levels


def test_tiles_with_locked_borders_meet_at_every_distance(locked: list[Geometry]) -> None:
    found, levels = holes(locked)
    assert found == 0
    assert len(levels) >= 3


def test_without_them_there_are_cracks(free: list[Geometry]) -> None:
    found, levels = holes(free)
    assert found > 0
    assert len(levels) >= 3


def border(geometry: Geometry, level: int, row: int, column: int) -> set[tuple[float, ...]]:
    """The exact points of a level that lie on the border of a tile."""
    found: set[tuple[float, ...]] = set()
    for number, head in enumerate(geometry.clusters().tolist()):
        if head[12] >> 24 == level:
            points = geometry.decode(number).positions
            low = np.array([row, column]) * SIDE
            outer = ((points[:, :2] == low) | (points[:, :2] == low + SIDE)).any(1)
            found |= set(map(tuple, points[outer].tolist()))
    return found


def test_borders_are_equal_to_the_bit_in_all_levels(locked: list[Geometry], free: list[Geometry]) -> None:
    for number, geometry in enumerate(locked):
        row, column = divmod(number, 2)
        points = tile(row, column)[0]
        outer = points[(points[:, :2] % SIDE == 0).any(1)]
        counts = [level["triangles"] for level in geometry.meta["levels"]]
        assert len(counts) >= 4
        assert counts[3] < counts[0] / 4
        for level in range(3):  # the whole mesh has these levels
            assert border(geometry, level, row, column) == set(map(tuple, outer.tolist()))
        assert border(free[number], 2, row, column) < set(map(tuple, outer.tolist()))


def test_the_report_says_why_locked_borders_leave_several_clusters(tmp_path: Path) -> None:
    report = scene.build(*tile(0, 0), tmp_path / "tile.rtg", precision=STEP, lock_borders=True)
    assert report.roots > 1
    assert report.why_several is not None
    assert "borders are locked" in report.why_several


def test_a_closed_mesh_is_the_same_with_and_without(tmp_path: Path) -> None:
    import trimesh

    ball = trimesh.creation.icosphere(4)
    for lock in (False, True):
        scene.build(ball.vertices, ball.faces, tmp_path / f"{lock}.rtg", lock_borders=lock)
    assert (tmp_path / "True.rtg").read_bytes() == (tmp_path / "False.rtg").read_bytes()
