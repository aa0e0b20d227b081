"""The benchmark of engines without graphs compares all variants, and counts calls and convolutions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.usefixtures("measured")
def test_a_quick_run(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, out = script("engine_calls"), tmp_path / "engine_calls.json"
    monkeypatch.setattr(sys, "argv", ["engine_calls.py", "--quick", "--batches", "1", "--out", str(out)])
    assert benchmark.main() == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["case"] == "resnet50, batch 1"
    assert row["convolutions"] == 53
    assert row["operators"] > 53
    for key in ("host_ms", "ms"):
        assert row[key].keys() == {"rooftop", "rooftop, in Python", "PyTorch"}
        assert min(row[key].values()) > 0
