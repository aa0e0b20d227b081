"""`rooftop classify`: a table or JSON of the classes of photographs, and one clear line for any error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from PIL import Image
from skimage import data

from rooftop import models
from rooftop.cli import classify as verb
from rooftop.cli import trained_models
from rooftop.cli.main import main
from rooftop.inference import Engine
from rooftop.models.images import Preprocessing
from rooftop.models.weights.files import WEIGHTS, Weights

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Made-up weights of ResNet-18, by number of classes."""
    folder = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for classes in (3, 1000):
            torch.save(models.resnet18(num_classes=classes).state_dict(), folder / f"{classes}.pth")
    return {classes: folder / f"{classes}.pth" for classes in (3, 1000)}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two photographs, to copy."""
    folder = tmp_path_factory.mktemp("photographs")
    Image.fromarray(data.chelsea()).save(folder / "cat.png")
    Image.fromarray(data.coffee()).save(folder / "coffee.png")
    return folder


@pytest.fixture
def run(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `rooftop classify ...` in a folder with two photographs, without network; return (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    shutil.copytree(photographs, tmp_path / "photos")

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["classify", *words, "--device", "cpu"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_table_of_names_and_probabilities(run: Run, files: dict[int, Path]) -> None:
    status, out, err = run("photos", "--model", "resnet18", "--weights", str(files[1000]), "--top", "2")
    assert (status, err) == (0, "")
    model, preprocessing = models.load_classifier("resnet18", files[1000])
    expected = [["photograph", "class", "probability"]]
    for photo in models.classify(model, ["photos"], preprocessing=preprocessing, top=2):
        first, second = photo.guesses
        expected.append([str(photo.path), *f"{first.name} {first.probability:.1%}".split()])
        expected.append(f"{second.name} {second.probability:.1%}".split())
    assert [line.split() for line in out.splitlines()] == expected
    assert expected[1][0] == os.path.join("photos", "cat.png")


def test_unreadable_photographs_are_left_out_and_named_if_asked_for(run: Run, files: dict[int, Path]) -> None:
    words = ["photos", "--model", "resnet18", "--weights", str(files[3]), "--json", "r.json", "--batch-size", "1"]
    Path("photos/bad.png").write_text("no image")
    Path("photos/half.png").write_bytes(Path("photos/cat.png").read_bytes()[:9999])
    assert run(*words)[0] == 2
    assert not Path("r.json").exists()
    status, out, err = run(*words, "--skip-unreadable")
    assert status == 0
    found = json.loads(Path("r.json").read_text())["photographs"]
    assert [photo["path"] for photo in found] == ["photos/cat.png", "photos/coffee.png"]
    assert [line.split(" ")[1] for line in err.splitlines()] == ["photos/bad.png", "photos/half.png"]
    assert all(line.startswith("skipped: ") for line in err.splitlines())
    status, out, err = run("photos/bad.png", *words[1:], "--skip-unreadable")
    assert (status, out) == (2, "")
    assert err.startswith("skipped: photos/bad.png is not an image")
    assert "none of 1 photographs can be read: photos/bad.png is not an image" in err


def test_json_beside_the_table(run: Run, files: dict[int, Path]) -> None:
    status, out, _ = run("photos", "--model", "resnet18", "--weights", str(files[3]), "--json", "r.json")
    assert status == 0
    assert "class 0" in out
    assert out.splitlines()[-1] == "classes: r.json"
    assert set(os.listdir()) == {"photos", "r.json"}
    found = json.loads(Path("r.json").read_text())
    assert (found["model"], found["weights"]) == ("resnet18", str(files[3]))
    assert [photo["path"] for photo in found["photographs"]] == ["photos/cat.png", "photos/coffee.png"]
    for photo in found["photographs"]:
        probabilities = [guess["probability"] for guess in photo["classes"]]
        assert sum(probabilities) == pytest.approx(1)
        assert probabilities == sorted(probabilities, reverse=True)
        assert sorted(guess["index"] for guess in photo["classes"]) == [0, 1, 2]
        assert {guess["name"] for guess in photo["classes"]} == {None}


def test_json_instead_of_the_table(run: Run, files: dict[int, Path]) -> None:
    words = ["photos/cat.png", "--model", "resnet18", "--weights", str(files[1000]), "--top", "1"]
    answers = {}
    for dtype in ("fp32", "fp64", "bf16"):
        status, out, err = run(*words, "--json", "-", "--dtype", dtype, "--batch-size", "1")
        assert (status, err) == (0, "")
        ((answer,),) = (photo["classes"] for photo in json.loads(out)["photographs"])
        answers[dtype] = answer["probability"]
    assert answers["fp64"] == pytest.approx(answers["fp32"], rel=1e-4)
    assert answers["bf16"] == pytest.approx(answers["fp32"], rel=0.2)
    assert answers["bf16"] != answers["fp32"]
    assert os.listdir() == ["photos"]


def test_batches_go_through_one_engine_the_last_one_smaller(
    run: Run, files: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = recorded_engines(monkeypatch)
    words = ["photos", "photos/cat.png", "--model", "resnet18", "--weights", str(files[3]), "--json", "-"]
    found = json.loads(run(*words, "--batch-size", "2")[1])
    assert len(engines) == 1
    assert engines[0].batches == [2, 1]
    assert (len(engines[0].report.folded), engines[0].report.dtype) == (20, torch.float32)
    model, preprocessing = models.load_classifier("resnet18", files[3])
    expected = models.classify(model, ["photos", "photos/cat.png"], preprocessing=preprocessing)
    for ours, theirs in zip(found["photographs"], expected, strict=True):
        given = [guess.probability for guess in theirs.guesses]
        assert [guess["probability"] for guess in ours["classes"]] == pytest.approx(given, rel=1e-4)


class RecordedEngine(Engine):
    """A model that records the number of images of each call."""

    batches: list[int]

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        return super().__call__(images)  # type: ignore[no-any-return]


def recorded_engines(monkeypatch: pytest.MonkeyPatch) -> list[RecordedEngine]:
    engines: list[RecordedEngine] = []

    def made(*words: object, **options: object) -> RecordedEngine:
        engines.append(RecordedEngine(*words, **options))  # type: ignore[arg-type]
        engines[-1].batches = []
        return engines[-1]

    monkeypatch.setattr(trained_models, "Engine", made)
    return engines


def test_random_weights_need_no_file_and_are_those_of_their_seed(run: Run) -> None:
    words = ["photos", "--model", "resnet18", "--top", "1", "--random-weights"]
    status, out, err = run(*words, "3")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "random weights: the results mean nothing"
    first, again, other = (json.loads(run(*words, seed, "--json", "-")[1]) for seed in "334")
    assert (first["seed"], first["weights"]) == (3, None)
    assert first == again
    assert first["photographs"] != other["photographs"]


def test_default_weights_come_from_the_mirror(
    run: Run, files: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(files[3].read_bytes()).hexdigest()
    weights = Weights(f"resnet18-{sha256[:8]}.pth", Preprocessing())
    monkeypatch.setitem(WEIGHTS, "resnet18", {"IMAGENET1K_V1": weights})
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / weights.file).symlink_to(files[3])
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", mirror.as_uri())
    for _ in range(2):
        assert run("photos", "--model", "resnet18")[0] == 0
        (mirror / weights.file).unlink(missing_ok=True)  # the second call finds the weights in the cache
    (tmp_path / "torch" / "hub" / "checkpoints" / weights.file).write_bytes(b"damaged")
    status, out, err = run("photos", "--model", "resnet18")
    assert (status, out) == (1, "")
    assert "is damaged" in err


def test_names_of_files_are_shown_as_they_are(run: Run, files: dict[int, Path]) -> None:
    strange = ["[bold]a.png", "l" * 150 + ".png", os.fsdecode(b"\xff.png")]
    for name in strange:
        os.link("photos/cat.png", name)
    status, out, err = run(*strange, "--model", "resnet18", "--weights", str(files[3]), "--top", "1")
    assert (status, err) == (0, "")
    assert "[bold]a.png" in out
    assert out.count("l") >= 150
    assert click.format_filename(strange[2]) in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "PATH"),
        (["missing.jpg"], 2, "missing.jpg does not exist"),
        (["empty"], 2, "has no photographs"),
        (["photos", "text.jpg"], 2, "text.jpg is not an image"),
        (["half.png", "--model", "resnet18", "--weights", "THREE"], 2, "half.png cannot be read"),
        (["photos", "--model", "resnet5"], 2, "'resnet5' is not one of 'resnet18', 'resnet34', 'resnet50'"),
        (["photos", "--weights", "IMAGENET1K_V3"], 2, "did you mean IMAGENET1K_V2?"),
        (["photos", "--weights", "mine.safetensors"], 2, "is neither a file nor the name of published weights"),
        (["photos", "--weights", "photos"], 2, "is a folder"),
        (
            ["photos", "--weights", "THREE", "--random-weights", "0"],
            2,
            "expected either --weights or --random-weights",
        ),
        (["photos", "--weights", "THREE"], 1, "The file fits resnet18(num_classes=3)"),
        (["photos", "--weights", "half.png"], 1, "half.png is damaged or not a file of weights"),
        (["photos"], 1, "resnet50-11ad3fa6.pth was not downloaded: the server cannot be reached"),
        (["photos", "--model", "resnet18", "--weights", "NAN"], 1, "cat.png is not finite: its weights are damaged"),
        (["photos", "--top", "0"], 2, "--top"),
        (["photos", "--batch-size", "-1"], 2, "--batch-size"),
        (["photos", "--dtype", "int64"], 2, "'int64' is not one of 'bf16'"),
        (["photos", "--json", "no/such/folder/r.json"], 2, "there is no folder no/such/folder"),
        (["photos", "--json", "photos"], 2, "is a folder"),
        (["photos", "--bogus"], 2, "--bogus"),
    ],
)
def test_what_goes_wrong_is_one_line(
    run: Run, files: dict[int, Path], tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    Path("empty").mkdir()
    Path("text.jpg").write_text("no image")
    Path("half.png").write_bytes(Path("photos/cat.png").read_bytes()[:9999])
    if "NAN" in words:
        state = torch.load(files[3], weights_only=True)
        state["fc.bias"][0] = float("nan")
        torch.save(state, "NAN")
    before = set(os.listdir())
    got, out, err = run(*(str(files[3]) if word == "THREE" else word for word in words))
    assert got == status, err
    assert message in err
    assert err.startswith("rooftop: error: ")
    assert len(err.splitlines()) == 1
    assert out == ""
    assert set(os.listdir()) - before <= {"torch"}
    assert not [path for path in (tmp_path / "torch").rglob("*") if path.is_file()]


def test_photographs_are_looked_at_before_anything_is_downloaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "load_classifier", lambda *_: pytest.fail("weights were fetched"))
    Path("text.jpg").write_text("no image")
    assert run("photos", "text.jpg")[0] == 2
    assert run("missing.jpg")[0] == 2


def test_devices(run: Run, files: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["classify", "photos", "--model", "resnet18", "--weights", str(files[3])]
    assert main([*words, "--device", "auto"]) == 0
    capsys.readouterr()
    missing = f"cuda:{torch.cuda.device_count()}"
    assert main([*words, "--device", missing]) == 2
    assert f"{missing} does not exist" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_each_size_of_batch_is_one_graph(
    run: Run, files: dict[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = recorded_engines(monkeypatch)
    words = ["classify", "photos", "photos", "photos/cat.png", "--model", "resnet18", "--weights", str(files[3])]
    assert main([*words, "--device", "cuda", "--batch-size", "2"]) == 0
    (engine,) = engines
    assert engine.report.dtype == torch.bfloat16
    assert engine.report.graphs is not None
    assert [(graph.inputs, graph.replays) for graph in engine.report.graphs] == [
        ("2x3x224x224 bfloat16", 2),
        ("1x3x224x224 bfloat16", 1),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_gpu_finds_what_the_cpu_finds(
    dtype: str, run: Run, files: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["photos", "--model", "resnet18", "--weights", str(files[3]), "--json", "-"]
    on_cpu = json.loads(run(*words)[1])["photographs"]
    assert main(["classify", *words, "--device", "cuda", "--dtype", dtype]) == 0
    on_gpu = json.loads(capsys.readouterr().out)["photographs"]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        expected = {guess["index"]: guess["probability"] for guess in a["classes"]}
        for guess in b["classes"]:
            assert guess["probability"] == pytest.approx(expected[guess["index"]], abs=0.02)


@pytest.fixture(scope="module")
def walk_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of 2.4 s, the cat and then coffee, to copy."""
    pytest.importorskip("av")
    from rooftop.media import VideoWriter

    path = tmp_path_factory.mktemp("videos") / "walk.mp4"
    with VideoWriter(path, 10, options={"g": "4", "bf": "0"}) as writer:
        for number in range(24):
            pixels = (data.chelsea() if number < 12 else data.coffee())[:240, :320]
            writer.write(torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous())
    return path


@pytest.fixture
def walk(walk_written: Path, tmp_path: Path) -> Path:
    """The video in the folder of the test, which may damage it."""
    return Path(shutil.copy(walk_written, tmp_path))


def test_a_video_is_a_table_of_times(run: Run, files: dict[int, Path], walk: Path) -> None:
    status, out, err = run("walk.mp4", "--model", "resnet18", "--weights", str(files[3]), "--top", "2")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["video", "time", "class", "probability"]
    model, preprocessing = models.load_classifier("resnet18", files[3])
    expected = list(models.classify_video(model, models.SampledVideo(walk, preprocessing), top=2))
    assert [frame.time for frame in expected] == pytest.approx([0, 1, 2])
    for number, frame in enumerate(expected):
        first, second = lines[1 + 2 * number : 3 + 2 * number]
        assert first[:-3] == (["walk.mp4"] if number == 0 else []) + [f"{frame.time:.3f}", "s"]
        for found, guess in zip((first, second), frame.guesses, strict=True):
            assert found[-3:-1] == ["class", str(guess.index)]
            assert float(found[-1].rstrip("%")) == pytest.approx(100 * guess.probability, abs=0.11)


def test_videos_and_photographs_together_as_json(run: Run, files: dict[int, Path], walk: Path) -> None:
    walk.rename("walk.film")  # a name without information
    words = ["walk.film", "photos", "--model", "resnet18", "--weights", str(files[3]), "--batch-size", "2"]
    status, out, err = run(*words, "--every", "0.5", "--json", "-")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert [photo["path"] for photo in found["photographs"]] == ["photos/cat.png", "photos/coffee.png"]
    (video,) = found["videos"]
    assert (video["path"], video["device"], video["damage"]) == ("walk.film", "cpu", None)
    assert video["fallback_reason"] is None  # the CPU is no fallback, because it was requested
    assert [frame["time"] for frame in video["frames"]] == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert [frame["position"] for frame in video["frames"]] == [0, 5, 10, 15, 20]
    for frame in video["frames"]:
        assert sum(guess["probability"] for guess in frame["classes"]) == pytest.approx(1)
    status, out, _ = run(*words, "--json", "r.json")
    assert status == 0
    assert out.index("photograph") < out.index("video")
    assert json.loads(Path("r.json").read_text())["videos"][0]["path"] == "walk.film"


def test_what_is_before_the_damage_is_shown_and_the_status_is_one(run: Run, files: dict[int, Path], walk: Path) -> None:
    content = bytearray(walk.read_bytes())
    start = content.index(b"mdat") + (len(content) // 2)
    content[start : start + 6000] = b"\xff" * 6000
    walk.write_bytes(content)
    words = ["walk.mp4", "photos", "--model", "resnet18", "--weights", str(files[3]), "--every", "0.1"]
    status, out, err = run(*words, "--json", "r.json")
    assert status == 1
    assert "walk.mp4 cannot be decoded" in err
    assert err.count("\n") == 1
    (video,) = json.loads(Path("r.json").read_text())["videos"]
    assert " ".join(video["damage"].split()) in err
    assert 0 < len(video["frames"]) < 24
    assert out.count(" s ") == len(video["frames"])
    assert "coffee.png" in out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["missing.mp4"], 2, "missing.mp4 does not exist"),
        (["text.mp4"], 2, "text.mp4 is not a video"),
        (["text.film"], 2, "text.film is not an image"),
        (["walk.mp4", "--every", "0"], 2, "--every"),
        (["walk.mp4", "--json", "walk.mp4"], 2, "walk.mp4"),
        (["walk.mp4", "--model", "resnet18"], 1, "was not downloaded"),
    ],
)
def test_what_goes_wrong_with_videos(
    run: Run, walk: Path, words: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("text.mp4", "text.film"):
        Path(name).write_text("no video")
    before = walk.read_bytes()
    got, out, err = run(*words)
    assert (got, out) == (status, ""), err
    assert message in err
    assert err.count("\n") == 1
    assert walk.read_bytes() == before


def test_help_lists_the_verb_without_torch() -> None:
    code = "import sys; from rooftop.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "classify Classify photographs and videos with an image model." in " ".join(done.stdout.split())


def test_its_own_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "--help"]) == 0
    out = capsys.readouterr().out
    assert "rooftop classify cat.jpg" in out
    assert all(name in out for name in models.builtin_models())
