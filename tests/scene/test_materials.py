"""Materials in every accepted form, images of every kind, and both in a geometry file."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from rooftop import scene
from rooftop.errors import GeometryFileError, InputError
from rooftop.scene import Geometry, Material, Scene, images, layouts
from rooftop.scene.images import Texture
from rooftop.scene.materials import IMAGES, TABLE, to_displayed, to_linear

Bytes = NDArray[np.uint8]

POINTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], np.float64)
FACES = np.array([[0, 1, 2], [2, 1, 3]])
RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def build(path: Path, *materials: Material, **options: Any) -> Geometry:
    arguments = {"uv": POINTS[:, :2], "material_table": materials} | options
    scene.build(POINTS, FACES, path, **arguments)
    return Geometry.open(path)


def test_a_scene_with_textures_is_pickled(tmp_path: Path) -> None:
    """The file's own materials are read from the file again; materials of the caller are pickled with their images."""
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(RGB)))
    of_file = Material(texture=tmp_path / "a.png")
    mesh = build(tmp_path / "a.rtg", of_file, workers=1)
    world = Scene()
    for materials in (None, [of_file], [Material(texture=RGB)]):
        world.add_mesh(mesh, materials=materials)
    pickled = pickle.dumps(world)
    (tmp_path / "a.png").unlink()
    again = pickle.loads(pickled)
    assert again.materials[0] is again.meshes[0].materials
    for (material,) in again.materials:
        np.testing.assert_array_equal(material.texture.texels(), RGB)


# ---- accepted arguments ----------------------------------------------------------------------------------------------


def test_arrays_tensors_images_and_files_are_textures(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a b.png")
    alpha = np.concatenate([RGB, np.full((5, 7, 1), 9, np.uint8)], 2)
    given = [RGB, RGB / 255, torch.from_numpy(RGB), torch.from_numpy(RGB).float() / 255, Image.fromarray(RGB)]
    given += [tmp_path / "a b.png", str(tmp_path / "a b.png"), alpha, Image.fromarray(alpha), RGB[:, ::-1][:, ::-1]]
    for each in given:
        texture = Texture.of(each)
        assert (texture.width, texture.height) == (7, 5)
        assert np.array_equal(texture.texels(), RGB)
        assert np.array_equal(Texture.of_bytes(texture.encoded(), "again").texels(), RGB)
    gray = RGB[:, :, 0]
    for each in (gray, gray[:, :, None], Image.fromarray(gray)):
        assert np.array_equal(Texture.of(each).texels(), gray[:, :, None].repeat(3, 2))


def wide(values: Bytes) -> Image.Image:
    return Image.fromarray(values.astype(np.uint16) * 257)


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.fromarray(RGB), "PNG", RGB),
        (Image.fromarray(RGB), "BMP", RGB),
        (Image.fromarray(RGB), "TGA", RGB),
        (Image.fromarray(RGB), "TIFF", RGB),
        (Image.fromarray(RGB), "WEBP", RGB),
        (Image.fromarray(RGB[:, :, 0]), "PNG", RGB[:, :, :1]),
        (wide(RGB[:, :, 0]), "PNG", RGB[:, :, :1]),
        (wide(RGB[:, :, 0]), "TIFF", RGB[:, :, :1]),
        (Image.fromarray(RGB).quantize(64), "PNG", RGB),
        (Image.fromarray(RGB).quantize(64), "GIF", RGB),
        (Image.fromarray(np.concatenate([RGB, RGB[:, :, :1]], 2)), "PNG", RGB),
        (Image.fromarray(RGB[:, :, :2], "LA"), "PNG", RGB[:, :, :1]),
        (Image.fromarray(RGB[:, :, 0] > 127), "PNG", 255 * (RGB[:, :, :1] > 127)),
        (Image.fromarray(RGB[:1, :1]), "PNG", RGB[:1, :1]),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "mode", ""),
)
def test_images_of_every_kind(image: Image.Image, kind: str, expected: Bytes) -> None:
    """Images that are grey, have a palette, 16 bits or alpha, are black and white, or have one texel."""
    options = {"lossless": True} if kind == "WEBP" else {}
    texels = Texture.of_bytes(encoded(image, kind, **options), "it").texels()
    assert texels.dtype == np.uint8
    assert np.array_equal(texels, np.broadcast_to(expected, (*expected.shape[:2], 3)))


def test_jpeg_is_nearly_what_it_was() -> None:
    smooth = np.linspace(0, 255, 64, dtype=np.uint8)[:, None, None].repeat(64, 1).repeat(3, 2)
    texels = Texture.of_bytes(encoded(Image.fromarray(smooth), "JPEG", quality=95), "it").texels()
    assert np.abs(texels.astype(int) - smooth).max() <= 4


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Material((1, 2, 0)), ValueError, "color.*from 0 to 1"),
        (lambda: Material((1, 1)), ValueError, "expected red, green and blue"),
        (lambda: Material((1, 1, 1, 0.5)), ValueError, "transparency is not supported"),
        (lambda: Material("red"), ValueError, "expected red, green and blue"),
        (lambda: Material((np.nan, 0, 0)), ValueError, "color"),
        (lambda: Material(texture=RGB, wrap="tile"), ValueError, "repeat, clamp, mirror"),
        (lambda: Material(texture=RGB, wrap=("clamp",)), ValueError, "a pair"),
        (lambda: Material(texture=RGB, magnified="cubic"), ValueError, "linear, nearest"),
        (lambda: Material(texture=RGB.astype(np.int32)), TypeError, "not int32"),
        (lambda: Material(texture=RGB / 100.0), ValueError, "0 to 1"),
        (lambda: Material(texture=RGB[:, :, :2]), ValueError, r"not \(5, 7, 2\)"),
        (lambda: Material(texture=np.array(["a"])), TypeError, "expected a path"),
        (lambda: Material(texture=np.zeros((0, 4, 3))), InputError, "4 x 0"),
        (lambda: Material(texture="nowhere.png"), FileNotFoundError, r"nowhere\.png"),
        (lambda: Material(texture=np.zeros((1, images.MOST_SIDE + 1), np.uint8)), InputError, "16385 x 1.*smaller"),
    ],
)
def test_wrong_materials_are_refused(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_files_that_are_no_images_or_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a\.png is not an image that can be read.*PNG, JPEG"):
        Material(texture=tmp_path / "a.png")
    whole = encoded(Image.fromarray(RGB))
    for width, height in ((20000, 20000), (16385, 1), (16384, 16384)):  # the first image is larger than Pillow accepts
        head = struct.pack(">II", width, height) + whole[24:29]
        chunk = b"IHDR" + head
        (tmp_path / "b.png").write_bytes(whole[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:])
        with pytest.raises(InputError, match=r"b\.png.*(16385|16384 x|too large).*at most 16384 texels"):
            Material(texture=tmp_path / "b.png")


def test_a_damaged_image_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)))
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"cut\.png cannot be decoded.*damaged"):
        build(tmp_path / "a.rtg", Material(texture=tmp_path / "cut.png"))
    assert not (tmp_path / "a.rtg").exists()


def test_displayed_and_linear_are_inverse() -> None:
    values = np.linspace(0, 1, 1001)
    assert np.abs(to_displayed(to_linear(values)) - values).max() < 1e-7
    assert to_linear(0.5) == pytest.approx(0.21404114)


# ---- in a file -------------------------------------------------------------------------------------------------------


def test_materials_stay_as_they_are_in_a_file(tmp_path: Path) -> None:
    """Images are kept byte for byte; equal images are stored once."""
    jpeg = encoded(Image.fromarray(RGB), "JPEG")
    (tmp_path / "a.jpg").write_bytes(jpeg)
    given = (
        Material((0.25, 0.5, 1), name="blue"),
        Material(texture=tmp_path / "a.jpg", wrap=("clamp", "mirror"), magnified="nearest", name="Bäume"),
        Material((1, 0, 0), texture=RGB),
        Material(texture=Texture.of_bytes(jpeg, "again")),
    )
    found = build(tmp_path / "a.rtg", *given, materials=[0, 3])
    (tmp_path / "a.jpg").unlink()  # the file needs no other files
    assert found.materials is not None
    assert len(found.materials) == 4
    for ours, theirs in zip(given, found.materials, strict=True):
        assert (ours.color, ours.wrap, ours.magnified, ours.name) == (
            theirs.color, theirs.wrap, theirs.magnified, theirs.name,
        )  # fmt: skip
        assert (ours.texture is None) == (theirs.texture is None)
    stored = [each.texture for each in found.materials]
    assert stored[1] is stored[3]
    assert stored[1] is not None
    assert stored[2] is not None
    assert stored[1].encoded() == jpeg
    assert np.array_equal(stored[2].texels(), RGB)
    assert found.image_bytes == len(jpeg) + len(stored[2].encoded())


def test_a_file_without_materials_has_no_sections_for_them(tmp_path: Path) -> None:
    scene.build(POINTS, FACES, tmp_path / "a.rtg", uv=POINTS[:, :2])
    report = Geometry.open(tmp_path / "a.rtg")
    assert report.materials is None
    assert report.image_bytes == 0
    count = struct.unpack_from(layouts.HEADER, (tmp_path / "a.rtg").read_bytes())[2]
    assert count == 5


def test_readers_that_know_no_materials_read_the_rest(tmp_path: Path) -> None:
    """Readers without textures check the checksum of every section except the pages. The version is the same."""
    build(tmp_path / "a.rtg", Material(texture=RGB))
    data = (tmp_path / "a.rtg").read_bytes()
    _, version, count, *_ = struct.unpack_from(layouts.HEADER, data)
    assert (version, count) == (layouts.VERSION, 7)
    names = set()
    for number in range(count):
        at = layouts.HEADER_BYTES + number * layouts.SECTION_BYTES
        name, start, size, crc, _ = struct.unpack_from(layouts.SECTION, data, at)
        names.add(name.rstrip(b"\0").decode())
        assert start % 16 == 0
        assert name.startswith(b"pages") or zlib.crc32(data[start : start + size]) == crc
    assert {TABLE, IMAGES} <= names


def sections_of(data: bytes) -> dict[str, tuple[int, int, int]]:
    """For each section: its place in the table, its start, and its length."""
    found = {}
    for number in range(struct.unpack_from(layouts.HEADER, data)[2]):
        at = layouts.HEADER_BYTES + number * layouts.SECTION_BYTES
        name, start, size, *_ = struct.unpack_from(layouts.SECTION, data, at)
        found[name.rstrip(b"\0").decode()] = (at, start, size)
    return found


def with_table(data: bytes, table: Any) -> bytes:
    """The file with another table, at most as long as the original one, and with correct checksums."""
    at, start, size = sections_of(data)[TABLE]
    text = (table if isinstance(table, bytes) else json.dumps(table).encode()).ljust(size)
    assert len(text) == size
    changed = bytearray(data)
    changed[start : start + size] = text
    struct.pack_into("<I", changed, at + 24, zlib.crc32(text))
    end = layouts.HEADER_BYTES + len(sections_of(data)) * layouts.SECTION_BYTES
    struct.pack_into("<I", changed, 24, zlib.crc32(bytes(changed[layouts.HEADER_BYTES : end])))
    return bytes(changed)


def test_a_table_that_says_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.rtg"
    build(path, Material((0.123456789, 0.123456789, 0.123456789), RGB, name="a long name"), Material((0, 0, 0)))
    data = path.read_bytes()
    _, start, size = sections_of(data)[TABLE]
    table = json.loads(data[start : start + size])
    white = {"color": [1, 1, 1]}
    image = table["images"][0]

    def refused(other: Any) -> None:
        path.write_bytes(with_table(data, other))
        with pytest.raises(GeometryFileError, match="section material"):
            Geometry.open(path)

    for rows in ([], [white | {"image": 1}], [white | {"image": -1}], [{"color": [2, 0, 0]}], [{}], [7], {}):
        refused({"materials": rows, "images": [image]})
    for change in ({"offset": -1}, {"length": 10**6}, {"width": 0}, {"width": 10**6}, {"crc": "x"}):
        refused({"materials": [white], "images": [image | change]})
    refused({"materials": [white]})
    refused(b"{")
    refused(b"[]")
    path.write_bytes(with_table(data, {"materials": [white | {"image": 0}], "images": [image]}))
    assert Geometry.open(path).materials is not None  # shows that only the changes above cause the errors


def test_a_damaged_image_in_a_file_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.rtg"
    build(path, Material(texture=RGB))
    data = bytearray(path.read_bytes())
    data[sections_of(bytes(data))[IMAGES][1] + 40] ^= 1
    path.write_bytes(data)
    world = Scene()
    world.add_instance(world.add_mesh(path))
    camera = scene.Camera.look_at((0.5, 0.5, 2), (0.5, 0.5, 0), (0, 1, 0), width=16, height=16)
    renderer = scene.Renderer(world, "cpu")
    assert renderer.render(camera, ("depth",))["depth"].isfinite().any()
    with pytest.raises(GeometryFileError, match="checksum of image 0"):
        renderer.render(camera, ("color",))


# ---- for a mesh ------------------------------------------------------------------------------------------------------


def test_materials_that_do_not_fit_a_mesh_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.rtg"
    with pytest.raises(ValueError, match="material number 4, but there are 2 materials: expected 5"):
        build(path, Material(), Material(), materials=[0, 4])
    with pytest.raises(ValueError, match="no texture coordinates: pass uv="):
        build(path, Material(texture=RGB), uv=None)
    with pytest.raises(TypeError, match=r"expected a list of scene\.Material"):
        build(path, "red")  # type: ignore[arg-type]
    assert not path.exists()
    with pytest.raises(TypeError, match="integers"):
        build(path, Material(), materials=[0.5, 1.0])
    scene.build(POINTS, FACES, path, materials=[0, 2])
    world = Scene()
    with pytest.raises(ValueError, match=r"a\.rtg has faces with the material number 2, but there are 1 materials"):
        world.add_mesh(path, materials=[Material()])
    with pytest.raises(ValueError, match="no texture coordinates"):
        world.add_mesh(path, materials=[Material(texture=RGB)] * 3)
    with pytest.raises(TypeError, match=r"scene\.Material"):
        world.add_mesh(path, materials=[1, 2, 3])  # type: ignore[list-item]
    assert world.meshes == ()
    assert world.materials == ()
    world.add_mesh(path)
    world.add_mesh(path, materials=[Material((1, 0, 0))] * 3)
    assert world.materials[0] is None
    assert world.materials[1] is not None
