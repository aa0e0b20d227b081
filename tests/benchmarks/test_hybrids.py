"""The benchmark of hybrids trains each network for the same time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


def test_each_network_has_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    pytest.importorskip("sklearn")
    benchmark = script("hybrids")
    monkeypatch.setattr(
        benchmark, "timed", lambda name, options, device: {"resnet": 0.05, "hybrid": 0.1, "swin": 0.19}[name]
    )
    monkeypatch.setattr(sys, "argv", ["hybrids.py", "--quick", "--out", str(tmp_path / "out")])
    assert benchmark.main() == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "out").read_text())["results"]}
    assert {name: row["steps"] for name, row in rows.items()} == {"resnet": 4, "hybrid": 2, "swin": 1}
    assert all(0 <= row["accuracy"] <= 1 and len(row["seeds"]) == 2 for row in rows.values())
    assert "paired" not in rows["hybrid"]
    for name in ("resnet", "swin"):
        assert rows[name]["paired"] == pytest.approx(rows["hybrid"]["accuracy"] - rows[name]["accuracy"])


def test_a_step_is_timed_after_the_warm_up(script: Script) -> None:
    clock = script("hybrids").Clock()
    clock.times = [(1, 0.0), (5, 10.0), (9, 12.0)]
    assert clock.step_s == 0.5
