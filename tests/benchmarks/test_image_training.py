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
    ours, theirs = json.loads((tmp_path / "out").read_text())["results"]
    assert ours["side"] == "rooftop"
    assert all(ours[name] > 0 for name in ("loaded", "resident", "resident_ms", "busy"))
    assert 0 <= ours["waiting"] <= 1
    assert theirs["side"] == "torchvision"
    assert "absent" in theirs or theirs["loaded"] > 0
