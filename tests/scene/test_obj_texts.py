"""OBJ files in every spelling that the format allows: the loaded mesh has the area of the polygons."""

from __future__ import annotations

import codecs
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.errors import InputError
from rooftop.scene.building.obj_texts import plain_obj
from rooftop.scene.building.reading import MeshFile, read_mesh

pytest.importorskip("trimesh")

TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n"
ARROW = "v 0 0 0\nv 4 0 0\nv 4 4 0\nv 2 1 0\nv 0 4 0\nf 1 2 3 4 5\n"  # a square minus a triangle of area 6


def read(content: str | bytes, folder: Path) -> MeshFile:
    path = folder / "a.obj"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_mesh(path)


def area(mesh: MeshFile) -> float:
    corners = mesh.vertices[mesh.faces]
    return float(
        np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1).sum() / 2
    )


@pytest.mark.parametrize(
    "content",
    [
        TRIANGLE,
        TRIANGLE.replace(" ", "\t"),
        TRIANGLE.replace("\n", "\r"),
        TRIANGLE.replace("\n", "\r\n"),
        TRIANGLE.replace("2 3", "2 \\\n 3"),
        TRIANGLE.replace("v", "  v").replace("f", "\tf"),
        TRIANGLE.replace("f", "fo"),
        TRIANGLE.replace("f 1 2 3", "f -3 -2 -1"),
        TRIANGLE.replace("f 1 2 3", "f 1// 2// 3//"),
        TRIANGLE.replace("f 1 2 3", "f 1 2 3 # 4"),
        TRIANGLE.replace("\n", "  # a remark\n", 1),
        ("# caf\xe9\n" + TRIANGLE).encode("latin-1"),
        codecs.BOM_UTF8 + TRIANGLE.encode(),
        TRIANGLE.encode("utf-16"),
        codecs.BOM_UTF16_BE + TRIANGLE.encode("utf-16-be"),
    ],
)
def test_every_spelling_is_read(content: str | bytes, tmp_path: Path) -> None:
    mesh = read(content, tmp_path)
    assert len(mesh.faces) == 1
    assert area(mesh) == pytest.approx(0.5)


def test_indices_count_back_from_where_they_stand(tmp_path: Path) -> None:
    second = "v 0 0 5\nv 2 0 5\nv 0 2 5\nvt 0 0\nvt 1 0\nvt 0 1\nf -3/-3 -2/-2 -1/-1\n"
    first = "g a\n" + TRIANGLE.replace("f 1 2 3", "vt 0.5 0\nvt 0.6 0\nvt 0.7 0\nf -3/-3 -2/-2 -1/-1")
    mesh = read(f"{first}g b\n{second}", tmp_path)
    assert area(mesh) == pytest.approx(0.5 + 2.0)
    assert mesh.uv is not None
    corners = {tuple(v): tuple(uv) for v, uv in zip(mesh.vertices.tolist(), mesh.uv.tolist(), strict=True)}
    assert corners[(2.0, 0.0, 5.0)] == pytest.approx((1.0, 0.0))
    assert corners[(1.0, 0.0, 0.0)] == pytest.approx((0.6, 0.0))


def test_a_polygon_with_a_corner_that_points_inwards(tmp_path: Path) -> None:
    assert area(read(ARROW, tmp_path)) == pytest.approx(10.0)
    assert area(read(ARROW.replace("1 2 3 4 5", "5 4 3 2 1"), tmp_path)) == pytest.approx(10.0)
    dart = "v 0 0 0\nv 2 0 0\nv 0.5 0.5 0\nv 0 2 0\nf 1 2 3 4\n"
    assert area(read(dart.replace("f 1 2 3 4", "f 4 1 2 3"), tmp_path)) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.2, 2.0), min_size=4, max_size=16), st.integers(0, 2**32))
def test_the_triangles_of_a_star_cover_it(
    tmp_path_factory: pytest.TempPathFactory, radii: list[float], seed: int
) -> None:
    """In any plane and from any first corner, the triangles have the star's total area and orientation."""
    count = len(radii)
    angles = 2 * math.pi * np.arange(count) / count
    points = np.stack([radii * np.cos(angles), radii * np.sin(angles), 0 * angles], 1)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    lines = [f"v {x!r} {y!r} {z!r}" for x, y, z in (points @ turn.T).tolist()]
    text = "\n".join([*lines, "f " + " ".join(str(1 + (n + seed) % count) for n in range(count))])
    mesh = read(text + "\n", tmp_path_factory.mktemp("star"))
    expected = (
        sum(math.sin(2 * math.pi / count) * a * b for a, b in zip(radii, [*radii[1:], radii[0]], strict=True)) / 2
    )
    assert area(mesh) == pytest.approx(abs(expected))
    corners = mesh.vertices[mesh.faces]
    total = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).sum(0)) / 2
    assert total == pytest.approx(abs(expected))


def test_plain_texts_are_left_as_they_are() -> None:
    box = b"v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0.5 2 0\nf 1 2 3 4\nf 4 3 5\n"
    assert plain_obj(box, "box.obj") is box


def test_materials_in_latin_1_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.mtl").write_bytes("# caf\xe9\nnewmtl red\nKd 1 0 0\n".encode("latin-1"))
    assert len(read("mtllib a.mtl\nusemtl red\n" + TRIANGLE, tmp_path).faces) == 1


def test_separators_of_unicode_in_a_colour(tmp_path: Path) -> None:
    assert len(read("v 0 0 0 1 0 \x1f\nv 1 0 0 1 0 0\nv 0 1 0 0 1 0\nf -3 -2 -1\n", tmp_path).faces) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("v 0 0 0\nv 1 0 0\nf -3 -2 -1\n", r"line 3: '-3' counts back beyond the first of 2 `v` lines"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 0", r"line 4: '0' has the index 0, but indices of OBJ begin at 1"),
        ("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0/1 1/1 2/1\n", r"line 4: '0/1' has the index 0"),
        ("v\t0 0 0\nf a b c\n", r"line 2: 'a' is not an index of a vertex"),
        ("v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nf 1 2 3 9\n", r"names vertex 9, but there are only 4"),
        ("v 0 0\nv 1 0\nv 0 1\nf 1 2 3\n", r"has vertices of shape \(3, 2\): expected three numbers for each vertex"),
        ("v\t0 0 x\nf 1 2 3\n", r"line 1: a vertex needs three numbers, got '0 0 x'"),
    ],
)
def test_what_is_wrong_is_named(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(content, tmp_path)
