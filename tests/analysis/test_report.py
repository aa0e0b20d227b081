"""A report can be saved as JSON and read back, other data are refused, and impossible values are flagged."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import rooftop
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import FLAGGED_PERCENT, OperatorRow
from rooftop.analysis.text import renderable
from rooftop.errors import CeilingsFileError
from rooftop.hardware.ceilings import Ceilings


@pytest.fixture
def report(ceilings: Ceilings) -> Report:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return rooftop.analyze(net, torch.randn(8, 16), train=True, ceilings=ceilings)


def test_json_round_trip(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.to_json(path)
    again = Report.from_json(path)
    assert again.to_dict() == report.to_dict()
    assert again.ops == report.ops
    assert again.modules == report.modules
    assert os.listdir(tmp_path) == ["report.json"]


def test_json_holds_what_the_documentation_names(report: Report) -> None:
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert {"ops", "modules", "gaps", "coverage", "ceilings", "advice", "summary", "memory"} <= plain.keys()
    assert plain["gaps"].keys() == {"kernel_gap_ms", "fusion_headroom_ms", "launch_gap_ms"}
    for op in plain["ops"]:
        assert {"name", "shapes", "dtype", "calls", "flops", "bytes"} <= op.keys()
        assert {"roof_ms", "measured_ms", "percent_of_roof", "bound"} <= op.keys()
    assert {"name", "measured_ms", "op_roof_ms", "fused_roof_ms", "children"} <= plain["modules"].keys()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 1, "ops": 3}', "\x00\xff"]
)
def test_what_is_no_report_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"other\.json is not a rooftop report"):
        Report.from_json(path)


def test_ceilings_and_reports_are_told_apart(ceilings: Ceilings, tmp_path: Path) -> None:
    ceilings.save(tmp_path / "ceilings.json")
    with pytest.raises(ValueError, match=r"ceilings\.json is not a rooftop report: the data are the ceilings"):
        Report.from_json(tmp_path / "ceilings.json")
    rooftop.analyze(nn.Linear(4, 4), torch.ones(2, 4), ceilings=ceilings).to_json(tmp_path / "report.json")
    with pytest.raises(CeilingsFileError, match=r"report\.json is not a usable ceilings file \(it holds a report"):
        Ceilings.load(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("summary", "wall_ms"), 0.0),
        (("summary", "wall_ms"), float("nan")),
        (("ops", 0, "measured_ms"), "fast"),
        (("ops", 0, "roof_ms"), float("inf")),
        (("coverage",), None),
        (("device",), {}),
        (("versions",), None),
        (("mode",), None),
        (("device", "name"), 3),
        (("inputs",), [3]),
        (("notes",), [None]),
        (("ops", 0, "name"), None),
        (("ops", 0, "bound"), []),
        (("advice",), [{"title": 3, "evidence": "", "gain_ms": 1.0}]),
        (("memory", "peak_bytes"), "many"),
        (("memory", "timeline"), [["soon", 5]]),
        (
            ("compilation",),
            {"graphs": "one", "kernels": 1, "seconds": 1.0, "graph_breaks": [], "recompilations": []},
        ),
        (("ceilings",), {}),
    ],
)
def test_a_damaged_report_is_refused(place: tuple[str | int, ...], value: object, report: Report) -> None:
    plain = json.loads(json.dumps(report.to_dict()))
    *path, last = place
    inner = plain
    for part in path:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(ValueError, match=r"damaged rooftop report|expected ceilings of format"):
        Report.from_dict(plain)


def test_an_operator_above_its_roof_is_flagged() -> None:
    def row(measured_ms: float) -> OperatorRow:
        return OperatorRow("aten::mm", "forward", (), "float32", 1, 1, {}, 1, 1.0, measured_ms, "compute")

    assert not row(1.0).flagged
    assert not row(100 / FLAGGED_PERCENT + 1e-9).flagged
    assert row(0.9).flagged


def test_table_names_the_gaps_the_operators_and_the_roof(report: Report) -> None:
    table = report.table()
    for words in ("of roof", "fusion headroom", "kernel gap", "launch gap", "addmm", "coverage"):
        assert words in table
    assert max(len(line) for line in table.splitlines()) <= 110


def test_a_narrow_terminal_loses_no_figure_and_tells_fused_kernels_apart(report: Report) -> None:
    """Fused kernels have long names with equal beginnings. A terminal of 80 columns still shows the ends of these
    names."""
    name = "inductor::fused__native_batch_norm_legit_no_training_{}"
    rows = [
        OperatorRow(name.format(end), "backward", ((8, 32, 64, 64),) * 6, "float32", 1, 8, {}, 8, 0.25, 1.5, "memory")
        for end in ("mean", "silu")
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(renderable(dataclasses.replace(report, ops=tuple(rows), notes=()), 2))
    table = console.file.getvalue().partition("slowest operators")[2]  # type: ignore[attr-defined]
    for text in ("1.5 ms", "50.0%", "250 us", "17%", "memory"):
        assert table.count(text) == 2
    assert "bound" in table
    letters = re.sub(r"[^a-z]", "", "".join(line[:14] for line in table.splitlines()))  # the folded names
    assert "mean" in letters
    assert "silu" in letters


def test_a_pipe_is_written_to_and_not_replaced(ceilings: Ceilings, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    ceilings.save(pipe)
    assert pipe.is_fifo()
    assert os.read(reader, 100_000)
    os.close(reader)


def test_a_report_names_itself_in_one_line(ceilings: Ceilings) -> None:
    report = rooftop.analyze(nn.Linear(4, 4), torch.randn(2, 4), ceilings=ceilings, name="layer")
    assert re.fullmatch(r"<Report of layer inference: [\d.,]+ (us|ms), [\d.]+% of roof>", repr(report))


def test_ceilings_of_another_kind_of_device_are_refused(ceilings: Ceilings) -> None:
    gpu = dataclasses.replace(ceilings, kind="cuda")
    with pytest.raises(CeilingsFileError, match="the step runs on a cpu device: leave them out"):
        rooftop.analyze(nn.Linear(4, 4), torch.randn(2, 4), ceilings=gpu)
    with pytest.raises(CeilingsFileError, match=r"rooftop\.predict"):
        rooftop.recording(device="cpu", ceilings=gpu)


def test_a_precision_without_a_rate_leaves_its_operators_uncovered(ceilings: Ceilings) -> None:
    without = dataclasses.replace(ceilings, flops={"fp32": 1e9})
    net = nn.Sequential(nn.Linear(4, 4).double(), nn.ReLU())
    report = rooftop.analyze(net, torch.randn(2, 4, dtype=torch.float64), ceilings=without)
    (row,) = [row for row in report.ops if row.name == "aten::addmm"]
    assert (row.bound, row.uncovered) == ("uncovered", "the fp64 rate of Test machine is unknown")
    assert rooftop.predict(net, torch.randn(2, 4, dtype=torch.float64), ceilings=without).coverage < 1


def test_a_table_of_fewer_than_no_rows_is_refused(report: Report) -> None:
    with pytest.raises(ValueError, match=r"table\(rows=-1\): expected 0 or more"):
        report.table(-1)
