"""Materials of OBJ files in the forms that programs write."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rooftop.errors import InputError
from rooftop.scene import Material
from rooftop.scene.building.reading import MeshFile, read_mesh

pytest.importorskip("trimesh")

RGB = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
SQUARE = """v 0 0 0
v 1 0 0
v 0 1 0
v 1 1 0
vt 0 0
vt 1 0
vt 0 1
vt 1 1
"""
UV = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], float)


def read(folder: Path, mtl: str | None, obj: str = "", library: str = "a.mtl", textures: bool = True) -> MeshFile:
    if mtl is not None:
        (folder / "a.mtl").write_text(mtl, encoding="latin-1")
    faces = obj or "usemtl brick\nf 1/1 2/2 3/3\nf 3/3 2/2 4/4\n"
    (folder / "a.obj").write_text(f"mtllib {library}\n{SQUARE}{faces}")
    return read_mesh(folder / "a.obj", textures)


def image(folder: Path, name: str = "brick.png", pixels: np.ndarray = RGB) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name)


def only(mesh: MeshFile) -> Material:
    assert mesh.table is not None
    (found,) = mesh.table
    return found


def is_brick(material: Material) -> bool:
    return material.texture is not None and np.array_equal(material.texture.texels(), RGB)


@pytest.mark.parametrize(
    ("words", "color"),
    [
        ("Kd 0.25 0.5 0.75", (0.25, 0.5, 0.75)),
        ("Kd 0.5", (0.5, 0.5, 0.5)),
        ("kd  1\t0 0", (1, 0, 0)),
        ("  Kd 1.5 -1 0.5  ", (1, 0, 0.5)),
        ("Ka 1 0 0\nKd 0 1 0\nKs 0 0 1", (0, 1, 0)),
    ],
)
def test_colours_are_as_displayed(tmp_path: Path, words: str, color: tuple[float, ...]) -> None:
    found = only(read(tmp_path, f"# by hand\n\nnewmtl brick\n{words}\nNs 10\n"))
    assert found.color == color
    assert found.texture is None
    assert found.name == "brick"


def test_a_colour_multiplies_a_texture_but_black(tmp_path: Path) -> None:
    """The format demands the product, but some programs write a black Kd next to a map."""
    image(tmp_path)
    for kd, color in (("Kd 0.5 1 1\n", (0.5, 1, 1)), ("Kd 0 0 0\n", (1, 1, 1)), ("", (1, 1, 1))):
        found = only(read(tmp_path, f"newmtl brick\n{kd}map_Kd brick.png\n"))
        assert found.color == color
        assert is_brick(found)
    black = only(read(tmp_path, "newmtl brick\nKd 0 0 0\n"))
    assert black.color == (0, 0, 0)


@pytest.mark.parametrize(
    "path",
    ["maps/a b.png", r"maps\a b.png", "./maps/a b.png", '"maps/a b.png"', "in/../maps/a b.png"],
)
def test_paths_of_images(tmp_path: Path, path: str) -> None:
    image(tmp_path, "maps/a b.png")
    (tmp_path / "in").mkdir()
    assert is_brick(only(read(tmp_path, f"newmtl brick\nmap_Kd {path}\n")))


@pytest.mark.parametrize("path", [r"C:\Users\me\a b.png", "/home/me/a b.png", r"..\..\a b.png"])
def test_images_of_another_machine_are_found_beside_the_file(tmp_path: Path, path: str) -> None:
    image(tmp_path, "a b.png")
    assert is_brick(only(read(tmp_path, f"newmtl brick\nMAP_KD {path}\n")))


def test_options_place_an_image(tmp_path: Path) -> None:
    image(tmp_path, "-1 a.png")
    image(tmp_path)
    for options, placed, wrap in (
        ("-s 2 4 1", UV * (2, 4), "repeat"),
        ("-s 3", UV * (3, 1), "repeat"),
        ("-o 0.5 0.25", np.add(UV, (0.5, 0.25)), "repeat"),
        ("-s 2 2 -o 1 1 -clamp on", UV * 2 + 1, "clamp"),
        ("-clamp off -blendu on -blendv off -mm 0 1 -bm 0.5 -texres 512 -t 0 0 0", UV, "repeat"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mesh = read(tmp_path, f"newmtl brick\nmap_Kd {options} brick.png\n")
        assert is_brick(only(mesh)), options
        assert only(mesh).wrap == (wrap, wrap)
        assert mesh.uv is not None
        assert {tuple(each) for each in mesh.uv.tolist()} == {tuple(each) for each in placed.tolist()}


@pytest.mark.parametrize("option", ["-mm 0.5 2", "-t 0.1", "-cc on", "-imfchan r"])
def test_options_that_would_change_the_picture_are_told(tmp_path: Path, option: str) -> None:
    image(tmp_path)
    with pytest.warns(UserWarning, match=rf"a\.mtl, line 2: material brick: {option} of map_Kd is ignored"):
        assert is_brick(only(read(tmp_path, f"newmtl brick\nmap_Kd {option} brick.png\n")))


def test_an_option_that_is_not_known_is_refused(tmp_path: Path) -> None:
    image(tmp_path)
    with pytest.raises(InputError, match=r"a\.mtl, line 3: material brick has the unknown option -flip of map_Kd"):
        read(tmp_path, "newmtl brick\nKd 1 1 1\nmap_Kd -flip on brick.png\n")


def test_each_material_of_several_files(tmp_path: Path) -> None:
    """Cases: lines with several names, names with blanks, names that no file defines, faces without a material."""
    image(tmp_path)
    (tmp_path / "b c.mtl").write_text("newmtl dark oak\r\nKd 0.25 0.25 0\r\nnewmtl brick\r\nKd 1 0 0\r\n")
    (tmp_path / "d.mtl").write_text("newmtl sky\nKd 0 0 1\n")
    faces = "f 1/1 2/2 3/3\nusemtl dark oak\nf 3/3 2/2 4/4\nusemtl brick\nf 1/1 2/2 4/4\nusemtl sky\nf 1/1 4/4 3/3\n"
    faces += "usemtl unknown\nf 2/2 3/3 4/4\nusemtl brick\nf 4/4 3/3 2/2\n"
    mesh = read(tmp_path, "newmtl brick\nmap_Kd brick.png\n", f"mtllib b c.mtl\n{faces}", "a.mtl d.mtl")
    assert mesh.table is not None
    assert sorted((each.name, each.color, is_brick(each)) for each in mesh.table) == [
        ("", (1, 1, 1), False),
        ("", (1, 1, 1), False),
        ("brick", (1, 1, 1), True),
        ("dark oak", (0.25, 0.25, 0), False),
        ("sky", (0, 0, 1), False),
    ]
    counts = {mesh.table[number].name: int((mesh.materials == number).sum()) for number in range(5)}
    assert counts["brick"] == 2
    assert len(mesh.faces) == 6


def test_missing_files_of_materials_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"a\.obj names gone\.mtl, which does not exist: its materials are ignored"):
        assert read(tmp_path, None, library="gone.mtl").table is None


def test_missing_and_damaged_images_are_refused_by_name(tmp_path: Path) -> None:
    mtl = "newmtl brick\nKd 1 0 0\nmap_Kd maps/brick.png\n"
    with pytest.raises(InputError, match=r"a\.mtl: material brick names the image maps/brick\.png.*--no-textures"):
        read(tmp_path, mtl)
    (tmp_path / "brick.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a\.mtl: material brick: .*brick\.png is not an image.*--no-textures"):
        read(tmp_path, mtl)
    assert only(read(tmp_path, mtl, textures=False)).color == (1, 0, 0)
    with pytest.raises(InputError, match=r"a\.mtl: material brick names the image of an empty name"):
        read(tmp_path, "newmtl brick\nmap_Kd\n")
    for option in ("-s nan 1", "-s 2 1e400 1", "-o 0 -inf 0"):
        said = rf"a\.mtl, line 2: material brick has {' '.join(option.split()[:3])}: expected finite numbers"
        with pytest.raises(InputError, match=said):
            read(tmp_path, f"newmtl brick\nmap_Kd {option} maps/brick.png\n")
    with pytest.raises(InputError, match=r"a\.mtl, line 2: Kd of material brick is 'nan 1 0': expected one or three"):
        read(tmp_path, "newmtl brick\nKd nan 1 0\n")
    with pytest.raises(InputError, match=r"a\.mtl, line 2: Kd of material brick is '1 x 0': expected one or three"):
        read(tmp_path, "newmtl brick\nKd 1 x 0\n")


@pytest.mark.parametrize("words", ["d 0.5", "Tr 0.5", "map_d leaf.png", "d -halo 0.2"])
def test_transparency_is_told(tmp_path: Path, words: str) -> None:
    with pytest.warns(UserWarning, match="(d|Tr|map_d) of material brick: transparency is not supported"):
        read(tmp_path, f"newmtl brick\nKd 1 0 0\n{words}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path, "newmtl brick\nKd 1 0 0\nd 1.0\nTr 0\n")


def test_a_texture_without_coordinates_is_told(tmp_path: Path) -> None:
    image(tmp_path)
    with pytest.warns(UserWarning, match="material brick has a texture, but part .* has no texture coordinates"):
        mesh = read(tmp_path, "newmtl brick\nKd 1 0 0\nmap_Kd brick.png\n", "usemtl brick\nf 1 2 3\nf 3 2 4\n")
    assert only(mesh).texture is None
    assert only(mesh).color == (1, 0, 0)


def test_text_in_latin_1_and_continued_lines(tmp_path: Path) -> None:
    image(tmp_path)
    found = only(read(tmp_path, "newmtl brick\nKd 1 \\\n0 0\n# Äpfel\nmap_Kd brick.png\n"))
    assert found.color == (1, 0, 0)
    assert is_brick(found)
