"""`rooftop scene render`: every way to place the camera, the files that are written, and how wrong calls end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray
from PIL import Image

from rooftop import scene
from rooftop.cli.commands.scene_render import render_command
from rooftop.cli.main import main
from rooftop.cli.scene_cameras import Choice, chosen_cameras, turned
from rooftop.scene import Camera
from rooftop.scene.framing import outline

Run = Callable[..., tuple[int, str, str]]
NIGHT = (16, 19, 26)
SMALL = ("--size", "64x48", "--device", "cpu")


@pytest.fixture(scope="session")
def ball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ball of radius 1 around (2, 0, 0), with 5,120 triangles."""
    mesh = trimesh.creation.icosphere(4)
    path = tmp_path_factory.mktemp("meshes") / "ball.rtg"
    scene.build(mesh.vertices + np.array((2, 0, 0)), mesh.faces, path)
    return path


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box of 1 x 1 x 4 around (-3, 0, 0), with 12 triangles."""
    mesh = trimesh.creation.box((1, 1, 4))
    path = tmp_path_factory.mktemp("meshes") / "box.rtg"
    scene.build(mesh.vertices - np.array((3, 0, 0)), mesh.faces, path)
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        status = main(["scene", "render", *map(str, words)])
        return (status, *capsys.readouterr())

    return command


def pixels(name: str | Path) -> NDArray[np.uint8]:
    with Image.open(name) as picture:
        return np.asarray(picture.convert("RGB"))


def covered(picture: NDArray[np.uint8]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (picture != NIGHT).any(-1)
    return found


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_frames_the_scene_and_a_table_says_what_it_took(run: Run, ball: Path) -> None:
    status, out, err = run(ball, "-o", "ball.png", *SMALL)
    assert status == 0, err
    seen = covered(pixels("ball.png"))
    assert seen.shape == (48, 64)
    assert seen[24, 32]
    assert seen.any(1).sum() > 30  # nearly all of the 48 rows
    assert not seen[[0, -1]].any()
    assert not seen[:, [0, -1]].any()
    stages = {name: float(ms) for name, ms in re.findall(r"^(\w+) +([\d.]+) *$", out, re.MULTILINE)}
    assert {"rasterize", "base_pass", "hzb", "together"} <= stages.keys()
    assert sum(stages.values()) == pytest.approx(2 * stages["together"], abs=0.02)
    assert re.search(r"drawn: [1-9][\d,]* of 5,120 triangles, in [1-9]\d* clusters", out)
    assert "levels of detail: " in out
    assert "pictures: ball.png" in out


def test_a_picture_of_nothing_says_so(run: Run, ball: Path) -> None:
    assert "nothing is in view" not in run(ball, "-o", "ball.png", *SMALL)[1]
    status, out, err = run(ball, "-o", "ball.png", "--eye", "100,0,0", "--target", "200,0,0", *SMALL)
    assert status == 0, err
    assert "nothing is in view in one of the pictures: look elsewhere" in out


def test_several_outputs_stand_beside_each_other_with_captions(run: Run, ball: Path) -> None:
    status, _, err = run(ball, "-o", "sheet.png", *SMALL, "--show", "color", "--show", "level", "--show", "normal")
    assert status == 0, err
    sheet = pixels("sheet.png")
    assert sheet.shape == (2 * (48 + 16), 2 * 64, 3)  # a line of text, 16 high, above each picture
    top, below = sheet[:64], sheet[64:]
    for part, there in ((top[:, :64], True), (top[:, 64:], True), (below[:, :64], True), (below[:, 64:], False)):
        assert covered(part[:16]).any() == there
        assert covered(part[16:]).any() == there
    run(ball, "-o", "one.png", *SMALL, "--show", "normal", "--show", "normal")
    assert np.array_equal(pixels("one.png"), below[16:, :64])


def test_light_casts_shadows(run: Run, ball: Path, box: Path) -> None:
    """The shadow of the box on the ball behind it."""
    light = (*SMALL, "--orbit", "-110,20", "--light", "-1,0,0.2")
    status, _, err = run(ball, box, "-o", "{show}.png", *light, "--shadows", "--show", "color", "--show", "shadow")
    assert status == 0, err
    run(ball, box, "-o", "plain.png", *light)
    darker = pixels("plain.png").astype(int) - pixels("color.png")
    assert (darker >= 0).all()  # shadows only darken
    assert (darker.sum(-1) > 30).sum() > 10
    with Image.open("shadow.png") as shadow:
        assert len(shadow.getcolors(1 << 16)) >= 3  # background, lit, dark
    status, _, err = run(ball, "-o", "x.png", *SMALL, "--light", "0,0,0", "--shadows")
    assert status == 2
    assert "expected a direction that is not all zeros" in err


def test_names_say_what_is_shown_and_which_frame(run: Run, ball: Path) -> None:
    words = ("--show", "color", "--show", "depth", "--frames", 2, *SMALL)
    status, out, err = run(ball, "-o", "{show}-{frame}.png", *words)
    assert status == 0, err
    names = ["color-0000.png", "color-0001.png", "depth-0000.png", "depth-0001.png"]
    assert sorted(path.name for path in Path().glob("*.png")) == names
    assert "mean of 2 frames" in out
    assert "pictures: color-0000.png, ..., depth-0001.png" in out
    status, _, err = run(ball, "-o", "turn.png", "--frames", 2, *SMALL)
    assert status == 0, err
    assert np.array_equal(pixels("turn-0001.png"), pixels("color-0001.png"))


def test_a_turn_goes_around_and_its_velocity_shows_it(run: Run, ball: Path, box: Path) -> None:
    words = ("--frames", 4, "--show", "instance", "--orbit", "0,0", "--parallel", 8, "--target", "0,0,0", *SMALL)
    status, _, err = run(ball, box, "-o", "turn.png", *words)
    assert status == 0, err
    colors = [{tuple(color) for color in pixels(f"turn-000{k}.png").reshape(-1, 3)} - {NIGHT} for k in range(4)]
    assert list(map(len, colors)) == [2, 2, 2, 2]  # from +x the slender box sticks out above and below the ball
    middle = [tuple(pixels(f"turn-000{k}.png")[24, 32]) for k in range(4)]
    assert middle[0] != NIGHT  # the ball is before the box, then beside it, then behind it
    assert middle[2] != NIGHT
    assert middle[0] != middle[2]
    assert middle[1] == middle[3] == NIGHT
    # A parallel camera after a quarter turn sees the same as a camera that is placed there.
    run(
        ball,
        box,
        "-o",
        "there.png",
        "--show",
        "instance",
        "--orbit",
        "90,0",
        "--parallel",
        8,
        "--target",
        "0,0,0",
        *SMALL,
    )
    assert np.array_equal(pixels("there.png"), pixels("turn-0001.png"))
    run(ball, "-o", "moved.png", "--show", "velocity", "--frames", 8, *SMALL)
    assert not covered(pixels("moved-0000.png")).any()
    assert covered(pixels("moved-0001.png")).mean() > 0.2


def test_instances_stand_in_a_square_on_the_level(run: Run, ball: Path, box: Path) -> None:
    words = ("--instances", 9, "--show", "instance", "--orbit", "0,90", *SMALL)
    status, out, err = run(ball, "-o", "nine.png", *words)
    assert status == 0, err
    assert "of 46,080 triangles" in out
    picture = pixels("nine.png")
    assert len({tuple(color) for color in picture.reshape(-1, 3)} - {NIGHT}) == 9
    for axis in (0, 1):  # three columns and three rows, with room between them
        assert np.count_nonzero(np.diff(covered(picture).any(axis))) == 2 * 3
    status, out, err = run(ball, box, "-o", "both.png", *words)
    assert status == 0, err
    assert f"of {5 * 5120 + 4 * 12:,} triangles" in out
    assert run(ball, "-o", "up.png", *words[:-6], "--up", "0,1,0", *SMALL)[0] == 0


def test_statistics_as_json(run: Run, ball: Path) -> None:
    status, out, err = run(ball, "-o", "ball.png", "--frames", 2, "--json", "-", *SMALL)
    assert status == 0, err
    found = json.loads(out)
    assert found["files"] == [str(ball)]
    assert found["device"] == "CPU"
    np.testing.assert_allclose(found["bounds"], [[1, -1, -1], [3, 1, 1]], atol=0.01)
    first, second = found["frames"]
    assert second["pictures"] == {"color": "ball-0001.png"}
    assert first["statistics"]["triangles"] > 100
    assert first["statistics"]["stage_ms"]["rasterize"] > 0
    # The printed cameras can be given to --camera.
    Path("cameras.json").write_text(json.dumps([first["camera"], second["camera"]]))
    status, out, err = run(
        ball, "-o", "again.png", "--camera", "cameras.json", "--json", "again.json", "--device", "cpu"
    )
    assert status == 0, err
    assert "statistics: again.json" in out
    for number in range(2):
        assert np.array_equal(pixels(f"again-000{number}.png"), pixels(f"ball-000{number}.png"))
    assert len(json.loads(Path("again.json").read_text())["frames"]) == 2


def test_a_pool_draws_the_same_picture_and_says_what_it_held(run: Run, ball: Path) -> None:
    """The pool is given in bytes or with a unit; the statistics contain its size too."""
    assert run(ball, "-o", "all.png", *SMALL)[0] == 0
    status, out, err = run(ball, "-o", "pool.png", "--pool", "1.5MB", "--json", "pool.json", *SMALL)
    assert status == 0, err
    assert "resident in 131,072 bytes" in out
    assert np.array_equal(pixels("pool.png"), pixels("all.png"))
    (frame,) = json.loads(Path("pool.json").read_text())["frames"]
    assert frame["statistics"]["streaming"]["missing"] == 0
    assert frame["statistics"]["streaming"]["error_pixels"] == 1.0
    status, _, err = run(ball, "-o", "small.png", "--pool", "131071", *SMALL)
    assert status == 2
    assert "give at least 131,072" in err
    for text in ("much", "0", "-1", "2 TB", "GB", "0.5B", "9" * 400 + " TB"):
        status, _, err = run(ball, "-o", "none.png", f"--pool={text}", *SMALL)
        assert status == 2
        assert "expected a size such as 2GB" in err


def test_a_finer_picture_draws_more_and_what_is_hidden_changes_none(run: Run, ball: Path) -> None:
    drawn = {}
    for name, words in {"usual": (), "fine": ("--pixel-error", 0), "all": ("--no-occlusion",)}.items():
        status, out, err = run(
            *(ball, "-o", f"{name}.png", "--instances", 4, "--orbit", "0,0", "--json", "-", *words),
            *("--size", "192x144", "--device", "cpu"),
        )
        assert status == 0, err
        drawn[name] = json.loads(out)["frames"][0]["statistics"]
    assert drawn["fine"]["triangles"] > 2 * drawn["usual"]["triangles"]
    assert drawn["fine"]["levels"] == [0]
    assert drawn["usual"]["occluded"] > 0 == drawn["all"]["occluded"]
    assert np.array_equal(pixels("usual.png"), pixels("all.png"))


# ---- cameras ---------------------------------------------------------------------------------------------------------


def test_the_same_camera_said_in_five_ways(run: Run, ball: Path) -> None:
    eye, target, fov = (2.0, -5.0, 1.0), (2.0, 0.0, 0.0), 40.0
    camera = Camera.look_at(eye, target, fov_y_degrees=fov, width=64, height=48)
    K = [[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]]
    files = {
        "K": K,
        "pose": {"world_to_camera": camera.world_to_camera[:3].tolist()},
        "looking": {"eye": eye, "target": target, "fov_y_degrees": fov},
        "calibrated": {"K": K, "world_to_camera": camera.world_to_camera.tolist(), "width": 64, "height": 48},
    }
    for name, content in files.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    distance = float(np.linalg.norm(np.subtract(eye, target)))
    elevation = float(np.degrees(np.arcsin(1 / distance)))
    ways = {
        "points": ("--eye", "2,-5,1", "--target", "2,0,0", "--fov", fov),
        "orbit": ("--orbit", f"-90,{elevation!r},{distance!r}", "--target", "2,0,0", "--fov", fov),
        "file": ("--camera", "looking.json"),
        "calibrated": ("--camera", "calibrated.json"),
        "lens": (
            "--intrinsics",
            ",".join(map(repr, (camera.fx, camera.fy, camera.cx, camera.cy))),
            "--pose",
            "pose.json",
        ),
        "lens_file": ("--intrinsics", "K.json", "--pose", "pose.json"),
    }
    for name, words in ways.items():
        status, _, err = run(ball, "-o", f"{name}.png", *words, *SMALL)
        assert status == 0, err
        assert covered(pixels(f"{name}.png")).mean() > 0.15
        apart = np.abs(pixels(f"{name}.png").astype(int) - pixels("points.png")).max(-1)
        assert (apart > 2).mean() < 0.01, name  # rounding an angle may move an edge


def test_a_parallel_view_is_as_high_as_it_should_be(run: Run, box: Path) -> None:
    Path("camera.json").write_text('{"eye": [-3, -9, 0], "target": [-3, 0, 0], "view_height": 8}')
    for words in (("--orbit", "-90,0", "--parallel", 8), ("--camera", "camera.json")):
        status, _, err = run(box, "-o", "box.png", *words, "--size", "64x64", "--device", "cpu")
        assert status == 0, err
        seen = covered(pixels("box.png"))
        assert (seen.any(1).sum(), seen.any(0).sum()) == (32, 8)  # 4 of 8 units high, 1 of 8 wide


@pytest.mark.parametrize("orbit", [(-50.0, 25.0), (0.0, 0.0), (10.0, 90.0), (200.0, -90.0), (33.0, -70.0)])
@pytest.mark.parametrize("up", [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.3, -2.0, 1.0)])
@pytest.mark.parametrize("fov", [15.0, 100.0])
def test_an_orbit_sees_all_of_the_scene_and_fills_the_picture(
    orbit: tuple[float, float], up: tuple[float, float, float], fov: float
) -> None:
    points = np.random.default_rng(0).uniform((1, -6, 2), (4, 3, 2.5), (50, 3))
    (camera,) = chosen_cameras(Choice(orbit=orbit, up=up, fov_y_degrees=fov, size=(200, 100)), points)
    x, y, z = camera.world_to_camera[:3, :3] @ points.T + camera.world_to_camera[:3, 3:]
    assert z.min() > camera.near
    across, down = 2 * camera.fx * np.abs(x / z) / 200, 2 * camera.fy * np.abs(y / z) / 100  # 1 is an edge
    assert max(across.max(), down.max()) == pytest.approx(0.94)
    towards = points.min(0) / 2 + points.max(0) / 2 - camera.position
    sine = towards @ up / np.linalg.norm(towards) / np.linalg.norm(up)
    assert np.degrees(np.arcsin(-sine.clip(-1, 1))) == pytest.approx(orbit[1], abs=1e-4)
    if abs(orbit[1]) < 90:  # up is up
        assert (camera.world_to_camera[:3, :3] @ up)[1] < 0


def test_a_turned_camera_sees_what_a_turned_world_shows() -> None:
    camera = Camera.look_at((4, 1, 2), (0, 1, 0), width=8, height=8)
    center, up = np.array([0.5, 1.0, 0.0]), (0.0, 0.0, 2.0)
    quarter = turned(camera, 90, center, up)
    x, y, z = camera.position - center
    np.testing.assert_allclose(quarter.position - center, (-y, x, z), atol=1e-12)  # counterclockwise from above
    full = turned(quarter, 270, center, up)
    np.testing.assert_allclose(full.world_to_camera, camera.world_to_camera, atol=1e-12)


def test_the_outline_of_a_scene_is_where_its_instances_are(ball: Path, box: Path) -> None:
    world = scene.Scene()
    transform = np.diag([2.0, 2.0, 2.0, 1.0])
    world.add_instance(world.add_mesh(ball), transform)
    low, high = (reduce(outline(world), 0) for reduce in (np.min, np.max))
    np.testing.assert_allclose([low, high], [[2, -2, -2], [6, 2, 2]], atol=0.1)
    # too many triangles to read their vertices
    world.add_instances(world.add_mesh(box), np.tile(np.eye(4), (300, 1, 1)))
    np.testing.assert_allclose(outline(world).min(0), (-3.5, -2, -2), atol=0.1)


# ---- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--eye", "1,2"), "expected 3 numbers"),
        (("--eye", "1,2,nan"), "expected 3 numbers"),
        (("--orbit", "1,2,3,4"), "expected 2 or 3 numbers"),
        (("--orbit", "0,91"), "the elevation must be from -90 to 90 degrees, got 91"),
        (("--orbit", "0,0,0"), "the distance must be more than 0"),
        (("--eye", "1,2,3", "--orbit", "0,0"), "--eye and --orbit each set the camera"),
        (("--eye", "1,2,3", "--target", "1,2,3"), "the same point"),
        (("--up", "0,0,0"), "expected a direction"),
        (("--fov", "180"), "fov_y_degrees=180.0: expected a number"),
        (("--fov", "nan"), "fov_y_degrees=nan: expected a number"),
        (("--fov", "50", "--parallel", "1"), "--fov is for a perspective view"),
        (("--parallel", "0"), "view_height=0.0: expected a number"),
        (("--near", "-1"), "near=-1.0"),
        (("--near", "0"), "near=0.0"),
        (("--intrinsics", "1,1,1,1"), "expected --intrinsics (the lens) and --pose"),
        (("--pose", "wrong.json"), "expected --intrinsics (the lens) and --pose"),
        (("--intrinsics", "1,1,1", "--pose", "pose.json"), "expected 4 numbers"),
        (("--intrinsics", "1,1,1,1", "--pose", "pose.json", "--fov", "3"), "--fov does not go with --intrinsics"),
        (("--intrinsics", "0,1,1,1", "--pose", "pose.json"), "fx=0.0"),
        (("--intrinsics", "1,1,1,1", "--pose", "wrong.json"), "wrong.json: expected world_to_camera"),
        (("--intrinsics", "1,1,1,1", "--pose", "none.json"), "none.json cannot be read"),
        (("--intrinsics", "pose.json", "--pose", "pose.json"), "K must be"),
        (("--camera", "wrong.json"), "eye is missing"),
        (("--camera", "wrong.json", "--up", "0,1,0"), "--up does not go with --camera"),
        (("--camera", "extra.json"), "zoom is not known"),
        (("--camera", "shape.json"), "shape.json: near='a'"),
        (("--camera", "text.json"), "text.json is not JSON"),
        (("--camera", "empty.json"), "an empty list"),
        (("--camera", "two.json", "--frames", "2"), "two.json has 2"),
        (("--camera", "two.json", "--size", "8"), "expected WIDTHxHEIGHT"),
        (("--size", "0x8"), "width=0"),
        (("--size", "8x99999"), "height=99999"),
        (("--light", "0,0,0"), "expected a direction"),
        (("--path", "wrong.json"), "wrong.json: expected a path recorded by `rooftop scene view`,"),
        (("--path", "none.json"), "none.json cannot be read"),
        (("--path", "text.json"), "text.json is not JSON"),
        (("--path", "wrong.json", "--target", "1,2,3"), "--target does not go with --path"),
        (("--path", "wrong.json", "--camera", "two.json"), "--camera and --path each set the camera"),
        (("--frames", "0"), "0 is not in the range"),
        (("--instances", "0"), "0 is not in the range"),
        (("--instances", "200000000"), "200,000,000: a scene has at most 134,217,728 instances"),
        (("--pixel-error", "-1"), "-1.0 is not in the range"),
        (("--pixel-error", "inf"), "pixel_error=inf"),
        (("--show", "shade"), "'shade' is not one of"),
        (("--show", "uv"), "no FILE has texture coordinates"),
        (("--device", "tpu"), "expected cpu, cuda or cuda:N"),
        (("-o", "out.jpg"), "expected a name that ends in .png"),
        (("-o", "no/out.png"), "there is no folder no"),
        (("-o", "-"), "expected a name that ends in .png"),
        (("--json", "no/out.json"), "there is no folder no"),
        (("--json", "pose.json", "--intrinsics", "1,1,1,1", "--pose", "pose.json"), "is an input"),
    ],
)
def test_wrong_calls_say_what_was_expected(words: tuple[str, ...], said: str, run: Run, ball: Path) -> None:
    contents: dict[str, Any] = {
        "pose": np.eye(4).tolist(),
        "wrong": {"target": [0, 0, 0]},
        "extra": {"eye": [1, 0, 0], "target": [0, 0, 0], "zoom": 2},
        "shape": {"eye": [1, 0, 0], "target": [0, 0, 0], "near": "a"},
        "empty": [],
        "two": [{"eye": [x, 0, 0], "target": [0, 0, 0]} for x in (1, 2)],
    }
    for name, content in contents.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    Path("text.json").write_text("eye: 1")
    defaults = {"-o": "out.png", **dict(zip(SMALL[::2], SMALL[1::2], strict=True))}
    others = [word for name, value in defaults.items() if name not in words for word in (name, value)]
    status, out, err = run(ball, *others, *words)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list(Path().glob("*.png"))
    assert json.loads(Path("pose.json").read_text()) == contents["pose"]


def test_files_that_are_none(run: Run, ball: Path, tmp_path: Path) -> None:
    status, _, err = run("none.rtg", "-o", "out.png", *SMALL)
    assert status == 2
    assert "there is no file none.rtg" in err
    Path("text.rtg").write_text("a geometry file is more than this, and begins otherwise" * 9)
    status, _, err = run(ball, "text.rtg", "-o", "out.png", *SMALL)
    assert status == 1
    assert "text.rtg cannot be used: it is not a geometry file: its first bytes are wrong (at byte 0)" in err
    assert run("-o", "out.png")[0] == 2
    assert run(ball)[0] == 2
    assert not list(tmp_path.glob("*.png"))


def test_a_picture_is_never_half_written(run: Run, ball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.png").write_bytes(b"before")

    def fails(picture: Image.Image, file: BinaryIO, **options: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fails)
    status, _, err = run(ball, "-o", "out.png", *SMALL)
    assert status == 1
    assert "No space left" in err
    assert [path.name for path in Path().iterdir()] == ["out.png"]
    assert Path("out.png").read_bytes() == b"before"


def test_help_teaches(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    known = {name for option in render_command.params for name in option.opts}
    examples = re.findall(r"^ +rooftop scene render (.*)", out, re.MULTILINE)
    assert len(examples) == 8
    for example in examples:
        assert set(re.findall(r"(?:^|\s)(--?[a-z-]+)", example)) <= known
    for key in ("eye", "fov_y_degrees", "view_height", "world_to_camera"):
        assert f'"{key}": ' in out
