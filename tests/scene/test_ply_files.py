"""PLY files of every form: the loaded mesh has the corners and attributes that the values define."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from rooftop.errors import InputError
from rooftop.scene.building.reading import MeshFile, read_mesh

pytest.importorskip("trimesh")

FORMS = ("ascii", "binary_little_endian", "binary_big_endian")
CODES = {"uchar": "B", "int": "i", "float": "f", "double": "d", "ushort": "H"}
L_SHAPE = [(1, 2, 0), (0, 2, 0), (0, 0, 0), (2, 0, 0), (2, 1, 0), (1, 1, 0)]  # area 3; a fan would cover 4
PLACES = [("float", axis) for axis in "xyz"]
CORNERS = ("list uchar int", "vertex_indices")

Kinds = list[tuple[str, str]]  # type and name of each property
Rows = list[tuple[object, ...]]


def ply(form: str, *elements: tuple[str, Kinds, Rows], end: str = "\n") -> bytes:
    """A file; a list is a tuple in its row."""
    head, values = ["ply", f"format {form} 1.0", "comment made by a test"], b""
    for name, kinds, rows in elements:
        head += [f"element {name} {len(rows)}", *(f"property {kind} {of}" for kind, of in kinds)]
        for row in rows:
            flat: list[tuple[str, object]] = []
            for (kind, _), value in zip(kinds, row, strict=True):
                *_, count, item = ("", *kind.split())
                if isinstance(value, tuple):
                    flat += [(count, len(value)), *((item, each) for each in value)]
                else:
                    flat.append((item, value))
            if form == "ascii":
                values += (" ".join(str(value) for _, value in flat) + end).encode()
            else:
                order = "<" if "little" in form else ">"
                values += b"".join(struct.pack(order + CODES[kind], value) for kind, value in flat)
    return (end.join([*head, "end_header"]) + end).encode() + values


def read(folder: Path, content: bytes) -> MeshFile:
    path = folder / "a.ply"
    path.write_bytes(content)
    return read_mesh(path)


def area(mesh: MeshFile) -> float:
    a, b, c = mesh.vertices[mesh.faces].swapaxes(0, 1)
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_polygons_of_any_number_of_corners(tmp_path: Path, form: str, end: str) -> None:
    """Triangles, quads and concave polygons may be in one file, with other properties and elements between them."""
    faces: Rows = [((2, 3, 4), 10), (tuple(range(6)), 13), ((2, 3, 4, 5), 7), ((0, 1), 9)]
    mesh = read(
        tmp_path,
        ply(
            form,
            ("camera", [("double", "f"), ("list uchar int", "sizes")], [(1.5, (1, 2)), (1.5, ())]),
            ("vertex", PLACES, list(L_SHAPE)),
            ("face", [CORNERS, ("uchar", "flags")], faces),
            end=end,
        ),
    )
    assert (len(mesh.faces), area(mesh)) == (1 + 4 + 2, 1 + 3 + 1.5)
    assert mesh.faces[0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("form", FORMS)
def test_attributes_of_vertices_stay_together(tmp_path: Path, form: str) -> None:
    """Normals, texture coordinates and colours, also beside each other, and if a vertex is unused."""
    rng = np.random.default_rng(0)
    places, uv = rng.normal(size=(5, 3)).astype("f4"), rng.random((5, 2)).astype("f4")
    normals, colors = np.eye(3)[[0, 1, 2, 2, 1]], rng.integers(0, 256, (5, 3))
    kinds = [*PLACES, *(("float", f"n{axis}") for axis in "xyz"), ("float", "s"), ("float", "t")]
    kinds += [("uchar", name) for name in ("red", "green", "blue")]
    rows = [(*map(float, [*a, *b, *c]), *map(int, d)) for a, b, c, d in zip(places, normals, uv, colors, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = read(tmp_path, ply(form, ("vertex", kinds, rows), ("face", [CORNERS], [((3, 1, 2),), ((2, 1, 0),)])))
    assert mesh.normals is not None
    assert mesh.uv is not None
    assert mesh.faces.tolist() == [[3, 1, 2], [2, 1, 0]]
    for found, expected in ((mesh.vertices, places), (mesh.normals, normals), (mesh.uv, uv), (mesh.colors, colors)):
        np.testing.assert_array_equal(found, expected)


def test_texture_coordinates_of_corners(tmp_path: Path) -> None:
    """A vertex whose corners differ becomes several, each with the vertex's colour."""
    corners = ((0, 0, 1, 0, 1, 1), (0, 0, 1, 1, 0.5, 1))
    faces: Rows = [((0, 1, 2), corners[0]), ((0, 2, 3), corners[1]), ((0, 1, 2), (9, 9, 1, 0, 1, 1))]
    kinds = [*PLACES, *(("uchar", f"diffuse_{name}") for name in ("red", "green", "blue"))]
    vertices: Rows = [(x, y, 0, 10 * number, 0, 0) for number, (x, y) in enumerate(((0, 0), (1, 0), (1, 1), (0, 1)))]
    file = ply(FORMS[1], ("vertex", kinds, vertices), ("face", [CORNERS, ("list uchar float", "texcoord")], faces))
    mesh = read(tmp_path, file)
    assert mesh.uv is not None
    assert mesh.colors is not None
    assert len(mesh.vertices) == 5
    for face, (corner, uv) in zip(mesh.faces, faces, strict=True):
        np.testing.assert_array_equal(mesh.uv[face].ravel(), uv)
        np.testing.assert_array_equal(mesh.colors[face, 0], 10 * np.array(corner))


@pytest.mark.parametrize("form", FORMS)
def test_strips_of_triangles(tmp_path: Path, form: str) -> None:
    grid: Rows = [(x, y, 0) for x in range(3) for y in range(2)]
    strips = ("tristrips", [("list int int", "vertex_indices")], [((0, 2, 1, 3, -1, 2, 4, 3, 5),)])
    mesh = read(tmp_path, ply(form, ("vertex", PLACES, grid), strips))
    a, b, c = mesh.vertices[mesh.faces].swapaxes(0, 1)
    assert np.cross(b - a, c - a).tolist() == [[0, 0, 1]] * 4


@pytest.mark.parametrize("form", FORMS)
def test_files_that_are_cut_anywhere_are_refused(tmp_path: Path, form: str) -> None:
    whole = ply(form, ("vertex", PLACES, list(L_SHAPE)), ("face", [CORNERS], [(tuple(range(6)),), ((0, 1, 2),)]))
    begin = whole.index(b"end_header")
    for length in range(begin, len(whole) - 2, 5):
        with pytest.raises(InputError, match=r"a\.ply (ends in row .* of element|cannot be read as a PLY|has no)"):
            read(tmp_path, whole[:length])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("property float x", "property floot x", "has the line 'property floot x' in its header"),
        ("list uchar int", "list float int", "has the line 'property list float int vertex_indices'"),
        ("format ascii 1.0", "format text 1.0", "has the line 'format text 1.0'"),
        ("3 0 1 2", "3 0 1 9", "a face with vertex 9, but its 3 vertices are 0 to 2"),
        ("3 0 1 2", "3 0 1 -1", "a face with vertex -1"),
        ("3 0 1 2", "300000 0 1 2", "ends in row 0 of 1 of element face"),
        ("property float y", "property float Y", "has no vertices with x, y and z"),
        ("0 1 0", "0 one 0", "words that are not numbers"),
        ("int vertex", "uchar vertex", None),
        ("3 0 1 2", "3 0 1 256", "has the number 256 for its property vertex_indices, which is from 0 to 255"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, before: str, after: str, message: str | None) -> None:
    file = ply("ascii", ("vertex", PLACES, [(0, 0, 0), (1, 0, 0), (0, 1, 0)]), ("face", [CORNERS], [((0, 1, 2),)]))
    if after.endswith("256"):
        file = file.replace(b"int vertex", b"uchar vertex")
    assert before.encode() in file
    file = file.replace(before.encode(), after.encode())
    if message is None:
        assert area(read(tmp_path, file)) == 0.5
        return
    with pytest.raises(InputError, match=f"a.ply .*{message}"):
        read(tmp_path, file)


def test_float_colours_beyond_one_are_refused(tmp_path: Path) -> None:
    """Clipped colours would nearly all be white."""
    kinds = [*PLACES, *(("float", name) for name in ("red", "green", "blue"))]
    vertices: Rows = [(0, 0, 0, 255, 0, 0), (1, 0, 0, 0, 128, 0), (0, 1, 0, 0, 0, 0)]
    with pytest.raises(InputError, match=r"floats up to 255, .*: divide them by 255"):
        read(tmp_path, ply(FORMS[1], ("vertex", kinds, vertices), ("face", [CORNERS], [((0, 1, 2),)])))
