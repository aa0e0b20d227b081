"""glTF files with every form of geometry: the loaded mesh has the corners that the values define."""

from __future__ import annotations

import base64
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftop.errors import InputError
from rooftop.scene.building.gltf_meshes import plain_gltf
from rooftop.scene.building.reading import MeshFile, read_mesh

pytest.importorskip("trimesh")

CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], "<f4")
TWO = np.array([0, 1, 2, 2, 1, 3], "<u2")
NUMBERS = {"i1": 5120, "u1": 5121, "i2": 5122, "u2": 5123, "u4": 5125, "f4": 5126}


class Gltf:
    """A document with one mesh, and its bytes."""

    def __init__(self) -> None:
        self.binary = b""
        self.document: dict[str, Any] = {
            "asset": {"version": "2.0"},
            "scene": 0,
            "scenes": [{"nodes": [0]}],
            "nodes": [{"mesh": 0}],
            "meshes": [{"primitives": []}],
            "bufferViews": [],
            "accessors": [],
        }

    def view(self, values: np.ndarray, **more: Any) -> int:
        self.binary += bytes(-len(self.binary) % 4)
        described = {"buffer": 0, "byteOffset": len(self.binary), "byteLength": values.nbytes, **more}
        self.document["bufferViews"].append(described)
        self.binary += values.tobytes()
        return len(self.document["bufferViews"]) - 1

    def values(self, values: np.ndarray, of: str = "VEC3", stride: int = 0, **more: Any) -> int:
        width = {"SCALAR": 1, "VEC2": 2, "VEC3": 3}[of]
        rows = values.reshape(len(values) if of != "SCALAR" else -1, width)
        padded = rows
        if stride:
            padded = np.zeros((len(rows), stride // values.itemsize), values.dtype)
            padded[:, :width] = rows
        self.document["accessors"].append(
            {
                "bufferView": self.view(padded, **({"byteStride": stride} if stride else {})),
                "componentType": NUMBERS[values.dtype.str[1:]],
                "count": len(rows),
                "type": of,
                **more,
            }
        )
        return len(self.document["accessors"]) - 1

    def part(self, positions: int, indices: int | None = None, mode: int | None = None, **attributes: int) -> None:
        primitive: dict[str, Any] = {"attributes": {"POSITION": positions, **attributes}}
        primitive |= {} if indices is None else {"indices": indices}
        primitive |= {} if mode is None else {"mode": mode}
        self.document["meshes"][0]["primitives"].append(primitive)

    def read(self, folder: Path, form: str = "glb") -> MeshFile:
        return read_mesh(self.saved(folder, form))

    def saved(self, folder: Path, form: str = "glb") -> Path:
        buffer: dict[str, Any] = {"byteLength": len(self.binary)}
        if form == "file":
            (folder / "a b.bin").write_bytes(self.binary)
            buffer["uri"] = "a%20b.bin"
        elif form == "data":
            buffer["uri"] = "data:application/octet-stream;base64," + base64.b64encode(self.binary).decode()
        text = json.dumps(self.document | {"buffers": [buffer]}).encode()
        path = folder / ("a.glb" if form == "glb" else "a.gltf")
        if form == "glb":
            text, binary = text + b" " * (-len(text) % 4), self.binary + bytes(-len(self.binary) % 4)
            head = struct.pack("<III", 0x46546C67, 2, 28 + len(text) + len(binary))
            chunks = (
                struct.pack("<II", len(text), 0x4E4F534A),
                text,
                struct.pack("<II", len(binary), 0x004E4942),
                binary,
            )
            text = head + b"".join(chunks)
        path.write_bytes(text)
        return path


def area(mesh: MeshFile) -> float:
    corners = mesh.vertices[mesh.faces]
    return float(
        np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1).sum() / 2
    )


def towards(mesh: MeshFile) -> set[float]:
    """The z coordinates of the faces' normals."""
    corners = mesh.vertices[mesh.faces]
    return set(np.sign(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])[:, 2]).tolist())


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("mode", "order"), [(5, [0, 1, 2, 3]), (6, [0, 1, 3, 2])])
def test_strips_and_fans_are_triangles(tmp_path: Path, mode: int, order: list[int], indexed: bool) -> None:
    """Strips and fans may be next to other primitives, and all their triangles face the same way."""
    gltf = Gltf()
    plain = gltf.values(CORNERS + np.array([5, 0, 0], "<f4"))
    gltf.part(plain, gltf.values(TWO, "SCALAR"))
    if indexed:
        gltf.part(gltf.values(CORNERS), gltf.values(np.array(order, "u1"), "SCALAR"), mode)
    else:
        gltf.part(gltf.values(CORNERS[order]), None, mode)
    mesh = gltf.read(tmp_path)
    assert (len(mesh.faces), area(mesh)) == (4, pytest.approx(2.0))
    assert towards(mesh) == {1.0}


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", "<u2"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("form", ["glb", "data", "file"])
def test_quantized_meshes(tmp_path: Path, dtype: str, normalized: bool, form: str) -> None:
    gltf, most = Gltf(), np.iinfo(dtype).max
    positions = gltf.values((CORNERS * most).astype(dtype), stride=8, normalized=normalized)
    uv = gltf.values((CORNERS[:, :2] * 255).astype("u1"), "VEC2", stride=4, normalized=True)
    normals = gltf.values(np.array([[0, 0, 127]] * 4, "i1"), stride=4, normalized=True)
    gltf.part(positions, gltf.values(TWO, "SCALAR"), TEXCOORD_0=uv, NORMAL=normals)
    gltf.document["extensionsRequired"] = gltf.document["extensionsUsed"] = ["KHR_mesh_quantization"]
    mesh = gltf.read(tmp_path, form)
    plain = Gltf()
    positions, uv = plain.values(CORNERS * np.float32(1 if normalized else most)), plain.values(CORNERS[:, :2], "VEC2")
    normals = plain.values(np.array([[0, 0, 1]] * 4, "<f4"))
    plain.part(positions, plain.values(TWO, "SCALAR"), TEXCOORD_0=uv, NORMAL=normals)
    expected = plain.read(tmp_path)
    for name in ("vertices", "faces", "uv", "normals"):
        np.testing.assert_allclose(getattr(mesh, name), getattr(expected, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("base", [True, False])
def test_sparse_values_replace_others(tmp_path: Path, base: bool) -> None:
    gltf = Gltf()
    positions = gltf.values(CORNERS)
    new = np.array([[5, 0, 0], [5, 1, 0]] if base else [[1, 0, 0], [0, 1, 0]], "<f4")
    places = np.array([1, 3] if base else [1, 2], "u1")
    gltf.document["accessors"][positions]["sparse"] = {
        "count": 2,
        "indices": {"bufferView": gltf.view(places), "componentType": 5121},
        "values": {"bufferView": gltf.view(new)},
    }
    if not base:  # all others are 0
        del gltf.document["accessors"][positions]["bufferView"]
    indices = gltf.values(TWO, "SCALAR")
    gltf.document["accessors"][indices]["sparse"] = {
        "count": 1,
        "indices": {"bufferView": gltf.view(np.array([5], "<u2")), "componentType": 5123},
        "values": {"bufferView": gltf.view(np.array([3 if base else 0], "<u2"))},
    }
    gltf.part(positions, indices)
    mesh = gltf.read(tmp_path)
    assert area(mesh) == pytest.approx(5.0 if base else 1.0)


def test_what_is_plain_stays_and_points_are_told(tmp_path: Path) -> None:
    gltf = Gltf()
    positions = gltf.values(CORNERS)
    gltf.part(positions, gltf.values(TWO, "SCALAR"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain_gltf(gltf.saved(tmp_path)) == (None, [])
    for mode in (0, 0, 1, 3):
        gltf.part(positions, None, mode)
    with pytest.warns(UserWarning, match=r"not surfaces are ignored \(2 of points, 1 of lines, 1 of a line\)"):
        assert area(gltf.read(tmp_path)) == pytest.approx(1.0)


def test_scenes_that_are_not_read_are_told(tmp_path: Path) -> None:
    gltf = Gltf()
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"))
    mesh = gltf.document["meshes"][0]
    gltf.document |= {"nodes": [{"mesh": 0}, {"mesh": 0, "scale": [2, 2, 2]}], "meshes": [mesh]}
    gltf.document |= {"scenes": [{"nodes": [0]}, {"nodes": [1]}], "scene": 1}
    with pytest.warns(UserWarning, match="only the default one of its 2 scenes is read"):
        assert area(gltf.read(tmp_path)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("extension", "required"),
    [
        ("KHR_draco_mesh_compression", True),
        ("EXT_meshopt_compression", False),
        ("EXT_mesh_gpu_instancing", False),
        ("ACME_mesh_folding", True),
    ],
)
def test_other_forms_of_geometry_are_refused_by_name(tmp_path: Path, extension: str, required: bool) -> None:
    gltf = Gltf()
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"))
    gltf.document["extensionsRequired" if required else "extensionsUsed"] = ["KHR_materials_unlit", extension]
    with pytest.raises(InputError, match=f"{extension}.*(convert it, for example with|export it without)"):
        gltf.read(tmp_path)


def test_extensions_of_materials_are_no_geometry(tmp_path: Path) -> None:
    gltf = Gltf()
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"))
    gltf.document["extensionsUsed"] = ["KHR_materials_clearcoat", "ACME_physics"]
    assert area(gltf.read(tmp_path)) == pytest.approx(1.0)


def test_damaged_files_say_so(tmp_path: Path) -> None:
    gltf = Gltf()
    gltf.part(gltf.values((CORNERS * 127).astype("i1"), stride=4), gltf.values(TWO, "SCALAR"))
    for number, change in enumerate((("count", 400), ("componentType", 9), ("bufferView", 77), ("type", "VEC9"))):
        spoilt = json.loads(json.dumps(gltf.document))
        spoilt["accessors"][0][change[0]] = change[1]
        other = Gltf()
        other.document, other.binary = spoilt, gltf.binary
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(InputError, match="damaged glTF file"):
            other.read(folder)
    for name, wrong in (("materials", [1]), ("asset", []), ("nodes", [{"mesh": 0, "children": [1e999]}])):
        other = Gltf()
        other.document, other.binary = json.loads(json.dumps(gltf.document)) | {name: wrong}, gltf.binary
        with pytest.raises(InputError, match="damaged glTF file"):
            plain_gltf(other.saved(tmp_path))
    whole = gltf.saved(tmp_path).read_bytes()
    (tmp_path / "cut.glb").write_bytes(whole[:-10])
    with pytest.raises(InputError, match="bytes too short"):
        read_mesh(tmp_path / "cut.glb")
    path = gltf.saved(tmp_path, "file")
    (tmp_path / "a b.bin").unlink()
    with pytest.raises(InputError, match=r"names a%20b\.bin, which is not a file beside the document"):
        read_mesh(path)


def test_files_beside_a_document_with_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gltf = Gltf()
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"))
    path = gltf.saved(tmp_path, "file")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(read_mesh(Path("..") / path.name).faces) == 2


# ---- nodes, skins and morph targets ----------------------------------------------------------------------------------


def square() -> Gltf:
    gltf = Gltf()
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"))
    return gltf


def random_place(rng: np.random.Generator) -> dict[str, Any]:
    turn = rng.normal(size=4)
    return {
        "translation": rng.normal(size=3).tolist(),
        "rotation": (turn / np.linalg.norm(turn)).tolist(),
        "scale": rng.uniform(0.5, 2, 3).tolist(),
    }


def test_nodes_are_placed_as_trimesh_places_them(tmp_path: Path) -> None:
    import trimesh

    rng, gltf = np.random.default_rng(0), square()
    matrix = trimesh.transformations.compose_matrix(translate=(1, 2, 3), angles=(1, 2, 3)).T.ravel().tolist()
    gltf.document["nodes"] = [
        {"children": [1, 2], **random_place(rng)},
        {"mesh": 0, "children": [3], **random_place(rng)},
        {"mesh": 0, "matrix": matrix},
        {"mesh": 0, **random_place(rng)},
    ]
    path = gltf.saved(tmp_path)
    loaded = trimesh.load_scene(path, process=False).to_geometry().vertices
    mesh = read_mesh(path)
    assert len(mesh.vertices) == 12
    np.testing.assert_allclose(
        sorted(mesh.vertices.round(5).tolist()), sorted(loaded.round(5).tolist()), rtol=0, atol=2e-5
    )


def test_cameras_and_hidden_nodes_do_not_hide_meshes(tmp_path: Path) -> None:
    """A camera's node may have a mesh and children; a hidden node hides its children, and nothing else."""
    gltf, hidden = square(), {"extensions": {"KHR_node_visibility": {"visible": False}}}
    gltf.document["cameras"] = [{"type": "perspective", "perspective": {"yfov": 1, "znear": 0.1, "aspectRatio": 1}}]
    gltf.document["nodes"] = [
        {"camera": 0, "mesh": 0, "children": [1], "translation": [10, 0, 0]},
        {"mesh": 0, "translation": [10, 0, 0]},
        {"mesh": 0, "children": [3], **hidden},
        {"mesh": 0},
    ]
    gltf.document["scenes"] = [{"nodes": [0, 2]}]
    assert sorted(set(gltf.read(tmp_path).vertices[:, 0].tolist())) == [10, 11, 20, 21]


def test_a_chain_of_a_thousand_nodes(tmp_path: Path) -> None:
    gltf = square()
    links = [{"translation": [1, 0, 0], "children": [number + 1]} for number in range(1000)]
    gltf.document["nodes"] = [*links, {"mesh": 0}]
    assert gltf.read(tmp_path).vertices[:, 0].max() == 1001


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"children": [1]}, {"children": [1], "mesh": 0}], "node 1 has the parents 0 and 1"),
        ([{"mesh": 0}, {"children": [2]}, {"children": [1]}], "their own ancestors"),
        ([{"mesh": 0, "children": [1]}, {"translation": [np.nan, 0, 0]}], "node 1 has numbers that are not finite"),
    ],
)
def test_nodes_that_are_no_trees(tmp_path: Path, nodes: list[dict[str, Any]], message: str) -> None:
    gltf = square()
    gltf.document["nodes"] = nodes
    with pytest.raises(InputError, match=f"damaged glTF file.*{message}"):
        gltf.read(tmp_path)


def test_weights_of_morph_targets(tmp_path: Path) -> None:
    """A node's weights replace those of its mesh; both may be used in one file."""
    gltf = square()
    up, right = (gltf.values(np.tile(np.array(each, "<f4"), (4, 1))) for each in ((0, 0, 4), (8, 0, 0)))
    gltf.document["meshes"][0]["primitives"][0]["targets"] = [{"POSITION": up}, {"POSITION": right}]
    gltf.document["meshes"][0]["weights"] = [0.5, 0]
    gltf.document["nodes"] = [{"mesh": 0}, {"mesh": 0, "weights": [1, 0.25]}, {"mesh": 0, "weights": [0, 0]}]
    gltf.document["scenes"] = [{"nodes": [0, 1, 2]}]
    moves = gltf.read(tmp_path).vertices.reshape(3, 4, 3) - CORNERS
    assert (moves == moves[:, :1]).all()
    assert sorted(moves[:, 0].tolist()) == [[0, 0, 0], [0, 0, 2], [2, 0, 4]]


@pytest.mark.parametrize("bytes_of_weights", [False, True])
def test_a_skin_follows_its_joints(tmp_path: Path, bytes_of_weights: bool) -> None:
    """Its own node's transform does not count. The oracle poses each vertex by the formula of the specification."""
    import trimesh

    rng, gltf = np.random.default_rng(1), Gltf()
    normals = np.array([[0, 0, 1]] * 4, "<f4")
    joints = rng.integers(0, 2, (4, 4)).astype("u1")
    shares = rng.dirichlet(np.ones(4), 4).astype("<f4")
    if bytes_of_weights:
        shares = np.array([[255, 0, 0, 0], [0, 255, 0, 0], [51, 204, 0, 0], [0, 0, 0, 255]], "u1")
    bind = rng.normal(size=(2, 4, 4)).astype("<f4")
    bind[:, 3] = (0, 0, 0, 1)
    numbers = [gltf.values(each, "SCALAR") for each in (joints, shares, bind.transpose(0, 2, 1).copy())]
    for number, kind, count in zip(numbers, ("VEC4", "VEC4", "MAT4"), (4, 4, 2), strict=True):
        gltf.document["accessors"][number] |= {"type": kind, "count": count, "normalized": shares.dtype == "u1"}
    gltf.document["accessors"][numbers[0]]["normalized"] = False
    attributes = {"NORMAL": gltf.values(normals), "JOINTS_0": numbers[0], "WEIGHTS_0": numbers[1]}
    gltf.part(gltf.values(CORNERS), gltf.values(TWO, "SCALAR"), **attributes)
    gltf.document["skins"] = [{"joints": [1, 2], "inverseBindMatrices": numbers[2]}]
    places = [random_place(rng) for _ in range(3)]
    gltf.document["nodes"] = [
        {"mesh": 0, "skin": 0, **places[0]},
        {"children": [2], **places[1]},
        places[2],
    ]
    gltf.document["scenes"] = [{"nodes": [0, 1]}]
    mesh = gltf.read(tmp_path)

    one, two = (
        trimesh.transformations.translation_matrix(place["translation"])
        @ trimesh.transformations.quaternion_matrix(np.roll(place["rotation"], 1))
        @ np.diag([*place["scale"], 1])
        for place in places[1:]
    )
    of = np.stack([one, one @ two]) @ bind
    for vertex in range(4):
        weight = shares[vertex] / (255 if bytes_of_weights else 1)
        matrix = sum(weight[k] * of[joints[vertex, k]] for k in range(4))
        np.testing.assert_allclose(mesh.vertices[vertex], (matrix @ [*CORNERS[vertex], 1])[:3], rtol=1e-4, atol=1e-5)
        normal = np.linalg.inv(matrix[:3, :3]).T @ normals[vertex] * np.sign(np.linalg.det(matrix[:3, :3]))
        assert mesh.normals is not None
        np.testing.assert_allclose(mesh.normals[vertex], normal / np.linalg.norm(normal), atol=1e-4)


def test_version_1_is_refused_by_name(tmp_path: Path) -> None:
    gltf = square()
    gltf.document["asset"]["version"] = "1.0"
    with pytest.raises(InputError, match=r"is a file of glTF 1\.0, but only glTF 2 is supported: convert it"):
        gltf.read(tmp_path)
    (tmp_path / "old.glb").write_bytes(struct.pack("<5I", 0x46546C67, 1, 99, 60, 0) + bytes(79))
    with pytest.raises(InputError, match="is a file of glTF 1, but only glTF 2 is supported"):
        read_mesh(tmp_path / "old.glb")
