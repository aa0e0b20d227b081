"""The benchmark of several simultaneous jobs runs in a small size on a CPU, and its figures describe answered
requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rooftop.hardware import Ceilings

Script = Callable[[str], ModuleType]


@pytest.fixture
def serving(script: Script, measured: Ceilings) -> ModuleType:
    """The ceilings of this CPU are in the cache."""
    assert measured.kind == "cpu"
    return script("serving")


def run(serving: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["serving.py", *words])
    status: int = serving.main()
    return status


@pytest.mark.usefixtures("fork")  # a process that has imported torch already
def test_each_way_is_measured_or_says_what_it_needs(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "serving.json"
    assert run(serving, monkeypatch, "--quick", "--jobs", "2", "--seconds", "0.6", "--out", str(out)) == 0
    rows = {row["way"]: row for row in json.loads(out.read_text())["results"]}
    assert tuple(rows) == serving.WAYS
    assert {way: row["missing"] for way, row in rows.items() if "missing" in row} == dict.fromkeys(
        serving.GPU_ALONE, "needs a GPU"
    )
    for way in ("one", "threads", "processes", "batch"):
        row = rows[way]
        assert row["jobs"] == (1 if way == "one" else 2)
        assert 0 < row["median_ms"] <= row["p99_ms"]
        busy = row["jobs"] * 1e3 / row["images_per_s"]  # the time until an answer, if all jobs are always waiting
        assert 0.3 * row["median_ms"] < busy < 3 * row["p99_ms"], row
    capsys.readouterr()
    assert run(serving, monkeypatch, "--table", str(out)) == 0
    shown = capsys.readouterr().out
    assert "| streams | needs a GPU |  |  |" in shown
    assert f"| one | {rows['one']['images_per_s']:,.0f} | " in shown


def test_figures_leave_the_warm_up_out(serving: ModuleType) -> None:
    case = serving.Case(batch=8, jobs=2, devices=("cpu",), size=32, seconds=4.0)
    slow = [(0.0, 0.9)]
    steady = [(1.0 + 0.01 * number, 1.0 + 0.01 * (number + 2)) for number in range(300)]  # two at a time
    found = serving.figures(slow + steady, case)
    assert found["median_ms"] == pytest.approx(20)
    assert found["p99_ms"] == pytest.approx(20)
    assert found["images_per_s"] == pytest.approx(8 * 300 / 3.01, rel=1e-6)
    with pytest.raises(RuntimeError, match="1 answers in 4 s are too few to count: give more --seconds"):
        serving.figures(slow, case)


def test_jobs_are_dealt_to_gpus_in_turn(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = serving.Case(batch=1, jobs=4, devices=("cuda:0", "cuda:1"), size=32, seconds=1.0)
    assert [case.device(job) for job in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    with pytest.raises(SystemExit):
        run(serving, monkeypatch, "--jobs", "3", "--gpus", "2")


def test_mps_without_its_server_says_so(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Any = serving.Case(batch=1, jobs=2, devices=("cuda:0",), size=32, seconds=1.0)
    monkeypatch.setenv("PATH", "")
    assert serving.missing("mps", case) == "needs nvidia-cuda-mps-control"
    assert serving.missing("streams", case) == ""
