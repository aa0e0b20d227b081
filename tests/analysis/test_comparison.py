"""A comparison of two reports finds every difference, does not report noise, and counts nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftop
from rooftop.analysis.comparison import compare_reports
from rooftop.analysis.report import Report
from rooftop.cli.main import main
from rooftop.hardware.ceilings import Ceilings


@pytest.fixture
def before(ceilings: Ceilings) -> Report:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    report = rooftop.analyze(net, torch.randn(8, 16), train=True, ceilings=ceilings)
    return replace(report, summary=replace(report.summary, wall_spread=0.02))  # even if this machine is busy


def slower(report: Report, factor: float) -> Report:
    """The same report with every time multiplied."""
    ops = tuple(replace(row, measured_ms=factor * row.measured_ms) for row in report.ops)
    children = tuple(replace(child, measured_ms=factor * child.measured_ms) for child in report.modules.children)
    summary = replace(report.summary, wall_ms=factor * report.summary.wall_ms, wall_spread=0.02)
    return replace(report, ops=ops, summary=summary, modules=replace(report.modules, children=children))


def test_a_report_does_not_differ_from_itself(before: Report) -> None:
    found = compare_reports(before, before)
    assert not found.significant
    assert found.differences == ()
    assert all(change.difference == 0 for change in (*found.figures, *found.operators, *found.modules))


def test_operators_and_modules_add_up_to_what_the_reports_hold(before: Report) -> None:
    after = slower(before, 3.0)
    found = compare_reports(replace(before, summary=replace(before.summary, wall_spread=0.0)), after)
    assert found.speedup == pytest.approx(1 / 3)
    assert (found.noise, found.significant) == (0.02, True)
    assert sum(c.before or 0 for c in found.operators) == pytest.approx(sum(row.measured_ms for row in before.ops))
    assert sum(c.after or 0 for c in found.operators) == pytest.approx(3 * sum(row.measured_ms for row in before.ops))
    assert sum(c.calls_before for c in found.operators) == sum(row.calls for row in before.ops)
    assert {c.name for c in found.modules} == {child.name for child in before.modules.children}
    sizes = [abs(c.difference) for c in found.operators]
    assert sizes == sorted(sizes, reverse=True)


def test_a_change_within_the_noise_is_none(before: Report) -> None:
    quiet = replace(before, summary=replace(before.summary, wall_spread=0.05))
    assert not compare_reports(quiet, slower(quiet, 1.04)).significant
    assert compare_reports(quiet, slower(quiet, 1.2)).significant


def test_operators_that_appear_and_go(before: Report) -> None:
    after = replace(before, ops=tuple(row for row in before.ops if row.name != "aten::relu"))
    found = compare_reports(before, after)
    (gone,) = [change for change in found.operators if change.name == "aten::relu"]
    assert (gone.after, gone.calls_after, gone.calls_before) == (None, 0, 1)
    (new,) = [change for change in compare_reports(after, before).operators if change.name == "aten::relu"]
    assert new.before is None
    assert new.difference == gone.before


def test_another_machine_input_or_version_is_said(before: Report) -> None:
    after = replace(before, device={"name": "Other"}, inputs=("4x16 float32",), versions={"torch": "9.9", "new": "1"})
    said = compare_reports(before, after).differences
    assert f"device: {before.device['name']} -> Other" in said
    assert "inputs: 8x16 float32 -> 4x16 float32" in said
    assert f"torch: {before.versions['torch']} -> 9.9" in said
    assert "new: none -> 1" in said


def test_other_ceilings_are_said(before: Report, ceilings: Ceilings) -> None:
    """A percent of roof may change only because its roof changed."""
    rates = {precision: 1.5 * rate for precision, rate in ceilings.flops.items()}
    after = replace(before, ceilings=replace(ceilings, flops=rates).to_dict())
    (said,) = compare_reports(before, after).differences
    assert said.startswith("ceilings: matrix ")
    assert "+50.0%" in said
    almost = {precision: 1.001 * rate for precision, rate in ceilings.flops.items()}
    same = replace(before, ceilings=replace(ceilings, flops=almost).to_dict())
    assert compare_reports(before, same).differences == ()


def test_the_verb(before: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    before.to_json(one)
    slower(before, 3.0).to_json(other)
    assert main(["compare", str(one), str(other), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "3.00x as slow" in out
    assert "+200.0%" in out
    assert out.count("aten::") == 2
    assert main(["compare", str(other), str(one)]) == 0
    assert "3.00x as fast" in capsys.readouterr().out
    assert main(["compare", str(one), str(one)]) == 0
    assert "no change" in capsys.readouterr().out
    assert main(["compare", str(one), str(other), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["significant"]
    assert plain["figures"][0]["name"] == "wall_ms"


@pytest.mark.parametrize(
    ("factor", "spread", "limit", "status"),
    [
        (1.2, 0.0, "5%", 1),
        (1.2, 0.0, "19.9 %", 1),
        (1.2, 0.0, "20.1", 0),
        (1.2, 0.0, "0", 1),
        (1.0, 0.0, "0%", 0),
        (0.5, 0.0, "0%", 0),  # faster
        (1.2, 0.3, "5%", 0),  # within the noise
    ],
)
def test_a_slowdown_fails_a_job(
    factor: float,
    spread: float,
    limit: str,
    status: int,
    before: Report,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    quiet = replace(before, summary=replace(before.summary, wall_spread=spread))
    quiet.to_json(one)
    replace(quiet, summary=replace(quiet.summary, wall_ms=factor * quiet.summary.wall_ms)).to_json(other)
    assert main(["compare", str(one), str(other), "--fail-above", limit, "--json"]) == status
    said = capsys.readouterr()
    assert json.loads(said.out)["speedup"] == pytest.approx(1 / factor)  # also printed if the comparison fails
    error = f"rooftop: error: the step takes 20.0% longer than before: more than --fail-above {limit.rstrip(' %')}%\n"
    assert said.err == (error if status else "")


def test_what_is_no_report_is_refused(before: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    before.to_json(good)
    bad.write_text("{}")
    for words in (
        [str(good), str(bad)],
        [str(good), "missing.json"],
        [str(good)],
        [str(good), str(good), "--rows", "0"],
        [str(good), str(good), "--fail-above", "-5%"],
        [str(good), str(good), "--fail-above", "much"],
    ):
        assert main(["compare", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("rooftop: error: ")
        assert error.count("\n") == 1
