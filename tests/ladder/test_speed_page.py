"""docs/speed.md quotes the results of benchmarks/speed.py, and says for every rung when to stop."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "speed.json").read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_committed_figures() -> None:
    rows = runpy.run_path(str(ROOT / "benchmarks" / "speed.py"))["rows"](FOUND)
    assert len(rows) >= 16
    for row in rows:
        assert row in PAGE


def test_the_committed_run_has_no_wrong_rung() -> None:
    assert {rung["status"] for rung in FOUND["python"]["rungs"]} == {"measured", "absent"}
    assert {rung["tool"] for rung in FOUND["python"]["rungs"] if rung["status"] == "absent"} == {"PyTorch", "CUDA C++"}


def test_every_rung_says_when_to_stop() -> None:
    for rung in FOUND["python"]["rungs"]:
        assert f"| {rung['name']}, {rung['tool']} | {rung['stop']} |" in PAGE


def test_rows_are_printed_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (rung, *_) = FOUND["python"]["rungs"]
    rung = rung | {"speed_up": 1234.5, "percent_of_roof": 0.04, "copied_bytes": 1234}
    (tmp_path / "f.json").write_text(json.dumps({"python": {"rungs": [rung, rung | {"ms": None}]}}))
    monkeypatch.setattr(sys, "argv", ["speed.py", "--rows", str(tmp_path / "f.json")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(ROOT / "benchmarks" / "speed.py"), run_name="__main__")
    assert capsys.readouterr().out == "| loops | Python | 1,200 | <0.1% of one core | 1,234 |\n"
