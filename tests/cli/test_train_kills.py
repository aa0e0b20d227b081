"""`rooftop train resnet --data digits`, killed three times at random, ends with the weights of an undisturbed
training."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("sklearn")

STEPS = 18  # three passes of six steps; an evaluation and a checkpoint after each
WORDS = [
    *("train", "resnet", "--data", "digits", "--device", "cpu", "--epochs", "3", "--no-page", "--resume"),
    *("--set", "run.batch=250", "--set", "model.options={channels=4}", "--set", "augment.size=8"),
    *("--set", "mix.mixup=0.2", "--set", "ema.decay=0.9", "--set", "loading.how='processes'"),
    *("--set", "loading.workers=1"),
]
PROGRAM = """
import sys
sys.modules["tensorboard"] = None  # whose import takes a second
from rooftop.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def lines(folder: Path) -> list[dict[str, float]]:
    """The complete lines of the steps in a run's metrics."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if '"loss"' in line and '"values"' not in line]


def test_three_random_kills_change_no_bit(fork: Callable[..., BaseProcess], tmp_path: Path) -> None:
    draw = random.Random(3)

    def run(name: str, until: int | None) -> int | None:
        """Train in a folder, and kill it once it has made a step; return the exit status."""
        streams = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
        folder = tmp_path / name
        process = fork(PROGRAM, *WORDS, "--out", str(folder), environment={}, folder=tmp_path, **streams)
        limit = time.monotonic() + 240
        while process.is_alive() and (until is None or not (steps := lines(folder)) or steps[-1]["step"] < until):
            assert time.monotonic() < limit
            time.sleep(0.005)
        if until is not None:
            time.sleep(draw.uniform(0, 0.1))
            process.kill()
        process.join()
        return process.exitcode

    assert run("whole", None) == 0, (tmp_path / "errors").read_text()
    for until in sorted(draw.sample(range(2, STEPS - 1), 3)):
        assert run("killed", until) == -9, (tmp_path / "errors").read_text()
    assert run("killed", None) == 0, (tmp_path / "errors").read_text()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for name in ("best", "last"):
        found, expected = (safetensors.load_file(folder / f"{name}.safetensors") for folder in (killed, whole))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
    assert [line["step"] for line in lines(killed)] == [*range(1, STEPS + 1)]
    assert [line["loss"] for line in lines(killed)] == [line["loss"] for line in lines(whole)]
