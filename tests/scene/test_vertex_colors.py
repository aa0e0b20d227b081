"""Colours of vertices: from the file into the geometry, and from there to each pixel."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.errors import InputError
from rooftop.scene import Camera, Geometry, Renderer, Scene, layouts
from rooftop.scene.building.reading import read_mesh

Floats = NDArray[np.float64]


def square() -> tuple[Floats, NDArray[np.int64]]:
    """A square of 9 x 9 points with coordinates 0..1."""
    x, y = np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1, 9), indexing="ij")
    corner = (np.arange(8)[:, None] * 9 + np.arange(8)).ravel()
    faces = [np.stack([corner, corner + 9, corner + 1], 1), np.stack([corner + 1, corner + 9, corner + 10], 1)]
    return np.stack([x, y, 0 * x], -1).reshape(-1, 3), np.concatenate(faces)


@pytest.mark.parametrize(("normals", "uv", "materials"), [*itertools.product([False, True], repeat=3)])
def test_a_pixel_has_the_colour_of_the_point_that_it_shows(
    normals: bool, uv: bool, materials: bool, tmp_path: Path, device: str
) -> None:
    points, faces = square()
    colors = np.stack([points[:, 0], 1 - points[:, 1], 0.25 + 0 * points[:, 0]], 1)
    scene.build(
        points, faces, tmp_path / "square.rtg", "smooth" if normals else None, points[:, :2] * 3 if uv else None,
        np.arange(len(faces)) % 3 if materials else None, colors=colors,
    )  # fmt: skip
    world = Scene()
    world.add_instance(world.add_mesh(tmp_path / "square.rtg"))
    camera = Camera.parallel((0.5, 0.5, 1), (0.5, 0.5, 0), (0, 1, 0), 1.25, 50, 50)
    frame = Renderer(world, device).render(camera, ("vertex_color", "color", "depth", "uv", "material"))
    row, column = np.mgrid[:50, :50]
    x, y = 0.5 + (column - 24.5) / 40, 0.5 - (row - 24.5) / 40
    inside = np.maximum(np.abs(x - 0.5), np.abs(y - 0.5)) < 0.49
    seen = frame["vertex_color"][0].cpu().numpy()
    assert np.abs(seen - np.stack([x, 1 - y, 0.25 + 0 * x], -1))[inside].max() < 4e-3
    assert np.isnan(seen[~np.isfinite(frame["depth"][0].cpu().numpy())]).all()
    lit = frame["color"][0].cpu().numpy()[inside] / seen[inside]
    assert np.ptp(lit[seen[inside] > 0.05]) < 1e-3  # a plane is lit uniformly
    if uv:
        assert np.abs(frame["uv"][0].cpu().numpy() - 3 * np.stack([x, y], -1))[inside].max() < 4e-3
    if materials:
        assert set(frame["material"][0].cpu().numpy()[inside].tolist()) == {0, 1, 2}


def test_a_mesh_without_colours_has_none(tmp_path: Path, device: str) -> None:
    world = Scene()
    points, faces = square()
    scene.build(points, faces, tmp_path / "plain.rtg")
    scene.build(
        points + np.array([0, 0, 0.1]), faces[:4], tmp_path / "red.rtg", colors=np.tile([1.0, 0, 0], (len(points), 1))
    )
    for name in ("plain", "red"):
        world.add_instance(world.add_mesh(tmp_path / f"{name}.rtg"))
    camera = Camera.parallel((0.5, 0.5, 1), (0.5, 0.5, 0), (0, 1, 0), 1.0, 32, 32)
    frame = Renderer(world, device).render(camera, ("vertex_color", "instance"))
    red = frame["instance"] == 1
    assert red.any()
    assert frame["vertex_color"][~red].isnan().all()
    assert (frame["vertex_color"][red].cpu() == frame["vertex_color"].new_tensor([1.0, 0, 0]).cpu()).all()


def test_the_finest_level_has_the_colours_as_given_and_coarser_ones_keep_borders_between_them(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(5)
    colors = np.where(ball.vertices[:, :1] > 0.1, [[255, 0, 0]], [[0, 0, 255]]).astype(np.uint8)
    report = scene.build(ball.vertices, ball.faces, tmp_path / "ball.rtg", colors=colors)
    assert report.roots == 1
    geometry = Geometry.open(tmp_path / "ball.rtg")
    assert geometry.meta["has_colors"]
    levels = geometry.clusters()[:, layouts.CLUSTER_COUNTS] >> 24 & 255
    clusters = [geometry.decode(number) for number in range(geometry.meta["clusters"])]
    for level, cluster in zip(levels.tolist(), clusters, strict=True):
        assert cluster.colors is not None
        wanted = np.where(cluster.positions[:, :1] > 0.1, [[1.0, 0, 0]], [[0, 0, 1.0]])
        assert level or (cluster.colors == wanted).all()
    coarse = [each for level, each in zip(levels.tolist(), clusters, strict=True) if level == 3]
    middles = np.concatenate([each.positions[each.triangles].mean(1) for each in coarse])
    shown = np.concatenate([np.asarray(each.colors)[each.triangles].mean(1) for each in coarse])
    away = np.abs(middles[:, 0] - 0.1) > 0.25
    assert (np.abs(shown[away, 0] - (middles[away, 0] > 0.1)) < 0.4).mean() > 0.98


def test_files_with_and_without_colours_are_of_one_version(tmp_path: Path) -> None:
    points, faces = square()
    for name, colors in (("plain", None), ("colored", np.full((len(points), 3), 7, np.uint8))):
        scene.build(points, faces, tmp_path / name, colors=colors)
    versions = {name: struct.unpack_from("<I", (tmp_path / name).read_bytes(), 8)[0] for name in ("plain", "colored")}
    assert versions == {"plain": layouts.VERSION, "colored": layouts.VERSION}


@pytest.mark.parametrize(
    ("colors", "error", "words"),
    [
        (np.full((81, 3), 1.5), ValueError, "0 to 1"),
        (np.full((81, 3), -0.1), ValueError, "0 to 1"),
        (np.full((81, 3), np.nan), ValueError, "not finite"),
        (np.full((81, 3), 200), ValueError, "uint8"),
        (np.zeros((81, 4)), ValueError, r"\(81, 3\)"),
        (np.zeros((80, 3)), ValueError, r"\(81, 3\)"),
        (np.full((81, 3), "red"), TypeError, "numbers"),
    ],
)
def test_what_cannot_be_a_colour_is_refused(colors: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        scene.build(*square(), tmp_path / "square.rtg", colors=colors)
    assert not list(tmp_path.iterdir())


def glb(path: Path, colors: NDArray[Any], kind: int, of: str, textured: bool = False) -> None:
    """A triangle with these values of COLOR_0, next to a triangle without colours."""
    positions = np.eye(3, dtype="<f4")
    pieces = [positions.tobytes(), colors.tobytes() + bytes(-colors.nbytes % 4), np.zeros((3, 2), "<f4").tobytes()]
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    views = [{"buffer": 0, "byteOffset": a, "byteLength": len(p)} for a, p in zip(starts, pieces, strict=False)]
    if colors.dtype.itemsize * colors.shape[1] % 4:
        raise ValueError("rows begin at multiples of four bytes")
    accessors: list[dict[str, Any]] = [
        {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3", "min": [0, 0, 0], "max": [1, 1, 1]},
        {"bufferView": 1, "componentType": kind, "count": 3, "type": of, "normalized": kind != 5126},
        {"bufferView": 2, "componentType": 5126, "count": 3, "type": "VEC2"},
    ]
    colored = {"POSITION": 0, "COLOR_0": 1} | ({"TEXCOORD_0": 2} if textured else {})
    document = {
        "asset": {"version": "2.0"},
        "scenes": [{"nodes": [0, 1]}],
        "nodes": [{"mesh": 0}, {"mesh": 1, "translation": [5, 0, 0]}],
        "meshes": [
            {"primitives": [{"attributes": colored} | ({"material": 0} if textured else {})]},
            {"primitives": [{"attributes": {"POSITION": 0}}]},
        ],
        "materials": [{"pbrMetallicRoughness": {"baseColorFactor": [1, 1, 1, 1]}}],
        "buffers": [{"byteLength": starts[-1]}],
        "bufferViews": views,
        "accessors": accessors,
    }
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 4)
    body = b"".join(pieces)
    head = struct.pack("<III", 0x46546C67, 2, 28 + len(text) + len(body))
    head += struct.pack("<II", len(text), 0x4E4F534A) + text
    path.write_bytes(head + struct.pack("<II", len(body), 0x004E4942) + body)


COLORS = np.array([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0], [0.0, 0.125, 1.0]])


@pytest.mark.parametrize("textured", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "most", "of"),
    [(5126, "<f4", 1, "VEC3"), (5126, "<f4", 1, "VEC4"), (5121, "u1", 255, "VEC4"), (5123, "<u2", 65535, "VEC4")],
)
def test_colours_of_gltf(kind: int, dtype: str, most: int, of: str, textured: bool, tmp_path: Path) -> None:
    colors = COLORS if of == "VEC3" else np.column_stack([COLORS, np.ones(3)])
    stored = (colors * most if kind == 5126 else np.rint(colors * most)).astype(dtype)
    glb(tmp_path / "mesh.glb", stored, kind, of, textured)
    found = read_mesh(tmp_path / "mesh.glb")
    assert found.colors is not None
    first = found.vertices[:, 0] < 2
    assert np.abs(found.colors[first] / 255 - COLORS).max() <= 0.51 / 255 + 1e-9
    assert (found.colors[~first] == 255).all()


def test_alpha_is_left_out_with_a_warning(tmp_path: Path) -> None:
    glb(tmp_path / "mesh.glb", np.column_stack([COLORS, [1, 0.5, 1]]).astype("<f4"), 5126, "VEC4")
    with pytest.warns(UserWarning, match="alpha"):
        found = read_mesh(tmp_path / "mesh.glb")
    assert found.colors is not None
    assert found.colors.shape[1] == 3


@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_colours_of_other_files(suffix: str, tmp_path: Path) -> None:
    numbers = np.rint(255 * COLORS).astype(int).tolist()
    corners = np.eye(3).astype(int).tolist()
    if suffix == ".ply":
        names = [
            *(f"property float {axis}" for axis in "xyz"),
            *(f"property uchar {c}" for c in ("red", "green", "blue")),
        ]
        head = ["ply", "format ascii 1.0", "element vertex 3", *names, "element face 1"]
        lines = [*head, "property list uchar int vertex_indices", "end_header"]
        lines += [" ".join(map(str, [*a, *b])) for a, b in zip(corners, numbers, strict=True)] + ["3 0 1 2"]
    else:
        lines = [" ".join(map(str, ["v", *a, *b])) for a, b in zip(corners, COLORS.tolist(), strict=True)] + ["f 1 2 3"]
    (tmp_path / f"mesh{suffix}").write_text("\n".join(lines) + "\n")
    found = read_mesh(tmp_path / f"mesh{suffix}")
    assert found.colors is not None
    assert np.abs(found.colors.astype(int) - numbers).max() <= 1
    scene.build_file(tmp_path / f"mesh{suffix}")
    assert Geometry.open(tmp_path / "mesh.rtg").meta["has_colors"]


def test_colours_of_an_obj_file_with_uv_are_left_out_with_a_warning(tmp_path: Path) -> None:
    lines = [f"v {a} {b} 0 1 0.5 0" for a, b in ((0, 0), (1, 0), (0, 1))] + [
        "vt 0 0",
        "vt 1 0",
        "vt 0 1",
        "f 1/1 2/2 3/3",
    ]
    (tmp_path / "mesh.obj").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="colours"):
        found = read_mesh(tmp_path / "mesh.obj")
    assert found.colors is None
    assert found.uv is not None


@pytest.mark.parametrize(
    ("red", "words"), [("255", "up to 255, .* by 255"), ("1.5", "up to 1.5, .* by 1.5"), ("nan", "nan")]
)
def test_colours_of_an_obj_file_beyond_one_are_refused(red: str, words: str, tmp_path: Path) -> None:
    """Clipped colours would all be white."""
    (tmp_path / "mesh.obj").write_text(f"v 0 0 0 0 0 0\nv 1 0 0 {red} 0 0\nv 0 1 0 0 0 0\nf 1 2 3\n")
    with pytest.raises(InputError, match=f"mesh.obj: its vertex colours go .*{words}"):
        read_mesh(tmp_path / "mesh.obj")


def test_colours_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    glb(tmp_path / "mesh.glb", np.where(COLORS == 1, np.nan, COLORS).astype("<f4"), 5126, "VEC3", textured=True)
    with pytest.raises(InputError, match=r"mesh\.glb.*finite"):
        read_mesh(tmp_path / "mesh.glb")


def test_wide_integers_as_colours_of_a_ply_file_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """trimesh would keep the lowest 8 bits of each."""
    names = [*(f"property float {axis}" for axis in "xyz"), *(f"property ushort {c}" for c in ("red", "green", "blue"))]
    head = ["ply", "format ascii 1.0", "element vertex 3", *names, "element face 1"]
    lines = [*head, "property list uchar int vertex_indices", "end_header"]
    lines += [f"{x} {y} 0 0 32768 65535" for x, y in ((0, 0), (1, 0), (0, 1))] + ["3 0 1 2"]
    (tmp_path / "mesh.ply").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="ushort"):
        found = read_mesh(tmp_path / "mesh.ply")
    assert found.colors is None


def test_a_texture_of_a_ply_file_is_left_out_with_a_warning(tmp_path: Path) -> None:
    head = ["ply", "format ascii 1.0", "comment TextureFile my scan.png", "element vertex 3"]
    head += [*(f"property float {axis}" for axis in "xyz"), "element face 1"]
    lines = [*head, "property list uchar int vertex_indices", "end_header", "0 0 0", "1 0 0", "0 1 0", "3 0 1 2"]
    (tmp_path / "mesh.ply").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match=r"mesh\.ply: its texture my scan\.png is ignored"):
        assert read_mesh(tmp_path / "mesh.ply").table is None


def test_colours_of_faces_and_of_some_vertices_only_are_left_out_with_a_warning(tmp_path: Path) -> None:
    places = ("0 0 0", "1 0 0", "0 1 0")
    head = ["ply", "format ascii 1.0", "element vertex 3", *(f"property float {axis}" for axis in "xyz")]
    head += ["element face 1", "property list uchar int vertex_indices"]
    head += [*(f"property uchar {c}" for c in ("red", "green", "blue")), "end_header"]
    (tmp_path / "faces.ply").write_text("\n".join([*head, *places, "3 0 1 2 255 0 0"]) + "\n")
    with pytest.warns(UserWarning, match="faces"):
        assert read_mesh(tmp_path / "faces.ply").colors is None
    lines = [f"v {places[0]} 1 0 0", f"v {places[1]} 1 0 0", f"v {places[2]}", "f 1 2 3"]
    (tmp_path / "some.obj").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="only if every vertex has a colour"):
        assert read_mesh(tmp_path / "some.obj").colors is None
