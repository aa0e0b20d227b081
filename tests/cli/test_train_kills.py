"""`rooftop train resnet --data digits`, killed three times at random, ends with the weights of an undisturbed
training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
import json, os, random, signal, sys, time
from pathlib import Path

sys.modules["tensorboard"] = None  # whose import takes a second
import sklearn.datasets
import rooftop.cli.train, rooftop.train.fitting, rooftop.train.tasks.resnet
from rooftop.cli.main import main

steps, words = int(sys.argv[1]), sys.argv[2:]
draw = random.Random(3)

def made(out):
    path = Path(out, "metrics.jsonl")
    return path.read_text().count('"loss"') if path.is_file() else 0

def run(out, until):
    '''Train in a folder, and kill the training once it has made a step; print its exit status.'''
    child = os.fork()
    if child == 0:
        code = main([*words, "--out", out])
        sys.stdout.flush()
        os._exit(code)
    ended, limit = (0, 0), time.monotonic() + 240
    while ended[0] == 0 and (until is None or made(out) < until):
        assert time.monotonic() < limit
        time.sleep(0.005)
        ended = os.waitpid(child, os.WNOHANG)
    if ended[0] == 0:
        time.sleep(draw.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    print("status", os.waitstatus_to_exitcode(ended[1]), flush=True)

run("whole", None)
for until in sorted(draw.sample(range(2, steps - 1), 3)):
    run("killed", until)
run("killed", None)
"""


def lines(folder: Path) -> list[dict[str, float]]:
    """The complete lines of the steps in a run's metrics."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if '"loss"' in line and '"values"' not in line]


def test_three_random_kills_change_no_bit(forked: Callable[..., tuple[int | None, str, str]], tmp_path: Path) -> None:
    """Each training is forked from a program that has imported what it needs, which takes longer than the training."""
    status, output, errors = forked(PROGRAM, str(STEPS), *WORDS)
    assert status == 0, errors
    assert re.findall(r"^status (\S+)", output, re.MULTILINE) == ["0", "-9", "-9", "-9", "0"], errors
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for name in ("best", "last"):
        found, expected = (safetensors.load_file(folder / f"{name}.safetensors") for folder in (killed, whole))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
    assert [line["step"] for line in lines(killed)] == [*range(1, STEPS + 1)]
    assert [line["loss"] for line in lines(killed)] == [line["loss"] for line in lines(whole)]
