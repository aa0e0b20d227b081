"""The benchmark of training from JPEG files runs, and reports missing sides."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


def test_loader_and_step_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    benchmark = script("image_training")
    monkeypatch.setattr(sys, "argv", ["image_training.py", "--quick", "--out", str(tmp_path / "out")])
    assert benchmark.main() == 0
    ours, theirs, *ways = json.loads((tmp_path / "out").read_text())["results"]
    assert ours["side"] == "rooftop"
    assert all(ours[name] > 0 for name in ("loaded", "resident", "resident_ms", "busy"))
    assert 0 <= ours["waiting"] <= 1
    assert theirs["side"] == "torchvision"
    assert "absent" in theirs or theirs["loaded"] > 0
    assert [row["way"] for row in ways] == list(benchmark.WAYS)
    of_cpu = [row for row in ways if "absent" not in row]
    assert [row["way"] for row in of_cpu] == ["auto", "cpu, threads", "cpu, processes", "cpu, processes, half detail"]
    for row in of_cpu:
        assert row["loaded"] > 0
        assert all(row["item"][part] > 0 for part in ("read_ms", "decode_ms", "change_ms", "all_ms", "hand_over_ms"))
    assert all("needs a GPU" in row["absent"] for row in ways if row not in of_cpu)
