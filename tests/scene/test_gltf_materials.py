"""Base colours and textures of glTF in each way in which a file can have them."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rooftop import scene
from rooftop.errors import InputError
from rooftop.scene import Geometry, Material
from rooftop.scene.building.reading import MeshFile, read_mesh
from rooftop.scene.materials import to_displayed

pytest.importorskip("trimesh")

CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], "<f4")
UV = np.array([[0, 1], [1, 1], [0, 0], [1, 0]], "<f4")  # v points downwards, so the upper edge is at 0
TWO = np.array([0, 1, 2, 2, 1, 3], "<u2")
RGB = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)


def encoded(pixels: Any = RGB, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind, **options)
    return file.getvalue()


class Textured:
    """A document of parts with two triangles each, and their materials."""

    def __init__(self) -> None:
        self.binary = b""
        self.document: dict[str, Any] = {
            "asset": {"version": "2.0"}, "scene": 0, "scenes": [{"nodes": [0]}], "nodes": [{"mesh": 0}],
            "meshes": [{"primitives": []}], "bufferViews": [], "accessors": [], "materials": [],
        }  # fmt: skip

    def view(self, content: bytes) -> int:
        self.binary += bytes(-len(self.binary) % 4)
        described = {"buffer": 0, "byteOffset": len(self.binary), "byteLength": len(content)}
        self.document["bufferViews"].append(described)
        self.binary += content
        return len(self.document["bufferViews"]) - 1

    def values(self, values: np.ndarray, of: str) -> int:
        kind = {"<f4": 5126, "<u2": 5123}[values.dtype.str]
        accessor = {"bufferView": self.view(values.tobytes()), "componentType": kind, "count": len(values), "type": of}
        self.document["accessors"].append(accessor)
        return len(self.document["accessors"]) - 1

    def part(self, material: int | None = None, uv: bool = True, **attributes: int) -> None:
        named = {"POSITION": self.values(CORNERS + np.float32(2 * len(self.parts)), "VEC3")} | attributes
        if uv:
            named.setdefault("TEXCOORD_0", self.values(UV, "VEC2"))
        part = {"attributes": named, "indices": self.values(TWO, "SCALAR")}
        self.parts.append(part | ({} if material is None else {"material": material}))

    @property
    def parts(self) -> list[Any]:
        found: list[Any] = self.document["meshes"][0]["primitives"]
        return found

    def material(self, info: dict[str, Any] | None = None, **more: Any) -> int:
        base = {} if info is None else {"pbrMetallicRoughness": {"baseColorTexture": info}}
        self.document["materials"].append(base | more)
        return len(self.document["materials"]) - 1

    def texture(self, **image: Any) -> dict[str, Any]:
        """A material's entry for a new texture."""
        images, textures = (self.document.setdefault(name, []) for name in ("images", "textures"))
        images.append(image)
        textures.append({"source": len(images) - 1})
        return {"index": len(textures) - 1}

    def embedded(self, content: bytes | None = None) -> dict[str, Any]:
        content = encoded() if content is None else content
        return self.texture(bufferView=self.view(content), mimeType="image/png")

    def saved(self, folder: Path) -> Path:
        import json

        uri = "data:application/octet-stream;base64," + base64.b64encode(self.binary).decode()
        path = folder / "a.gltf"
        path.write_text(json.dumps(self.document | {"buffers": [{"byteLength": len(self.binary), "uri": uri}]}))
        return path

    def read(self, folder: Path, textures: bool = True) -> MeshFile:
        return read_mesh(self.saved(folder), textures)


def only(mesh: MeshFile) -> Material:
    assert mesh.table is not None
    (found,) = mesh.table
    return found


def texels(material: Material) -> np.ndarray:
    assert material.texture is not None
    return material.texture.texels()


# ---- colours ---------------------------------------------------------------------------------------------------------


def test_factors_are_in_linear_light(tmp_path: Path) -> None:
    """A material without a factor is white. The alpha of an opaque material has no effect."""
    gltf = Textured()
    gltf.part(gltf.material(name="skin", pbrMetallicRoughness={"baseColorFactor": [0.5, 0.25, 1, 0.2]}))
    gltf.part(gltf.material(name="plain"))
    gltf.part()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = gltf.read(tmp_path)
    assert mesh.table is not None
    assert [each.name for each in mesh.table] == ["skin", "plain", ""]
    assert np.allclose(mesh.table[0].color, to_displayed([0.5, 0.25, 1]))
    assert [each.color for each in mesh.table[1:]] == [(1, 1, 1), (1, 1, 1)]
    assert mesh.materials.tolist() == [0, 0, 1, 1, 2, 2]


def test_materials_that_say_nothing_are_none(tmp_path: Path) -> None:
    gltf = Textured()
    gltf.part(gltf.material(name="plain", pbrMetallicRoughness={"metallicFactor": 0.5}))
    assert gltf.read(tmp_path).table is None


def test_specular_and_glossy_materials_have_a_diffuse_colour(tmp_path: Path) -> None:
    gltf = Textured()
    older = {"diffuseFactor": [1, 0, 0, 1], "diffuseTexture": gltf.embedded()}
    gltf.part(gltf.material(extensions={"KHR_materials_pbrSpecularGlossiness": older}))
    found = only(gltf.read(tmp_path))
    assert found.color == (1, 0, 0)
    assert np.array_equal(texels(found), RGB)


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("form", ["view", "data", "file"])
def test_images_in_each_place(tmp_path: Path, form: str, kind: str) -> None:
    content = encoded(kind=kind)
    gltf = Textured()
    if form == "view":
        info = gltf.embedded(content)
    elif form == "data":
        info = gltf.texture(uri="data:image/png;base64," + base64.b64encode(content).decode())
    else:
        (tmp_path / "maps").mkdir()
        (tmp_path / "maps" / "a b").write_bytes(content)
        info = gltf.texture(uri="maps/a%20b")
    gltf.part(gltf.material(info, name="brick"))
    found = only(gltf.read(tmp_path))
    assert found.texture is not None
    assert found.texture.encoded() == content
    assert found.name == "brick"
    assert found.wrap == ("repeat", "repeat")


def test_samplers_say_how_an_image_repeats(tmp_path: Path) -> None:
    gltf = Textured()
    gltf.document["samplers"] = [{"wrapS": 33071, "wrapT": 33648, "magFilter": 9728}, {"wrapS": 10497}]
    for sampler in (0, 1):
        info = gltf.embedded()
        gltf.document["textures"][info["index"]]["sampler"] = sampler
        gltf.part(gltf.material(info))
    mesh = gltf.read(tmp_path)
    assert mesh.table is not None
    assert [(each.wrap, each.magnified) for each in mesh.table] == [
        (("clamp", "mirror"), "nearest"),
        (("repeat", "repeat"), "linear"),
    ]


@pytest.mark.parametrize(("extension", "kind"), [("EXT_texture_webp", "WEBP"), ("MSFT_texture_dds", "DDS")])
def test_images_of_extensions(tmp_path: Path, extension: str, kind: str) -> None:
    """Images of extensions take precedence over the fallback image for programs without these extensions."""
    gltf = Textured()
    wanted = encoded(kind=kind, **({"lossless": True} if kind == "WEBP" else {}))
    gltf.document["images"] = [{"bufferView": gltf.view(encoded(255 - RGB))}, {"bufferView": gltf.view(wanted)}]
    gltf.document["textures"] = [{"source": 0, "extensions": {extension: {"source": 1}}}]
    gltf.document["extensionsRequired"] = [extension]
    gltf.part(gltf.material({"index": 0}))
    assert np.array_equal(texels(only(gltf.read(tmp_path))), RGB)


def test_images_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    """The error suggests a remedy. Without textures, the rest can be read."""
    gltf = Textured()
    gltf.document["images"] = [{"bufferView": gltf.view(b"ktx2")}]
    gltf.document["textures"] = [{"extensions": {"KHR_texture_basisu": {"source": 0}}}]
    gltf.part(gltf.material({"index": 0}, name="brick"))
    with pytest.raises(InputError, match=r"a\.gltf: .*material 0 \(brick\) is in KHR_texture_basisu.*--no-textures"):
        gltf.read(tmp_path)
    assert gltf.read(tmp_path, textures=False).table is None
    gltf.document["textures"] = [{}]
    with pytest.raises(InputError, match=r"a\.gltf: the texture of material 0 \(brick\) names no image.*--no-textures"):
        gltf.read(tmp_path)
    for content, match in (
        (b"no image", r"a\.gltf: material 0 \(brick\): image is not an image that can be read"),
        (encoded()[:60], r"a\.gltf: material 0 \(brick\): image cannot be decoded.*damaged"),
    ):
        gltf = Textured()
        gltf.part(gltf.material(gltf.embedded(content), name="brick"))
        with pytest.raises(InputError, match=match + ".*--no-textures"):
            gltf.read(tmp_path)
    outside = tmp_path / "in"
    outside.mkdir()
    (tmp_path / "b.png").write_bytes(encoded())
    for uri, why in (
        ("gone.png", "which is not a file beside the document"),
        ("../b.png", "which is outside the document's folder"),
    ):
        gltf = Textured()
        gltf.part(gltf.material(gltf.texture(uri=uri), name="brick"))
        with pytest.raises(InputError, match=rf"material 0 \(brick\) names the image .?{uri}.?, {why}.*--no-textures"):
            gltf.read(outside)
    (outside / "link.png").symlink_to(tmp_path / "b.png")
    for uri in ("link.png", "../in/link.png", str(outside / "link.png")):
        gltf = Textured()
        gltf.part(gltf.material(gltf.texture(uri=uri), name="brick"))
        assert gltf.read(outside).table is not None


@pytest.mark.parametrize("wrong", [{"index": 7}, {"index": "x"}, {}])
def test_damaged_materials_say_so(tmp_path: Path, wrong: dict[str, Any]) -> None:
    gltf = Textured()
    gltf.embedded()
    gltf.part(gltf.material(wrong))
    with pytest.raises(InputError, match="damaged glTF file"):
        gltf.read(tmp_path)


# ---- texture coordinates ---------------------------------------------------------------------------------------------


def test_textures_take_the_set_of_coordinates_that_they_name(tmp_path: Path) -> None:
    for place in ("info", "transform"):
        gltf = Textured()
        info = gltf.embedded()
        if place == "info":
            info["texCoord"] = 1
        else:
            info |= {"texCoord": 5, "extensions": {"KHR_texture_transform": {"texCoord": 1}}}
        other = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]], "<f4")
        gltf.part(gltf.material(info), TEXCOORD_1=gltf.values(other, "VEC2"))
        mesh = gltf.read(tmp_path)
        assert mesh.uv is not None
        assert np.allclose(mesh.uv, np.column_stack([other[:, 0], 1 - other[:, 1]]), atol=1e-6)


def test_transforms_are_applied_to_coordinates(tmp_path: Path) -> None:
    """With v downwards, an image is rotated counterclockwise: a quarter turn moves the right edge to the top."""
    for transform, expected in (
        ({"offset": [0.25, 0.5]}, np.add(UV, (0.25, 0.5))),
        ({"scale": [2, 4]}, UV * (2, 4)),
        ({"rotation": np.pi / 2}, np.column_stack([UV[:, 1], -UV[:, 0]])),
        ({"rotation": 0.3, "scale": [2, 3], "offset": [0.5, 0.25]}, None),
    ):
        gltf = Textured()
        info = gltf.embedded() | {"extensions": {"KHR_texture_transform": transform}}
        gltf.document["extensionsRequired"] = ["KHR_texture_transform"]
        gltf.part(gltf.material(info))
        mesh = gltf.read(tmp_path)
        if expected is None:
            x, y = (UV * (2, 3)).T
            c, s = np.cos(0.3), np.sin(0.3)
            expected = np.column_stack([c * x + s * y + 0.5, -s * x + c * y + 0.25])
        assert mesh.uv is not None
        assert np.allclose(mesh.uv, np.column_stack([expected[:, 0], 1 - expected[:, 1]]), atol=1e-6)


def test_a_texture_without_coordinates_is_told(tmp_path: Path) -> None:
    """The part without coordinates has only the colour; other parts keep their textures."""
    gltf = Textured()
    brick = gltf.material(gltf.embedded(), name="brick")
    gltf.document["materials"][brick]["pbrMetallicRoughness"]["baseColorFactor"] = [1, 0, 0, 1]
    gltf.part(brick, uv=False)
    gltf.part(brick)
    gltf.part(uv=False)
    with pytest.warns(UserWarning, match="material brick has a texture, but part GLTF has no texture coordinates"):
        mesh = gltf.read(tmp_path)
    assert mesh.table is not None
    assert [each.texture is None for each in mesh.table] == [True, False, True]
    assert [each.color for each in mesh.table] == [(1, 0, 0), (1, 0, 0), (1, 1, 1)]
    assert mesh.uv is not None
    assert (mesh.uv[:4] == 0).all()
    assert np.allclose(mesh.uv[4:8], np.column_stack([UV[:, 0], 1 - UV[:, 1]]))
    gltf = Textured()
    gltf.part(gltf.material(gltf.embedded() | {"texCoord": 2}))  # a missing set
    with pytest.warns(UserWarning, match="no texture coordinates for it"):
        assert gltf.read(tmp_path).uv is None


@pytest.mark.parametrize("mode", ["MASK", "BLEND"])
def test_transparency_is_told(tmp_path: Path, mode: str) -> None:
    gltf = Textured()
    for name in ("leaf", "glass"):
        gltf.part(gltf.material(gltf.embedded(), name=name, alphaMode=mode))
    with pytest.warns(UserWarning, match=rf"alphaMode {mode} of material 0 \(leaf\) and 1 more.*drawn opaque"):
        mesh = gltf.read(tmp_path)
    assert mesh.table is not None
    assert all(each.texture is not None for each in mesh.table)


# ---- into a geometry file --------------------------------------------------------------------------------------------


def test_build_file_keeps_textures_or_leaves_them_out(tmp_path: Path) -> None:
    gltf = Textured()
    factor = {"baseColorFactor": [1, 0, 0, 1]}
    gltf.part(gltf.material(pbrMetallicRoughness=factor | {"baseColorTexture": gltf.embedded()}))
    gltf.part(gltf.material())
    path = gltf.saved(tmp_path)
    report = scene.build_file(path)
    found = Geometry.open(report.path)
    assert found.materials is not None
    assert np.array_equal(texels(found.materials[0]), RGB)
    assert report.image_bytes == found.image_bytes == len(encoded())
    assert report.bytes_per_triangle == (report.size_bytes - report.image_bytes) / report.triangles
    without = Geometry.open(scene.build_file(path, tmp_path / "b.rtg", textures=False).path)
    assert without.materials is not None
    assert [each.texture for each in without.materials] == [None, None]
    assert without.materials[0].color == (1, 0, 0)
    assert without.image_bytes == 0
