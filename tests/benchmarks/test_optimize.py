"""The benchmark of `rooftop.optimize` measures each way of a model in rows that survive failures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def optimize(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("optimize")
    monkeypatch.setattr(module, "SECONDS", 0.05)
    return module


def test_a_row_has_each_way_and_what_the_search_found(optimize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("torch.compile", lambda model, **_: model)  # it takes 15 s, and is tried elsewhere
    noted: list[dict[str, Any]] = []

    def note(known: dict[str, Any]) -> None:
        noted.append(json.loads(json.dumps(known)))

    job = optimize.Job(optimize.QUICK, 1, "inference")
    row = optimize.measured(job, torch.device("cpu"), 3, note, lambda: None)
    assert not row["errors"]
    assert row["ms"].keys() == row["spread"].keys() == {"eager", "compile default", "optimize"}
    first = next(known for known in noted if "kept" in known)
    assert first["kept"] == row["kept"]
    assert "compile default" not in first["ms"], "rows are written as they come"
    assert {change["rule"] for change in row["changes"]} >= {"fold-norms", "cuda-graphs"}
    assert row["search"]["before"] > 0


def test_a_way_that_raises_is_an_error_of_its_row(optimize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def broken(model: Any, **_: Any) -> Any:
        raise ValueError("no compiler")

    monkeypatch.setattr("torch.compile", broken)
    job = optimize.Job(optimize.QUICK, 2, "training")
    row = optimize.measured(job, torch.device("cpu"), 3, lambda known: None, lambda: None)
    assert row["errors"] == {"compile default": "ValueError: no compiler"}
    assert row["ms"].keys() == {"eager", "optimize"}


@pytest.mark.parametrize(("name", "limit", "said"), [("nothing", 120.0, "KeyError"), ("tiny_gpt2", 0.2, "not done")])
def test_a_row_that_fails_or_takes_too_long_is_a_row(
    optimize: ModuleType, name: str, limit: float, said: str, tmp_path: Path
) -> None:
    options = argparse.Namespace(budget=3.0, quick=True, limit=limit, logs=tmp_path / "logs")
    row = optimize.row_of(optimize.Job(name, 1, "inference"), None, tmp_path / "turns", options)
    assert said in row["errors"]["row"]
    assert (row["model"], row["ms"]) == (name, {})
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_the_most_telling_rows_come_first(optimize: ModuleType) -> None:
    found = optimize.jobs([], "both", "both")
    assert [(job.name, job.batch) for job in found[:6]] == list(optimize.TELLING)
    assert len(set(found)) == len(found) == 3 * (len(optimize.CASES) - 1)
    assert [str(job) for job in optimize.jobs(["gpt2:1"], "both", "both")] == ["gpt2 batch 1 inference"]
    assert {job.batch for job in optimize.jobs([], "small", "inference")} == {1}
    assert {job.mode for job in optimize.jobs(["bert"], "both", "training")} == {"training"}


@pytest.mark.parametrize(("faster_ms", "errors"), [(0.5, {}), (1.3, {}), (0.5, {"row": "ValueError"})])
def test_rows_are_written_and_errors_and_slower_ones_are_failures(
    optimize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faster_ms: float, errors: dict[str, str]
) -> None:
    def row_of(job: Any, gpu: int | None, turns: Path, options: argparse.Namespace) -> dict[str, Any]:
        assert (gpu, options.budget) == (None, 3.0)
        ms = {"eager": 2.0, "compile default": 1.0, "optimize": 0.5 if job.mode == "training" else faster_ms}
        close = [{"rule": "compile", "predicted_ms": 1.0, "measured_ms": 1.2, "close": True}]
        named = {"model": job.name, "batch": job.batch, "mode": job.mode, "errors": errors, "predictions": close}
        return {**named, "ms": ms, "spread": dict.fromkeys(ms, 0.05)}

    pytest.importorskip("transformers")
    monkeypatch.setattr(optimize, "row_of", row_of)
    out = tmp_path / "optimize.json"
    monkeypatch.setattr(sys, "argv", ["optimize.py", "--quick", "--budget", "3", "--out", str(out)])
    assert optimize.main() == bool(errors)
    written = json.loads(out.read_text())
    assert optimize.failed(written["results"], quick=False) == (bool(errors) or faster_ms > 1)
    assert sorted(row["mode"] for row in written["results"]) == ["inference", "training"]
    assert written["summary"]["training, over compile default"] == pytest.approx(2.0)
    assert written["summary"]["small batch, over best"] == pytest.approx(1 / faster_ms)
    assert written["summary"]["predictions within 30%"] == 1.0


@pytest.mark.parametrize(("ms", "slow"), [(1.0, False), (1.04, False), (1.3, True)])
def test_slower_is_beyond_the_spread_of_the_best(optimize: ModuleType, ms: float, slow: bool) -> None:
    times = {"eager": 2.0, "compile default": 1.0, "optimize": ms}
    assert optimize.slower({"ms": times, "spread": dict.fromkeys(times, 0.05)}) is slow


def test_predictions_are_close_within_a_third_or_if_both_are_small(optimize: ModuleType) -> None:
    def change(predicted_ms: float, measured_ms: float | None) -> dict[str, Any]:
        return {"rule": "compile", "predicted_ms": predicted_ms, "measured_ms": measured_ms}

    changes = [change(1.0, 1.2), change(1.0, 2.0), change(0.0, 0.1), change(0.0, 1.0), change(1.0, None)]
    found = optimize.predictions(changes, 10.0)
    assert [each["close"] for each in found] == [True, False, True, False]
