"""`rooftop detect`: the table, the JSON, the pictures, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.cli import detect as module
from rooftop.cli import trained_models
from rooftop.cli.main import main
from rooftop.inference import Engine
from rooftop.models.detr.detection import detect
from rooftop.models.detr.network import Detr
from rooftop.models.vision.resnet import Bottleneck

Run = Callable[..., tuple[int, str, str]]

SMALL: dict[str, int] = {
    "queries": 4,
    "width": 32,
    "heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "feed_forward": 48,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with a small network, in a folder with two photographs that have the same name."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    for folder in ("one", "two"):
        Path(folder).mkdir()
        Image.fromarray(pixels).save(Path(folder, "photo.png"))
    small = lambda: Detr(Bottleneck, (1, 1, 1, 1), **SMALL)  # noqa: E731
    monkeypatch.setitem(module.BUILDERS, "detr_resnet50", small)

    def command(*words: str) -> tuple[int, str, str]:
        status = main(["detect", *words, "--device", "cpu"])
        return (status, *capsys.readouterr())

    return command


WORDS = ("one", "two", "--random-weights", "3", "--threshold", "0", "--size", "64")


def test_objects_are_shown_written_and_drawn(run: Run) -> None:
    status, out, err = run(*WORDS, "-o", "found", "--json", "found.json")
    assert status == 0, err
    assert "random weights: the results mean nothing" in out
    assert out.count("photo.png") == 2
    found = json.loads(Path("found.json").read_text())
    assert [photo["picture"] for photo in found["photographs"]] == ["found/photo.png", "found/photo-2.png"]
    for photo in found["photographs"]:
        assert photo["size"] == [64, 48]
        assert len(photo["objects"]) == 4
        with Image.open(photo["picture"]) as picture:
            assert picture.size == (64, 48)
            with Image.open(photo["path"]) as before:
                assert picture.tobytes() != before.tobytes()
    assert sorted(path.name for path in Path("found").iterdir()) == ["photo-2.png", "photo.png"]


def test_unreadable_photographs_are_left_out_and_named_if_asked_for(run: Run) -> None:
    Path("one/a.png").write_text("no image")
    Path("two/z.png").write_bytes(Path("two/photo.png").read_bytes()[:60])
    assert run(*WORDS)[0] == 2
    status, _, err = run(*WORDS, "-o", "found", "--json", "found.json", "--skip-unreadable", "--batch-size", "1")
    assert status == 0, err
    assert [line.split(" ")[1] for line in err.splitlines()] == ["one/a.png", "two/z.png"]
    found = json.loads(Path("found.json").read_text())["photographs"]
    assert [(photo["path"], photo["picture"]) for photo in found] == [
        ("one/photo.png", "found/photo.png"),
        ("two/photo.png", "found/photo-2.png"),
    ]
    assert sorted(path.name for path in Path("found").iterdir()) == ["photo-2.png", "photo.png"]


def test_the_same_seed_finds_the_same(run: Run) -> None:
    first, second, third = (
        run(*words, "--json", "-")[1] for words in (WORDS, WORDS, (*WORDS, "--random-weights", "4"))
    )
    assert first == second != third
    assert json.loads(first)["seed"] == 3


def test_an_engine_gives_what_the_model_gives_and_batches_of_one_size_look_alike_to_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 60), "white").save("two/tall.png")
    engines, calls = [], []

    class Recorded(Engine):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            engines.append(self)

        def __call__(self, batch: torch.Tensor, padding: torch.Tensor) -> Any:
            calls.append((tuple(batch.shape), tuple(padding.shape)))
            return super().__call__(batch, padding)

    monkeypatch.setattr(trained_models, "Engine", Recorded)
    paths = ["one/photo.png", "two/tall.png", "two/tall.png", "one/photo.png", "two/tall.png"]
    words = ["--random-weights", "3", "--threshold", "0", "--size", "48", "--batch-size", "2", "--json", "-"]
    found = json.loads(run(*paths, *words)[1])["photographs"]
    assert len(engines) == 1
    assert calls == [((2, 3, 72, 64), (2, 72, 64))] * 2 + [((1, 3, 72, 48), (1, 72, 48))]
    assert len(engines[0].report.folded) == 17
    with trained_models.seeded(3):
        model = module.BUILDERS["detr_resnet50"]().eval()
    expected = detect(model, paths, threshold=0, shorter=48, longer=80, batch_size=2)
    for ours, theirs in zip(found, expected, strict=True):
        assert [each["score"] for each in ours["objects"]] == pytest.approx([e.score for e in theirs.objects], rel=1e-3)
        boxes = [each["box"] for each in ours["objects"]]
        np.testing.assert_allclose(boxes, [each.box for each in theirs.objects], atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [(), ("--dtype", "fp32")])
def test_a_gpu_finds_what_the_cpu_finds(
    dtype: tuple[str, ...], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:  # from CUDA graphs: an engine that runs without them warns, and warnings are errors here
    on_cpu = json.loads(run(*WORDS, "--json", "-")[1])["photographs"]
    assert main(["detect", *WORDS, "--json", "-", "--device", "cuda", *dtype]) == 0
    on_gpu = json.loads(capsys.readouterr().out)["photographs"]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        scores = [sorted(each["score"] for each in photo["objects"]) for photo in (a, b)]
        assert scores[0] == pytest.approx(scores[1], abs=0.02 if not dtype else 1e-3)


def test_a_photograph_without_objects_says_so(run: Run) -> None:
    assert "nothing" in run(*WORDS[:4], "--threshold", "1", "--size", "64")[1]


def test_a_photograph_is_not_overwritten_by_its_picture(run: Run) -> None:
    before = Path("one/photo.png").read_bytes()
    status, _, err = run("one", *WORDS[2:], "-o", "one")
    assert status == 2
    assert "one/photo.png is a photograph to read" in err
    assert Path("one/photo.png").read_bytes() == before


def test_pictures_of_one_name_do_not_overwrite_each_other() -> None:
    paths = [Path(name) for name in ("a/x.png", "b/x.jpg", "x-2.png", "c/x.png")]
    names = [path.name for path in module._pictures(paths, Path("out"))]
    assert names == ["x.png", "x-2.png", "x-2-2.png", "x-3.png"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("one",), 2, "expected --weights FILE (trained weights), or --random-weights SEED"),
        (
            ("one", "--random-weights", "0", "--weights", "x"),
            2,
            "expected --weights FILE (trained weights), or --random-weights SEED",
        ),
        (("none.jpg", "--random-weights", "0"), 2, "none.jpg does not exist"),
        (("one", "--weights", "no.pth"), 2, "'no.pth'"),
        (("one", "--weights", "empty.pth"), 1, "empty.pth"),
        (
            ("one", "--random-weights", "0", "-o", "empty.pth"),
            2,
            "empty.pth is not a folder: name another with --output",
        ),
        (
            ("one", "--random-weights", "0", "-o", "empty.pth/x"),
            2,
            "empty.pth/x cannot be created (Not a directory): name",
        ),
        (("one", "--random-weights", str(2**64)), 2, "is not in the range 0<=x<="),
        (("empty.pth", "--random-weights", "0"), 2, "empty.pth is not an image"),
    ],
)
def test_what_goes_wrong_is_one_line(words: tuple[str, ...], status: int, message: str, run: Run) -> None:
    Path("empty.pth").touch()
    got, _, err = run(*words)
    assert got == status, err
    assert message in err
    assert err.count("\n") == 1
    assert not Path("detected").exists()


def test_weights_of_five_classes(run: Run, tmp_path: Path) -> None:
    torch.save(module.detr_small(num_classes=5).state_dict(), tmp_path / "five.pth")
    words = ["one", "--model", "detr_small", "--weights", "five.pth", "--threshold", "0", "--size", "64", "--json", "-"]
    status, out, err = run(*words)
    assert status == 0, err
    labels = {each["label"] for each in json.loads(out)["photographs"][0]["objects"]}
    assert labels <= set(range(5))
