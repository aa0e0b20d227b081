"""`rooftop data bench`: what it prints and writes, and one clear line for what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rooftop.cli import main as cli
from rooftop.cli.targets import Target, make_input

Run = Callable[..., tuple[int, str, str]]


class Tiny(nn.Module):
    """Classifies images by their mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.mean((2, 3)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `rooftop data bench ... --seconds 0.05` beside a folder `photos` of two classes."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.main(["data", "bench", "--device", "cpu", "--seconds", "0.05", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_table_says_which_stage_bounds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.cli.data_bench.resolve_target", _tiny)
    status, out, err = run(
        *("photos", "--size", "16", "--model", "tiny", "--set", "run.batch=4"),
        *("--set", "loading.workers=1", "--set", "loading.how=threads", "--set", "augment.crop=0.5"),
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "6 samples of photos, batches of 4, 1 worker, cpu"
    assert [line.split()[0] for line in lines[2:8]] == ["disk", "decode", "augment", "collate", "loader", "model"]
    assert "The loader makes batches by 1 thread." in lines
    assert " bounds: " in lines[-1]


def _tiny(name: str, inputs: list[str], device: object, dtype: object, channels_last: bool) -> object:
    assert inputs == ["4x3x16x16"]
    return Target(name, Tiny(), (make_input(inputs[0], torch.float32),))


def test_json(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("photos", "--json", "--set", "loading.workers=1", "--size", "16")
    assert status == 0
    told = json.loads(out)
    assert (told["samples"], told["batch"], told["size"], told["workers"]) == (6, 6, 16, 1)
    assert [row["stage"] for row in told["rows"]] == ["disk", "decode", "augment", "collate", "loader"]
    assert told["bounds"] in ("disk", "decode", "augment", "collate")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "nothing does not exist"),
        (("photos/cat",), "holds no folders"),
        (("photos", "--set", "augment.flip=2"), "augment.flip is 2.0"),
        (("none.tar",), "none.tar does not exist"),
    ],
)
def test_wrong_calls(run: Run, words: tuple[str, ...], said: str) -> None:
    status, _, err = run(*words)
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
