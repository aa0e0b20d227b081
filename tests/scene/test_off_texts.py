"""OFF and STL files: the loaded mesh has what the file states."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from rooftop.errors import InputError
from rooftop.scene.building.reading import MeshFile, read_mesh

pytest.importorskip("trimesh")

DART = "0 2 0\n1 1 0\n0 0 0\n2 1 0\n"  # area 1; a fan from the first corner would cover 3


def read(folder: Path, text: str) -> MeshFile:
    (folder / "a.off").write_text(text)
    return read_mesh(folder / "a.off")


def test_concave_polygons_and_comments(tmp_path: Path) -> None:
    mesh = read(tmp_path, f"# a dart\nOFF # counts follow\n4 2 0\n{DART}4 0 1 2 3\n3 0 1 3\n")
    a, b, c = mesh.vertices[mesh.faces].swapaxes(0, 1)
    assert (np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("most", [1, 255])
def test_attributes_of_vertices(tmp_path: Path, most: int) -> None:
    rows = [(*place, *np.eye(3)[k], *(most * np.eye(4)[k])[:3], most, 0.5, k / 4) for k, place in enumerate(np.eye(3))]
    text = "\n".join(" ".join(map(str, row)) for row in rows)
    with pytest.warns(UserWarning, match=r"a\.off: its face colours are ignored"):
        mesh = read(tmp_path, f"STCNOFF\n3 1 0\n{text}\n3 0 1 2 1 0 0\n")
    assert mesh.uv is not None
    np.testing.assert_array_equal(mesh.normals, np.eye(3))
    np.testing.assert_array_equal(mesh.colors, 255 * np.eye(3))
    np.testing.assert_array_equal(mesh.uv, [[0.5, 0], [0.5, 0.25], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OFF BINARY\n", "is a file of OFF BINARY; only OFF as text"),
        ("4OFF\n1 0 0\n0 0 0 1\n", "is a file of 4OFF"),
        (f"OFF\n4 2 0\n{DART}3 0 1 2\n", "5 lines for 4 vertices and 2 faces"),
        (f"OFF\n4 1 0\n{DART}4 0 1 2\n", "a face states a wrong number of corners"),
        (f"OFF\n4 3 0\n{DART}-1\n3 0 1 2\n3 1 3 2\n", "a face states a wrong number of corners"),
        (f"OFF\n4 1 0\n{DART}3 0 1 -1\n", "names vertex -1, but there are 4"),
        (f"COFF\n4 1 0\n{DART}3 0 1 2\n", "a vertex has 3 numbers, but 6 are needed"),
        ("", "cannot be read as an OFF file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"a.off .*{message}"):
        read(tmp_path, text)


def test_binary_stl_files_of_another_length(tmp_path: Path) -> None:
    """What follows the triangles is ignored; a missing triangle is an error that says so."""
    path = tmp_path / "a.stl"
    triangle = struct.pack("<12fH", 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0)
    path.write_bytes(b"solid of a scanner".ljust(80, b"\0") + struct.pack("<I", 2) + 2 * triangle + b"more")
    assert len(read_mesh(path).faces) == 2
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(InputError, match=r"has 150 bytes, but a binary STL file of 2 triangles has 184"):
        read_mesh(path)
