"""A disk that fills up during a training: the training ends with one line, and later continues with the same bits.

The disk is a file system of its own in memory, which only root may mount.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rooftop.cli.main import main
from rooftop.train.fitting import StepRecord, fit, read_metrics
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

safetensors = pytest.importorskip("safetensors.torch")
NUMBERS = [(torch.tensor([float(index % 5), 1.0]), torch.tensor(index % 2)) for index in range(24)]
RECIPE = Recipe.of(
    {
        "run": {"epochs": 2, "batch": 4},  # 12 steps
        "optimizer": {"name": "adamw", "lr": 0.01},
        "ema": {"decay": 0.9},
        "loading": {"how": "here"},
    }
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to its last byte."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return path


def task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 2))
    return Task(model, NUMBERS, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), valid=NUMBERS[:7])


class Fills:
    """Fills the disk after a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def stepped(self, records: list[StepRecord]) -> None:
        if records[-1].step == self.step:
            fill(self.folder)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("step", [1, 3, 5, 6, 11, 12])
def test_a_full_disk_ends_the_training_and_a_resumed_one_has_the_same_bits(
    step: int, disk: Path, tmp_path: Path
) -> None:
    """The line of a step, a checkpoint, or exported weights may be the first to no longer fit."""
    whole, out = tmp_path / "whole", disk / "run"
    fit(task(), RECIPE, device="cpu", out=whole, save_every=3)
    with pytest.raises(OSError, match="make room, then") as caught:
        fit(task(), RECIPE, device="cpu", out=out, save_every=3, observers=[Fills(disk, step)])
    said = str(caught.value)
    assert "No space left on device" in said
    assert "\n" not in said
    assert str(out) in said
    with pytest.raises(OSError, match="No space left on device"):
        fit(task(), RECIPE, device="cpu", out=out, save_every=3, resume=True)
    (disk / "filler").unlink()
    done = fit(task(), RECIPE, device="cpu", out=out, save_every=3, resume=True)
    assert (done.reason, done.steps) == ("done", 12)
    for name in ("best", "last"):
        found, expected = (safetensors.load_file(path / f"{name}.safetensors") for path in (out, whole))
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
    found, expected = (read_metrics(path / "metrics.jsonl") for path in (out, whole))
    assert [each.loss for each in found[0]] == [each.loss for each in expected[0]]
    assert [each.values for each in found[1]] == [each.values for each in expected[1]]
    assert not [path for path in out.rglob("*") if "unfinished" in path.name or path.suffix == ".tmp"]


GPT = [
    *("train", "gpt", "--device", "cpu", "--no-roof", "--num-layers", "1", "--hidden-size", "64", "--seq-length", "8"),
    *("--log-interval", "1", "--train-iters", "8", "--save-interval", "2", "--dropout", "0.1"),
]


def test_a_gpt_whose_disk_is_full_keeps_its_last_checkpoint(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for the first checkpoint only."""
    (tmp_path / "book.txt").write_text("up and down the stairs " * 40)
    subprocess.run(["mount", "-o", "remount,size=1300k", disk], check=True)
    words = [*GPT, "--data-path", str(tmp_path / "book.txt"), "--vocab-size", "256"]
    run = ["--save", str(disk / "run"), "--load", str(disk / "run")]
    assert main([*words, *run]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "could not be written to" in err
    assert "No space left on device" in err
    assert (disk / "run" / "latest").read_text() == "step-00000002\n"
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    assert main([*words, *run]) == 0
    assert main([*words, "--save", str(tmp_path / "whole")]) == 0
    found, expected = (
        safetensors.load_file(folder / "step-00000008" / "rank-00000.safetensors")
        for folder in (disk / "run", tmp_path / "whole")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_gpt_goes_on_without_event_files_and_names_a_metrics_file_that_is_full(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "book.txt").write_text("up and down the stairs " * 40)
    words = [*GPT, "--data-path", str(tmp_path / "book.txt"), "--save", str(tmp_path / "run")]
    (disk / "curves").mkdir()
    (disk / "metrics.jsonl").touch()
    fill(disk)
    assert main([*words, "--tensorboard-dir", str(disk / "curves")]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("note: event files end here, and the training continues: ")
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--metrics", str(disk / "metrics.jsonl")]) == 1
    err = capsys.readouterr().err
    assert err == f"rooftop: error: {disk / 'metrics.jsonl'} cannot be written (No space left on device): make room\n"
