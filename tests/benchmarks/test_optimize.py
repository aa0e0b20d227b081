"""The benchmark of `rooftop.optimize` measures each way of a model and says which one is slower."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_a_quick_run_measures_each_way(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    optimize, out = script("optimize"), tmp_path / "optimize.json"
    words = ["optimize.py", "--quick", "--batch", "small", "--budget", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(optimize, "SECONDS", 0.05)
    monkeypatch.setattr("torch.compile", lambda model, **_: model)  # it takes 15 s, and is tried elsewhere
    status = optimize.main()
    (row,) = json.loads(out.read_text())["results"]
    assert status == optimize.slower(row)
    assert row["ms"].keys() == row["spread"].keys() == {"eager", "compile default", "optimize", "without"}
    assert row["checked"][:1] in ([], ["the given inputs"])
    assert {change["rule"] for change in row["changes"]} >= {"fold-norms", "cuda-graphs"}


@pytest.mark.parametrize(("ms", "slow"), [(1.0, False), (1.04, False), (1.3, True)])
def test_slower_is_beyond_the_spread_of_the_best(script: Callable[[str], ModuleType], ms: float, slow: bool) -> None:
    times = {"eager": 2.0, "compile default": 1.0, "optimize": ms}
    assert script("optimize").slower({"ms": times, "spread": dict.fromkeys(times, 0.05)}) is slow
