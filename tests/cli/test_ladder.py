"""`rooftop ladder`: what it prints and writes, and one clear line for what goes wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftop.cli import ladder as verb
from rooftop.cli import main as cli
from rooftop.cli.words import Words
from rooftop.hardware import ceilings_of
from rooftop.ladder import Climb, Outcome
from rooftop.ladder.memory_levels import Flight, Level, MemoryClimb
from rooftop.ladder.python_climbing import SpeedClimb, SpeedOutcome

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

FOUND = Climb(
    ladder="vector",
    work="z = x + y [of] 8",
    unit="B/s",
    device="a <GPU>",
    roof_ms=0.5,
    bound="memory",
    rungs=(
        Outcome("one block", "CUDA C++", "measured", "", 5.0, 0.01, 1e11, 10.0),
        Outcome("wide [16]", "Triton", "measured", "a note", 0.6, 0.01, 8.3e11, 83.3),
        Outcome("Numba", "CPU", "absent", "not installed"),
    ),
    remarks=("a launch [was] refused",),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `rooftop ladder ...` in an empty folder as on a GPU, with a made-up climb."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, found: Climb = FOUND) -> tuple[int, str, str]:
        monkeypatch.setattr(verb, "pick_device", lambda text: torch.device("cuda"))
        monkeypatch.setattr(verb, "_climbed", lambda *arguments: found)
        status = cli.main(["ladder", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_table_the_figures_and_the_chart(run: Any) -> None:
    status, out, err = run("vector", "--out", "figures.json", "--chart", "chart.html")
    assert (status, err) == (0, "")
    assert "vector: z = x + y [of] 8, a <GPU>, roof 500 us (memory)" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "one block CUDA C++ 5 ms 100 G 10% ██" in lines
    assert any(line.startswith("wide [16] Triton 600 us 830 G 83% ███") and line.endswith("a note") for line in lines)
    assert "Numba CPU - not installed" in lines
    assert "a launch [was] refused" in out
    assert json.loads(Path("figures.json").read_text())["rungs"][1]["percent_of_roof"] == 83.3
    assert "ladder-vector" in Path("chart.html").read_text()


def test_a_wrong_rung_ends_with_status_1(run: Any) -> None:
    wrong = Outcome("wide", "Triton", "wrong", "3 of 8 elements are wrong")
    status, out, err = run("vector", found=Climb(**{**vars(FOUND), "rungs": (wrong,)}))
    assert status == 1
    assert "wrong" in out
    assert err == "rooftop: error: wide in Triton wrong: 3 of 8 elements are wrong\n"


@on_cpu
def test_wrong_calls(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, part in (
        (["ladder", "stairs"], 2, "vector|indexing|reduction|matmul|layer"),
        (["ladder", "vector", "--out", "no/such.json"], 2, "no/such"),
        (["ladder", "vector", "--out", "both", "--chart", "./both"], 2, "both is given for two outputs"),
        (["ladder", "vector", "--chart", "chart.html"], 1, "need an NVIDIA GPU"),
        (["ladder", "python", "--size", "3"], 2, "takes 64 to 4,194,304 points, got 3"),
        (["ladder", "memory", "--size", "3"], 2, "the memory ladder takes no --size"),
    ):
        assert cli.main(words) == status
        assert part in capsys.readouterr().err


@on_cpu
def test_without_a_gpu_the_twins_run_through_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command starts the process in which Triton interprets."""
    pytest.importorskip("triton")
    monkeypatch.setattr(verb, "INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ladder", "indexing", "--size", "12", "--out", "f.json"]) == 0
    assert "No speeds are shown, because they need a GPU" in capfd.readouterr().out
    rungs = json.loads((tmp_path / "f.json").read_text())["rungs"]
    assert {rung["status"] for rung in rungs if rung["tool"] == "Triton"} == {"checked", "absent"}
    assert {rung["ms"] for rung in rungs} == {None}


@on_cpu
def test_a_size_that_does_not_fit_is_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "INTERPRETED", True)
    assert cli.main(["ladder", "matmul", "--size", "100"]) == 2
    assert "a multiple of 8 rows and columns, got 100" in capsys.readouterr().err


def test_the_python_ladder_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table, the point to stop, the figures and the chart of a made-up climb."""
    measured = SpeedOutcome(
        "loops [a]", "Python", "one core", "measured", "a second does not matter", "", 12, 5.0, 0.1, 1.0, 4.0
    )
    found = SpeedClimb("a <work>", ("a CPU",), 2, 2, {"one core": 0.2}, (measured,), 0.0, ("a [remark]",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rooftop.ladder.python_climbing.climb_python", lambda *arguments, **options: found)
    command = ["ladder", "python", "--size", "64", "--device", "cpu", "--out", "f.json", "--chart", "c.html"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "loops [a] Python 5 ms 1 4.0% one core 12" in lines
    assert "Python loops [a] a second does not matter" in lines
    assert "a [remark]" in lines
    assert json.loads(Path("f.json").read_text())["rungs"][0]["copied_bytes"] == 12
    assert "ladder-python" in Path("c.html").read_text()
    wrong = SpeedClimb(**{**vars(found), "rungs": (SpeedOutcome("loops", "Python", "one core", "wrong", "", "off"),)})
    monkeypatch.setattr("rooftop.ladder.python_climbing.climb_python", lambda *arguments, **options: wrong)
    assert cli.main(["ladder", "python", "--size", "64", "--device", "cpu"]) == 1
    assert "loops in Python wrong: off" in capsys.readouterr().err


def test_the_memory_ladder_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    level = Level("DRAM", 1 << 20, 100.0, 1e10, 2, 64)
    found = MemoryClimb("a CPU", "cpu", "core", (level,), "DRAM", (Flight(1, 1, 64, 3e8, 6.4e8),), 0.0, ("a [remark]",))
    monkeypatch.setattr("rooftop.ladder.memory_climbing.climb_memory", lambda *arguments, **options: found)
    assert cli.main(["ladder", "memory", "--device", "cpu"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "DRAM 1 MiB 100 ns 10 G 5 G 1,000 B 500 B" in lines
    assert "1 1 64 B 640 M 300 M 47%" in lines
    assert "a [remark]" in lines


def test_ceilings_of_a_known_machine_have_what_the_ladders_need() -> None:
    ceilings = ceilings_of("h200")
    assert ceilings.peak("fp16") > ceilings.peak("fp32")


def test_a_wrong_size_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "pick_device", lambda text: torch.device("cuda"))
    monkeypatch.setattr(verb, "measure_ceilings", None)
    assert cli.main(["ladder", "matmul", "--size", "100"]) == 2
    assert "a multiple of 8 rows and columns, got 100" in capsys.readouterr().err


def test_on_the_command_line_the_interpreter_replaces_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that ends the command thus ends the interpreter too."""

    def replaced(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert (program, environment["TRITON_INTERPRET"]) == (sys.executable, "1")
        raise SystemExit(words)

    monkeypatch.setattr(os, "execve", replaced)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rooftop", "ladder", "vector", "--debug"])
    with pytest.raises(SystemExit) as ended:
        verb._interpreted(Words(["ladder", "vector"], ends_process=True))
    assert ended.value.code == sys.orig_argv  # type: ignore[comparison-overlap]


def test_memory_that_ran_out_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*arguments: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(verb, "pick_device", full)
    assert cli.main(["ladder", "vector"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rooftop: error: out of memory: ")
    assert "unexpected" not in err


def test_a_pipe_that_is_not_the_output_is_no_silent_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(verb, "pick_device", broken)
    assert cli.main(["ladder", "vector"]) == 1
    assert "a pipe broke, because the process at its other end has ended" in capsys.readouterr().err
