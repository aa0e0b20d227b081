"""The promises of lidar_scans.py, lidar_scenes.py and clouds.py: rays, files, pictures."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture
def scans() -> Any:
    return importlib.import_module("rooftop.train.tasks.generated.lidar_scans")


@pytest.fixture
def scenes() -> Any:
    return importlib.import_module("rooftop.train.tasks.generated.lidar_scenes")


@pytest.fixture
def clouds() -> Any:
    return importlib.import_module("rooftop.models.point_clouds.clouds")


# ---- rays ------------------------------------------------------------------------------------------------------


def surfaces(kind: int, o: list[float], d: list[float], half: tuple[float, float, float]) -> list[tuple[float, ...]]:
    """(distance, normal) of each intersection of a ray with a solid's surface, in the solid's frame, from its
    equations."""
    found = []

    def at(t: float) -> list[float]:
        return [a + t * b for a, b in zip(o, d, strict=True)]

    def inside(p: list[float], but: int) -> bool:
        if kind == 0:
            return all(abs(p[i]) <= half[i] for i in range(3) if i != but)
        return (p[0] / half[0]) ** 2 + (p[1] / half[1]) ** 2 <= 1

    for axis in {0: (0, 1, 2), 1: (2,), 2: ()}[kind]:  # planes
        for side in (-half[axis], half[axis]):
            t = (side - o[axis]) / d[axis]
            if inside(at(t), axis):
                found.append((t, *(float(i == axis) for i in range(3))))
    if kind:  # curved solids, where a sum of squares is 1
        axes = range(2) if kind == 1 else range(3)
        a, b, c = (sum(u[i] * v[i] / half[i] ** 2 for i in axes) for u, v in ((d, d), (o, d), (o, o)))
        if (rest := b * b - a * (c - 1)) > 0:
            for t in ((-b - math.sqrt(rest)) / a, (-b + math.sqrt(rest)) / a):
                p = at(t)
                if kind == 2 or abs(p[2]) <= half[2]:
                    normal = [p[i] / half[i] ** 2 if i in axes else 0.0 for i in range(3)]
                    found.append((t, *(x / math.hypot(*normal) for x in normal)))
    return found


def first_hit(solids: list[Any], origin: list[float], ray: list[float]) -> tuple[float, Any, float]:
    """Distance, solid and cosine of the first hit, computed for one solid after the other."""
    best: tuple[float, Any, float] = (math.inf, None, 0.0)
    for solid in solids:
        c, s = math.cos(solid.yaw), math.sin(solid.yaw)
        x, y, z = (a - b for a, b in zip(origin, solid.center, strict=True))
        o = [c * x + s * y, c * y - s * x, z]
        d = [c * ray[0] + s * ray[1], c * ray[1] - s * ray[0], ray[2]]
        hits = surfaces(solid.kind, o, d, solid.half)
        if hits and min(hits)[0] > 0:  # no hit in front if the ray begins inside the solid or the solid is behind
            t, *normal = min(hits)
            best = min(
                best, (t, solid, abs(sum(a * b for a, b in zip(normal, d, strict=True)))), key=lambda hit: hit[0]
            )
    return best


@pytest.mark.parametrize("seed", range(3))
def test_rays_hit_what_a_loop_over_all_solids_finds(seed: int, scans: Any, scenes: Any) -> None:
    chance = Random(seed)
    solids = [
        scenes.Solid(
            chance.randrange(3),
            number,
            tuple(chance.uniform(-9, 9) for _ in range(3)),
            tuple(chance.uniform(0.05, 3) for _ in range(3)),
            scenes.PLASTER,
            chance.uniform(-4, 4),
        )
        for number in range(40)
    ]
    origin = [chance.uniform(-1, 1) for _ in range(3)]
    solids.append(scenes.Solid(scenes.BOX, 40, tuple(origin), (0.5, 0.5, 0.5), scenes.PLASTER))  # around the scanner
    rays = torch.nn.functional.normalize(torch.randn(400, 3, generator=torch.Generator().manual_seed(seed)), dim=1)
    rays = rays[torch.atan2(rays[:, 1], rays[:, 0]).argsort()]
    table = scans.as_tensors(solids, chance, CPU)
    hits = scans.cast(table, torch.tensor(origin), rays)
    expected = [first_hit(solids, origin, ray) for ray in rays.tolist()]
    reached = torch.tensor([solid is not None for _, solid, _ in expected])
    assert torch.equal(hits.distance.isfinite(), reached)
    assert 100 < reached.sum() < 400
    labels = [solid.label for _, solid, _ in expected if solid]
    assert table.label[hits.solid[reached]].tolist() == labels
    assert 40 not in labels
    for got, wanted in ((hits.distance, 0), (hits.cosine, 2)):
        values = torch.tensor([hit[wanted] for hit in expected])
        torch.testing.assert_close(got[reached], values[reached], rtol=0, atol=2e-4)
    shuffled = torch.randperm(len(rays), generator=torch.Generator().manual_seed(seed))
    again = scans.cast(table, torch.tensor(origin), rays[shuffled])
    assert torch.equal(again.distance, hits.distance[shuffled])


def test_a_scan_of_flat_ground(scans: Any, scenes: Any) -> None:
    ground = scenes.Solid(scenes.BOX, 3, (0, 0, -1), (99, 99, 1), scenes.Material(0.5, 0.5))
    head = scans.Scanner(16, 60, -30, 10, 40.0, 0.0, weakest=0.0, lost=0.0)
    table = scans.as_tensors([ground], Random(0), CPU)
    cloud = scans.scan(table, head, torch.tensor([[1.0, 2.0, 1.5]]), 0)
    assert cloud.xyz[:, 2].abs().max() < 1e-5
    assert set(cloud.labels.tolist()) == {3}
    ranges = (cloud.xyz - torch.tensor([1.0, 2.0, 1.5])).norm(dim=1)
    near = [1.5 / math.sin(math.radians(30 - 40 * beam / 15)) for beam in range(11)]
    assert len(ranges) == 60 * sum(distance < 40 for distance in near)
    torch.testing.assert_close(
        ranges.view(60, -1)[7], torch.tensor([distance for distance in near if distance < 40]), rtol=1e-4, atol=0
    )
    slant = 0.5 * 1.5 / ranges  # the cosine is height over distance
    assert (0.9 * slant - 1e-6 <= cloud.intensity).all()
    assert (cloud.intensity <= 1.1 * slant + 1e-6).all()
    weak = scans.scan(table, replace(head, weakest=0.05), torch.tensor([[1.0, 2.0, 1.5]]), 0)
    assert 0 < len(weak.xyz) < len(cloud.xyz)
    assert weak.xyz.norm(dim=1).mean() < cloud.xyz.norm(dim=1).mean()  # far and slanting hits are lost first


@pytest.mark.parametrize("name", ["street", "room"])
def test_scenes_have_all_classes_and_follow_from_their_seed(name: str, scans: Any) -> None:
    setting = scans.SETTINGS[name]
    setting = replace(setting, scanner=replace(setting.scanner, beams=32, steps=256))
    found = [scans.simulate(setting, seed) for seed in range(6)]
    assert all(map(torch.equal, scans.simulate(setting, 3), found[3]))
    counts = torch.stack([torch.bincount(cloud.labels, minlength=len(setting.classes)) for cloud in found])
    assert counts.shape[1] == len(setting.classes)
    assert (counts.sum(0) > 0).all()
    assert (counts.sum(1) > 0.3 * setting.scanner.beams * setting.scanner.steps).all()
    assert len({len(cloud.xyz) for cloud in found}) == 6
    for cloud in found:
        assert ((cloud.intensity >= 0) & (cloud.intensity <= 1)).all()
        assert cloud.xyz.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["street", "room"])
def test_a_gpu_sees_the_same_scene(name: str, scans: Any) -> None:
    chance = Random(5)
    solids, places = scans.SETTINGS[name].build(chance)
    table = scans.as_tensors(solids, chance, CPU)
    rays = replace(scans.SETTINGS[name].scanner, steps=128).directions(CPU)
    here = scans.cast(table, torch.tensor(places[0]), rays)
    there = scans.cast(
        table._replace(**{key: value.cuda() for key, value in table._asdict().items() if isinstance(value, Tensor)}),
        torch.tensor(places[0]).cuda(),
        rays.cuda(),
    )
    same = (here.solid == there.solid.cpu()) & ((here.distance - there.distance.cpu()).abs() < 1e-2)
    assert (same | (here.distance.isinf() & there.distance.cpu().isinf())).float().mean() > 0.999  # edges aside


# ---- files -----------------------------------------------------------------------------------------------------

TWO = np.array([(1.5, -2.0, 3.25), (4.0, 5.0, -6.5)])
HEADER = "ply\nformat {} 1.0\ncomment made by hand\n{}end_header\n"
VERTEX = "element vertex 2\nproperty double x\nproperty float y\nproperty float z\nproperty uchar Intensity\n"
FACES = "element face 1\nproperty list uchar int vertex_indices\n"


def ply(encoding: str) -> bytes:
    header = HEADER.format(encoding, "element camera 1\nproperty short f\n" + VERTEX + FACES).encode()
    if encoding == "ascii":
        return header + b"7\n1.5 -2 3.25 255\n4 5 -6.5 51\n3 0 1 1\n"
    order = "<" if "little" in encoding else ">"
    rows = np.zeros(2, [("x", f"{order}f8"), ("y", f"{order}f4"), ("z", f"{order}f4"), ("i", "u1")])
    rows["x"], rows["y"], rows["z"], rows["i"] = *TWO.T, (255, 51)
    return header + np.array([7], f"{order}i2").tobytes() + rows.tobytes() + b"\3whatever"


@pytest.mark.parametrize("encoding", ["ascii", "binary_little_endian", "binary_big_endian"])
def test_ply_files_of_others(encoding: str, clouds: Any, tmp_path: Path) -> None:
    (tmp_path / "two.ply").write_bytes(ply(encoding))
    cloud = clouds.read(tmp_path / "two.ply")
    assert cloud.xyz.tolist() == TWO.tolist()
    assert cloud.intensity.tolist() == pytest.approx([1.0, 0.2])
    assert cloud.labels is None


def labelled(*labels: str) -> bytes:
    """A file of CloudCompare, which stores labels as floating-point numbers."""
    vertices = f"element vertex {len(labels)}\n" + "".join(f"property float {name}\n" for name in ("x", "y", "z"))
    rows = "".join(f"1 2 3 {label}\n" for label in labels)
    return (HEADER.format("ascii", vertices + "property double scalar_Label\n") + rows).encode()


def test_labels_in_floating_point(clouds: Any, tmp_path: Path) -> None:
    (tmp_path / "a.ply").write_bytes(labelled("2", "nan", "0.0"))
    assert clouds.read(tmp_path / "a.ply").labels.tolist() == [2, -1, 0]


def test_what_was_written_is_read(clouds: Any, tmp_path: Path) -> None:
    far = torch.tensor([[4e6 + 0.125, 5e5, 100.0], [4e6, 5e5 + 0.25, 101.0]], dtype=torch.float64)
    cloud = clouds.Cloud(far, torch.tensor([0.25, 1.0]), torch.tensor([1, 0]))
    clouds.write(cloud, tmp_path / "far.ply", [(1, 2, 3), (4, 5, 6)])
    assert all(map(torch.equal, clouds.read(tmp_path / "far.ply"), cloud))
    assert [path.name for path in tmp_path.iterdir()] == ["far.ply"]


def test_arrays(clouds: Any, tmp_path: Path) -> None:
    rows = np.array([(1, 2, 3, 50), (np.nan, 0, 0, 1), (4, 5, 6, 200), (0, np.inf, 0, 1)], dtype=np.float32)
    np.save(tmp_path / "four.npy", rows)
    cloud = clouds.read(tmp_path / "four.npy")
    assert cloud.xyz.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert cloud.intensity.tolist() == [0.25, 1.0]
    np.save(tmp_path / "three.npy", rows[:, :3])
    assert clouds.read(tmp_path / "three.npy").intensity is None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.xyz", b"", "is neither .ply nor .npy"),
        ("a.ply", b"obj", "does not begin with the line 'ply'"),
        ("a.ply", HEADER.format("ascii", "").encode(), "lacks the format or an element vertex"),
        ("a.ply", HEADER.format("zip", VERTEX).encode(), "its header has b'format zip 1.0"),
        ("a.ply", b"ply\nformat ascii 1.0\n" + VERTEX.encode(), "its header has b''"),
        ("a.ply", HEADER.format("ascii", FACES + VERTEX).encode(), "element face has lists"),
        ("a.ply", ply("binary_little_endian")[:-20], "it ends after 1 of 2 rows of element vertex"),
        ("a.ply", ply("ascii").replace(b"4 5 -6.5 51\n3 0 1 1\n", b""), "it ends after 1 of 2 rows"),
        ("a.ply", ply("ascii").replace(b"4 5 -6.5 51", b"4 5"), "row 1 of element vertex has 2 numbers: expected 4"),
        ("a.ply", ply("ascii").replace(b"-6.5", b"six"), "cannot be read: could not convert"),
        (
            "a.ply",
            ply("ascii").replace(b"-6.5", b"nan").replace(b"3.25", b"inf"),
            "no point with finite coordinates among",
        ),
        ("a.ply", ply("ascii").replace(b" 51", b" 300"), "cannot be read: Python integer 300 out of bounds"),
        ("a.ply", ply("ascii").replace(b"vertex 2", b"vertex 9" + b"0" * 15), "too short for 9000000000000000 rows"),
        ("a.ply", labelled("2", "0.5", "nan"), "scalar_label of 1 of 3 points is not a whole number, such as 0.5"),
        ("a.ply", labelled("1e300", "inf"), "scalar_label of 2 of 2 points is not a whole number, such as 1e+300"),
        ("a.npy", b"not an array", "cannot be read"),
        ("a.npy", b"", "cannot be read"),
        ("a.npy", b"PK\3\4", "cannot be read"),
    ],
)
def test_files_that_are_no_clouds(name: str, content: bytes, problem: str, clouds: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(problem)):
        clouds.read(tmp_path / name)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((4, 2)), np.zeros((4, 3), dtype=bool), np.zeros((0, 3))])
def test_arrays_that_are_no_clouds(values: Any, clouds: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(InputError, match=r"expected (an array|numbers)|no point"):
        clouds.read(tmp_path / "a.npy")


# ---- pictures --------------------------------------------------------------------------------------------------


def test_what_is_near_hides_what_is_far(clouds: Any) -> None:
    place, depths = torch.tensor([20.0, 20.0, 40.0, 5.0]), torch.tensor([9.0, 2.0, 3.0, -1.0])
    colours = torch.tensor([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)], dtype=torch.uint8)
    picture = clouds.draw(clouds.View(place, place, depths, torch.full((4,), 3.0)), colours, 50, 50)
    assert picture.size == (50, 50)
    assert picture.getpixel((20, 20)) == pytest.approx((0, 255, 0), abs=2)  # averaged
    assert picture.getpixel((40, 40)) == pytest.approx((0, 0, 255), abs=2)
    assert picture.getpixel((5, 5)) == clouds.NIGHT == picture.getpixel((30, 10))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_points_are_drawn_too(count: int, clouds: Any) -> None:
    xyz = torch.rand(count, 3, generator=torch.Generator().manual_seed(0)) + 1e6
    white = torch.full((count, 3), 255, dtype=torch.uint8)
    picture = clouds.sheet(xyz, [("a", white), ("b", clouds.of_heights(xyz[:, 2]))], [("white", (255, 255, 255))], 96)
    half = picture.crop((6, 70, 102, 126))  # the map of the first picture
    assert half.getextrema() != tuple((level, level) for level in clouds.NIGHT)
