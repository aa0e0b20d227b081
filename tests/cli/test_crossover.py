"""`rooftop crossover`: what it prints and writes, and one clear line for what goes wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftop.cli import main as cli
from rooftop.hardware.crossovers import OPERATIONS, Crossover, CrossoverPoint, measure_crossover
from rooftop.hardware.timing import Timing

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `rooftop ...` in an empty folder, returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def made_up(times: Sequence[tuple[int, float, float, float]], spread: float = 0.01) -> Crossover:
    """A crossover of (size, CPU ms, GPU ms, GPU ms with transfers)."""
    points = tuple(
        CrossoverPoint(size, *(Timing(ms, ms, spread, 5) for ms in variants))  # type: ignore[call-arg]
        for size, *variants in times
    )
    return Crossover("add", "float32", "elements", "a CPU [x]", 8, "a <GPU>", {"torch": "2"}, "2026-01-01", points)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Crossover], list[tuple[Any, ...]]]:
    """Replace the measurement by a made-up crossover; the list is filled with the requests."""

    def put(crossover: Crossover) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def measure(operation: str, *, dtype: torch.dtype, device: torch.device, progress: object) -> Crossover:
            asked.append((operation, dtype, device))
            return crossover

        monkeypatch.setattr("rooftop.cli.crossover.measure_crossover", measure)
        monkeypatch.setattr("rooftop.cli.crossover._pick_gpu", torch.device)
        return asked

    return put


def assert_one_line(result: tuple[int, str, str], status: int, *parts: str) -> None:
    assert result[0] == status, result
    assert result[2].startswith("rooftop: error: ")
    assert result[2].count("\n") == 1
    for part in parts:
        assert part in result[2]
    assert os.listdir() == []


def test_the_table_and_both_break_evens_are_printed(run: Run, measured: Any) -> None:
    asked = measured(made_up([(1024, 0.01, 0.02, 0.08), (4096, 0.04, 0.02, 0.1), (65536, 8.0, 0.02, 0.2)]))
    status, out, err = run("crossover", "add", "--dtype", "bf16", "--device", "cuda:0")
    assert (status, err) == (0, "")
    assert asked == [("add", torch.bfloat16, torch.device("cuda:0"))]
    assert "a CPU [x], 8 threads, against a <GPU>" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["65,536", "8", "ms", "20", "µs", "400x", "200", "µs", "40x"] in rows
    assert "Without transfers: the GPU is faster from about 2,000 elements on." in out
    assert "With transfers: the GPU is faster from about 7,100 elements on." in out
    assert "unsteady" not in out
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("times", "first", "second"),
    [
        ([(1, 1.0, 0.1, 2.0), (4, 1.0, 0.1, 2.0)], "always faster, from 1 to 4", "never faster, from 1 to 4"),
        ([(1, 1.0, 2.0, 0.1), (4, 1.0, 0.1, 2.0)], "from about 1.4 elements", "not at the largest (4 elements)"),
    ],
)
def test_where_nothing_crosses_it_is_said_plainly(
    run: Run, measured: Any, times: list[tuple[int, float, float, float]], first: str, second: str
) -> None:
    measured(made_up(times))
    out = run("crossover", "add")[1]
    without, with_ = (line for line in out.splitlines() if "ith" in line and "transfers:" in line)
    assert first in without
    assert second in with_


def test_an_unsteady_measurement_is_said(run: Run, measured: Any) -> None:
    measured(made_up([(1024, 1, 2, 3)], spread=0.5))
    assert "unsteady: times at 1,024 varied by more than 10%" in run("crossover", "add")[1]


def test_json_goes_to_a_file_or_to_the_terminal_alone(run: Run, measured: Any) -> None:
    crossover = made_up([(1024, 1, 2, 3)])
    measured(crossover)
    status, out, _ = run("crossover", "add", "--json", "times.json")
    assert status == 0
    assert out.endswith("times: times.json\n")
    assert json.loads(Path("times.json").read_text()) == crossover.to_dict()
    status, out, _ = run("crossover", "add", "--json", "-")
    assert status == 0
    assert json.loads(out) == crossover.to_dict()
    assert os.listdir() == ["times.json"]


def test_the_chart_holds_the_curves_and_needs_no_network(run: Run, measured: Any) -> None:
    pytest.importorskip("plotly")
    measured(made_up([(1024, 0.01, 0.02, 0.08), (4096, 0.04, 0.02, 0.1), (65536, 8.0, 0.02, 0.2)]))
    status, out, _ = run("crossover", "add", "-o", "chart.html")
    assert status == 0
    assert out.endswith("chart: chart.html\n")
    page = Path("chart.html").read_text(encoding="utf-8")
    assert "<title>add float32: CPU against GPU</title>" in page
    assert "a &lt;GPU&gt;" in page
    assert "With transfers: the GPU is faster from about 7,100 elements on." in page
    data = page[page.rindex("Plotly.newPlot(") :]
    for name, times in (("CPU", "[0.01,0.04,8.0]"), ("GPU with transfers", "[0.08,0.1,0.2]")):
        assert f'"name":"{name}"' in data
        assert times in data
    assert data.count('"type":"line"') == 2  # the break-even sizes
    assert '<script src="' not in page


def test_a_wrong_call_is_refused_before_measuring(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.cli.crossover.measure_crossover", lambda *_, **__: pytest.fail("measured"))
    assert_one_line(run("crossover"), 2, "crossover --help")
    assert_one_line(run("crossover", "softmax"), 2, "softmax", "layer_norm")
    assert_one_line(run("crossover", "add", "--dtype", "int64"), 2, "int64", "fp32")
    assert_one_line(run("crossover", "add", "--device", "cpu"), 2, "the GPU is compared with the CPU")
    assert_one_line(run("crossover", "add", "--device", "tpu"), 2, "tpu")
    assert_one_line(run("crossover", "add", "-o", "no/such/chart.html"), 2, "no/such")
    assert_one_line(run("crossover", "add", "--json", "."), 2, "folder")


def test_without_a_gpu_it_says_so_and_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("crossover", "matmul", "--json", "times.json")
    assert_one_line(result, 1, "needs an NVIDIA GPU", "nvidia-smi")


def test_without_plotly_a_chart_is_refused_before_measuring(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert_one_line(run("crossover", "add", "-o", "chart.html"), 1, 'pip install "rooftop[report]"')


def test_what_is_measured_can_be_printed(run: Run, measured: Any) -> None:
    """The real measurement, the CPU against itself."""
    measured(measure_crossover("layer_norm", [1, 4], device="cpu", seconds=0.001))
    status, out, _ = run("crossover", "layer_norm")
    assert status == 0
    assert "rows of 1024" in out


@pytest.mark.gpu
def test_on_a_gpu_all_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "matmul", replace(OPERATIONS["matmul"], sizes=(16, 1024)))
    status, out, _ = run("crossover", "matmul", "--json", "times.json")
    assert status == 0
    assert "With transfers: the GPU is faster from about" in out
    assert len(json.loads(Path("times.json").read_text())["points"]) == 2
