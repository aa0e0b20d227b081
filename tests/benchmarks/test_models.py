"""The benchmark of models runs each model in a small size on a CPU, next to its peers, and survives failures."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rooftop
from rooftop import models
from rooftop.hardware import Ceilings, ceilings_of

os.environ["KERAS_BACKEND"] = "torch"  # Keras decides at import
os.environ.setdefault("KERAS_HOME", tempfile.mkdtemp())

# Keras 3.15 saves tensors in a way that NumPy 2 rejects.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "models.py"
Run = Callable[..., tuple[int | str | None, dict[str, Any]]]


@pytest.fixture(autouse=True)
def scripts_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script imports other scripts of its folder, as when Python runs it."""
    monkeypatch.syspath_prepend(SCRIPT.parent)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision_models: ModuleType) -> Run:
    """Run the script for a moment; return its exit status and its file."""

    def script(*words: str) -> tuple[int | str | None, dict[str, Any]]:
        out = tmp_path / "folder" / "models.json"
        command = [SCRIPT.name, "--quick", "--seconds", "0.001", "--out", str(out), *words]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, json.loads(out.read_text())

    return script


@pytest.mark.parametrize(
    ("case", "batch", "peers"),
    [
        ("resnet50-1", 1, ["torchvision", "torchvision, channels last"]),
        ("swin_t-1", 1, ["torchvision", "torchvision, channels last"]),
        ("detr_resnet50-1", 1, ["transformers", "transformers, channels last"]),
        ("conv_lstm-forward", 2, ["keras on torch"]),
        ("conv_lstm-training", 2, ["keras on torch"]),
    ],
)
def test_each_model_beside_its_peers_which_do_the_same(case: str, batch: int, peers: list[str], run: Run) -> None:
    status, found = run("--only", case, "--peers", "fast")
    assert (status, found["failed"]) == (0, {})
    assert [row["variant"] for row in found["rows"]] == ["rooftop", *peers]
    for row in found["rows"]:
        assert (row["case"], row["batch"]) == (case, batch)
        assert row["images_per_s"] == pytest.approx(1e3 * batch / row["ms"])
        assert 0 < row["roof_ms"] <= row["op_roof_ms"]
        assert row["goal_ms"] is None  # the file is from a GPU
    assert [row["apart"] is None for row in found["rows"]] == [True, *[False] * len(peers)]
    assert max(row["apart"] or 0 for row in found["rows"]) < (1e-4 if "conv_lstm" in case else 0.1)


def test_a_model_that_fails_fails_the_run_and_leaves_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = models.model_entry("swin_t")
    monkeypatch.setattr(models, "model_entry", lambda name: entry if name == "resnet50" else 1 / 0)
    status, found = run("--only", "swin_t-1", "conv_lstm-forward", "--peers", "none")
    assert status == 1
    assert found["failed"] == {"swin_t-1": "ZeroDivisionError: division by zero"}
    assert [row["variant"] for row in found["rows"]] == ["rooftop"]


def test_a_peer_that_does_something_else_is_no_peer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.NextFrameNetwork, "forward", lambda network, x: network.logits(x).sigmoid() + 1)
    status, found = run("--only", "conv_lstm-forward", "--peers", "fast")
    assert status == 1
    assert "results within a relative distance" in found["failed"]["conv_lstm-forward"]


def test_a_peer_that_is_not_installed_is_said_to_be_absent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    status, found = run("--only", "conv_lstm-forward", "--peers", "fast")
    assert status == 0
    assert [row.get("absent") for row in found["rows"]] == [None, "not installed: keras"]


def test_reports_of_ours_are_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Ceilings.from_dict({**ceilings_of("h200").to_dict(), "kind": "cpu"})  # measuring this machine takes seconds
    analyze = rooftop.analyze
    monkeypatch.setattr(rooftop, "analyze", lambda *words, **options: analyze(*words, **{**options, "ceilings": known}))
    status, _ = run("--only", "conv_lstm-training", "--peers", "none", "--reports", str(tmp_path / "reports"))
    assert status == 0
    report = rooftop.Report.from_json(tmp_path / "reports" / "conv_lstm-training.json")
    assert (report.target, report.mode) == ("conv_lstm-training", "training")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert "error: needs an NVIDIA GPU" in capsys.readouterr().err
