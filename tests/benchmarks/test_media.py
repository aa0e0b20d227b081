"""A small run of the video benchmark on the CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "media.py"


def test_a_quick_run_measures_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    out = tmp_path / "media.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--quick", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["results"]
    assert {row["what"] for row in rows} == {"sizes", "streams", "access", "training"}
    for row in rows:
        rates = {**row.get("frames_per_s", {}), **row.get("ms_per_frame", {})}
        assert all(rate > 0 for rate in rates.values())
    forms = {name for row in rows if row["what"] == "sizes" for name in row["frames_per_s"]}
    assert {"rooftop, CPU, rgb", "rooftop, CPU, input"} <= forms
