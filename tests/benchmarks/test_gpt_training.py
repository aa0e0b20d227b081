"""The benchmark of GPT-2's training runs, and refuses to compare sides that compute different things."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.hardware import Ceilings

Script = Callable[[str], ModuleType]


def test_both_sides_are_timed_and_start_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, measured: Ceilings
) -> None:
    benchmark = script("gpt_training")
    monkeypatch.setattr(sys, "argv", ["gpt_training.py", "--quick", "--out", str(tmp_path / "out")])
    assert benchmark.main() == 0
    found = json.loads((tmp_path / "out").read_text())["results"]
    assert [row["variant"] for row in found] == ["rooftop", "PyTorch"]
    assert found[0]["first_loss"] == pytest.approx(found[1]["first_loss"], rel=0.01)
    assert all(row["tokens_per_s"] > 0 and row["percent_of_roof"] > 0 for row in found)
