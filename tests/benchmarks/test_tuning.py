"""Tuners of launch parameters: the code that proves and times candidates, and the code that runs all tuners."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

TUNING = Path(__file__).resolve().parents[2] / "benchmarks" / "tuning"

TUNER = """
import tables
from candidates import Task, main


def check():
    assert tables.WARPS != 3, "three warps are wrong"


def call():
    assert tables.WARPS in (4, 8)


def changed():
    tables.MADE.clear()


candidates = {f"{n} warps": {(tables, "WARPS"): n} for n in (8, 3, 4)}
task = Task("first", 1000, candidates, lambda: call, check, {"peer": lambda: list}, changed=changed)
try:
    main([task], None)
finally:
    print("afterwards", tables.WARPS, tables.MADE)
"""


def test_a_wrong_candidate_is_named_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text("WARPS, MADE = 16, ['of 16 warps']\n")
    tuner = tmp_path / "tuner.py"
    tuner.write_text(TUNER)
    command = [sys.executable, str(tuner), "--quick", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TUNING)}, capture_output=True, text=True)
    assert "first: 3 warps" in done.stdout
    assert "afterwards 16 []" in done.stdout
    assert done.returncode == 1, done.stderr  # a quick run only shows that everything works
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["failed"]) == ["first: 3 warps"]
    assert "three warps are wrong" in found["failed"]["first: 3 warps"]
    (row,) = found["rows"]
    assert set(row["us"]) == {"8 warps", "peer"}  # a quick run times the first correct candidate
    assert (row["best"], row["tables"]) == ("8 warps", {"tables.WARPS": 8})


def test_all_tuners_are_run_by_one_command() -> None:
    families = runpy.run_path(str(TUNING / "all.py"))["SHARES"]
    assert set(families) == {path.stem for path in TUNING.glob("*.py")} - {"all", "candidates"}
