"""The benchmark of calls measures all modes and parts, and does not time wrong results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rooftop.launch import fast_path


def test_a_quick_run_measures_all_modes(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, out = script("calls"), tmp_path / "calls.json"
    monkeypatch.setattr(calls, "BURST", 4)
    monkeypatch.setattr(sys, "argv", ["calls.py", "--quick", "--only", "rms_norm", "rope", "sum", "--out", str(out)])
    assert calls.main() == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert [(row["case"], row["mode"]) for row in rows] == [
        (case, mode) for case in ("rms_norm", "sum", "rope") for mode in calls.MODES
    ]
    assert all(row["rooftop"] > 0 and row["torch"] > 0 and row.keys() >= {"by_torch", "spread"} for row in rows)


def test_parts_are_those_of_the_operators(script: Callable[[str], ModuleType]) -> None:
    """A delay of twenty milliseconds in one part of a call is measured in that part only."""
    calls = script("calls")
    rms_norm = next(case for case in calls.CASES if case.name == "rms_norm")
    x, weight = rms_norm.made(torch.device("cpu"))
    x = x.requires_grad_(False)
    real = fast_path.is_plain

    def slow(arguments: Any) -> bool:
        time.sleep(0.02)
        return real(arguments)

    def run() -> Any:
        return torch.ops.rooftop.rms_norm(x, weight, 1e-5, torch.float32)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fast_path, "is_plain", slow)
        found = calls.parts(run, torch.device("cpu"), 3, 0.0)
    assert found.keys() == {"checks", "way", "choosing", "results", "launch", "dispatcher"}
    assert found["way"] > 5 * max(found["choosing"], found["results"], found["launch"], found["dispatcher"])


def test_what_gives_another_result_is_not_timed(script: Callable[[str], ModuleType]) -> None:
    calls = script("calls")
    wrong = calls.Case("sum", calls.inputs(calls.randn(4, 4)), lambda x: x.sum(-1), lambda x: x.sum(0))
    with pytest.raises(AssertionError, match="not close"):
        calls.check(wrong, wrong.made(torch.device("cpu")))
