"""`rooftop scene build` and `info`: their output, their files, and how wrong calls end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trimesh
from PIL import Image

from rooftop.cli.main import main
from rooftop.scene import Geometry


@pytest.fixture
def mesh(tmp_path: Path) -> Path:
    trimesh.creation.icosphere(4).export(tmp_path / "ball.ply")
    return tmp_path / "ball.ply"


def test_a_mesh_is_built_and_looked_into(mesh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scene", "build", str(mesh), "--normals", "smooth", "--precision", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "ball.rtg: 5,120 triangles" in said
    assert "% full" in said
    assert Geometry.open(mesh.with_suffix(".rtg")).meta["grid_exponent"] == -10

    assert main(["scene", "info", str(mesh.with_suffix(".rtg"))]) == 0
    said = capsys.readouterr().out
    assert "5,120 triangles in" in said
    assert "normals; materials: 1" in said
    assert main(["scene", "info", str(mesh.with_suffix(".rtg")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["levels"][0]["triangles"] == 5120
    assert found["bytes"] == mesh.with_suffix(".rtg").stat().st_size
    assert 0.85 < found["fill"] <= 1
    assert found["roots"] == 1


def test_textures_are_kept_and_listed_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rendered picture shows textures that were kept."""
    image = np.full((4, 8, 3), (255, 0, 0), np.uint8)
    Image.fromarray(image).save(tmp_path / "red.png")
    (tmp_path / "two.mtl").write_text("newmtl red\nKd 1 1 1\nmap_Kd red.png\nnewmtl blue\nKd 0 0 1\n")
    corners = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 1 1 0\nvt 0 0\nvt 1 0\nvt 0 1\nvt 1 1\n"
    faces = "usemtl red\nf 1/1 2/2 3/3\nusemtl blue\nf 3/3 2/2 4/4\n"
    (tmp_path / "two.obj").write_text(f"mtllib two.mtl\n{corners}{faces}")
    obj, rtg = str(tmp_path / "two.obj"), str(tmp_path / "two.rtg")
    assert main(["scene", "build", obj]) == 0
    size = (tmp_path / "red.png").stat().st_size
    assert f"a triangle, and {size:,} of textures" in capsys.readouterr().out
    assert main(["scene", "info", rtg]) == 0
    said = capsys.readouterr().out
    assert "red #ffffff, a texture of 8 x 4" in said
    assert "blue #0000ff\n" in said
    assert f"textures: {size:,} of the bytes" in said
    assert main(["scene", "info", rtg, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["image_bytes"] == size
    textures = {each["name"]: each["texture"] for each in found["material_table"]}
    wrap = {"wrap": ["repeat", "repeat"], "magnified": "linear"}
    assert textures == {"red": {"width": 8, "height": 4} | wrap, "blue": None}

    words = ["-o", str(tmp_path / "{show}.png"), "--size", "32x32", "--device", "cpu", "--parallel", "1.2"]
    shows = ["--show", "base_color", "--show", "coverage", "--show", "material_depth"]
    assert main(["scene", "render", rtg, *words, "--orbit", "-90,90", *shows]) == 0
    with Image.open(tmp_path / "base_color.png") as picture:
        seen = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert {(255, 0, 0), (0, 0, 255), (16, 19, 26)} == {tuple(each) for each in seen.tolist()}
    capsys.readouterr()

    (tmp_path / "red.png").unlink()
    assert main(["scene", "build", obj]) == 2
    said = capsys.readouterr().err
    assert "which does not exist: put it beside the file" in said
    assert "--no-textures" in said
    assert main(["scene", "build", obj, "--no-textures"]) == 0
    assert Geometry.open(rtg).image_bytes == 0


def test_workers_and_borders_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.meshgrid(np.arange(60.0), np.arange(60.0), indexing="ij")
    corner = (np.arange(59)[:, None] * 60 + np.arange(59)).ravel()
    faces = np.stack([corner, corner + 60, corner + 1, corner + 1, corner + 60, corner + 61], 1).reshape(-1, 3)
    points = np.stack([x, y, np.sin(x) * np.cos(y)], -1).reshape(-1, 3)
    trimesh.Trimesh(points, faces, process=False).export(tmp_path / "tile.ply")
    for options in (["--workers", "1"], ["--workers", "2"]):
        out = str(tmp_path / f"{options[1]}.rtg")
        assert main(["scene", "build", str(tmp_path / "tile.ply"), "-o", out, "--lock-borders", *options]) == 0
        assert "borders are locked" in capsys.readouterr().out
    assert (tmp_path / "1.rtg").read_bytes() == (tmp_path / "2.rtg").read_bytes()


def test_repairs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 2 3 1\nf 1 1 2\nf 1 2 4\n")
    assert main(["scene", "build", str(tmp_path / "two.obj"), "-o", str(tmp_path / "out.rtg")]) == 0
    said = capsys.readouterr().out
    assert "2 triangles" in said
    assert "1 duplicate faces dropped" in said


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["build", "none.ply"], 2, "no file"),
        (["build", "ball.ply", "-o", "ball.ply"], 2, "would overwrite"),
        (["build", "ball.ply", "-o", "none/ball.rtg"], 2, "no folder"),
        (["build", "none/ball.ply"], 2, "no file none/ball.ply"),
        (["build", "ball.ply", "--precision", "0"], 2, "precision"),
        (["build", "ball.ply", "--precision", "1e-20"], 2, "too fine"),
        (["build", "ball.ply", "--normals", "odd"], 2, "normals"),
        (["build", "ball.ply", "--workers", "0"], 2, "workers"),
        (["info", "none.rtg"], 2, "no file"),
        (["info", "ball.ply"], 1, "is not a geometry file"),
    ],
)
def test_wrong_calls_end_in_one_line(
    mesh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(mesh.parent)
    assert main(["scene", *words]) == status
    captured = capsys.readouterr().err
    assert said in captured
    assert captured.count("\n") == 1
    assert [path.name for path in mesh.parent.iterdir()] == ["ball.ply"]


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scene", "build", "--help"]) == 0
    said = capsys.readouterr().out
    assert "Example: rooftop scene build" in said
    assert "1/64 of the mean edge" in " ".join(said.split())
