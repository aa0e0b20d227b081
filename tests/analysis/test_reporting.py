"""A report states the uncertainty of its times, labels each figure, and says what it cannot claim."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from rooftop.analysis.profiling import Profile, profile_program
from rooftop.analysis.program import Program
from rooftop.analysis.report import Report
from rooftop.analysis.reporting import report_of
from rooftop.cost import roof
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.load import OtherLoad
from rooftop.hardware.page_faults import PageFaults
from rooftop.hardware.pulse import Pulse
from rooftop.hardware.sequences import OtherState, StepTime

QUIET = OtherLoad(0.0, 10.0)


@pytest.fixture(scope="module")
def measured() -> Profile:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    return profile_program(Program(net, (torch.randn(32, 64),), {}))


def reported(
    measured: Profile, ceilings: Ceilings, wall: StepTime, load: OtherLoad = QUIET, **changes: object
) -> Report:
    """The same step with other times, on a machine of constant speed."""
    changes = {"pulse": None, **changes}
    profile = dataclasses.replace(measured, wall=wall, load=load, notes=[], **changes)  # type: ignore[arg-type]
    return report_of(profile, ceilings, target="net", mode="inference")


def steps(ms: float, low_ms: float | None = None, high_ms: float | None = None) -> StepTime:
    return StepTime(ms, low_ms or ms, high_ms or ms, 200, 4)


def test_a_quiet_machine_has_no_note_and_a_narrow_interval(measured: Profile, ceilings: Ceilings) -> None:
    report = reported(measured, ceilings, steps(100.0, 99.0, 101.0))
    assert not report.summary.disturbed
    assert not any("Disturbed" in note for note in report.notes)
    low, high = report.summary.percent_interval
    assert low == pytest.approx(report.summary.percent_of_roof * 100 / 101)
    assert high == pytest.approx(report.summary.percent_of_roof * 100 / 99)
    assert f"{report.summary.percent_of_roof:.1f}% of roof: " in report.table()


def test_steps_that_were_not_reproduced_are_said_in_one_line(measured: Profile, ceilings: Ceilings) -> None:
    report = reported(measured, ceilings, steps(100.0, 98.0, 140.0))
    assert report.summary.disturbed
    (note,) = [note for note in report.notes if note.startswith("Disturbed: ")]
    assert "200 steps were timed at 4 moments: half of them took more than 140 ms, the fastest 98 ms" in note
    assert "Ignore differences and gains below 42 ms" in note
    assert " to " in report.table().split("of roof")[0]  # the interval is next to the percentage


def test_other_processes_are_named(measured: Profile, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    report = reported(measured, ceilings, steps(100.0), OtherLoad(1.9, 10.0))
    assert report.summary.disturbed
    assert any("other processes used 1.9 of 4 cores" in note for note in report.notes)


def test_a_gain_that_noise_could_hide_is_not_offered(
    measured: Profile, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 would save some of the operators' time. The report offers bfloat16 on a quiet machine, with an interval
    of the gain, but not with 90% noise.

    On the machine of these ceilings, operators take twice the time of their roofs, casts take the time of their roofs,
    and products take half their time in bfloat16.
    """
    ratios = {op.record.spec: 0.5 for op in measured.operators}
    monkeypatch.setattr("rooftop.analysis.advice.format_rules.repeated_ratios", lambda *_: ratios)
    slow = [
        dataclasses.replace(op, measured_ms=2 * roof(op.record.cost, ceilings).ms if op.record.cost else 0.0)
        for op in measured.operators
    ]
    busy_ms = sum(op.measured_ms for op in slow)
    measured = dataclasses.replace(measured, operators=slow, busy_ms=busy_ms)
    quiet = reported(measured, ceilings, steps(busy_ms, 0.99 * busy_ms, 1.01 * busy_ms))
    (half,) = [item for item in quiet.advice if "bfloat16" in item.title]
    assert half.low_ms == pytest.approx(half.gain_ms - 0.01 * busy_ms)
    assert half.high_ms == pytest.approx(half.gain_ms + 0.01 * busy_ms)
    noisy = reported(measured, ceilings, steps(busy_ms, 0.99 * busy_ms, 1.9 * busy_ms))
    assert not [item for item in noisy.advice if "bfloat16" in item.title]


def test_latency_is_a_figure_of_its_own(measured: Profile, ceilings: Ceilings) -> None:
    alone = reported(measured, ceilings, steps(100.0), latency=steps(130.0), busy_ms=97.0)
    assert alone.summary.latency_ms == 130.0
    assert alone.summary.percent_of_roof == pytest.approx(alone.summary.fused_roof_ms)  # wall time 100 ms
    assert alone.gaps.launch_gap_ms == pytest.approx(3.0)
    assert "the GPU sets the pace: the GPU works for 97% of a step. A single step takes 130 ms" in alone.pace
    waiting = reported(measured, ceilings, steps(100.0), latency=steps(101.0), busy_ms=40.0)
    assert "the host sets the pace: the GPU works for 40% of a step. A single step takes the same time." in waiting.pace


def test_operators_beyond_the_plain_step_are_named(measured: Profile, ceilings: Ceilings) -> None:
    report = reported(measured, ceilings, steps(100.0), busy_ms=120.0)
    assert report.gaps.launch_gap_ms == 0.0
    (note,) = [note for note in report.notes if note.startswith("Unexplained: ")]
    assert "took 120 ms, more than the 100 ms of a plain step" in note


def test_disturbed_ceilings_are_counted_and_only_those_that_the_step_uses(
    measured: Profile, ceilings: Ceilings
) -> None:
    names = (
        "host to device pageable",
        "matrix bf16",
        "copy in 24 MiB",
        "matrix fp32",
        "read in 2 MiB",
        "write in 2 MiB",
    )
    report = reported(measured, dataclasses.replace(ceilings, disturbed=names), steps(100.0))
    (note,) = [note for note in report.notes if "ceilings were disturbed" in note]
    assert note.startswith("4 ceilings were disturbed")
    assert "pageable" not in note
    assert "bf16" not in note


def test_the_new_figures_survive_their_file(measured: Profile, ceilings: Ceilings, tmp_path: object) -> None:
    report = reported(measured, ceilings, steps(100.0, 98.0, 140.0), latency=steps(130.0))
    plain = report.to_dict()
    assert Report.from_dict(plain).summary == report.summary
    old = {**plain, "summary": {k: v for k, v in plain["summary"].items() if not k.startswith(("latency", "wall_l"))}}
    assert Report.from_dict(old).summary.latency_ms is None
    broken = {**plain, "summary": {**plain["summary"], "latency_ms": "fast"}}
    with pytest.raises(ValueError, match="latency_ms is 'fast', expected a finite number"):
        Report.from_dict(broken)


@pytest.mark.parametrize(("rate", "said"), [(97.0, ""), (80.0, "a fixed matrix product ran at 80% of the rate")])
def test_a_cpu_that_was_slower_all_the_time_is_said(
    rate: float, said: str, measured: Profile, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps agree with each other, but the percent of roof is not that of the CPU at its best."""
    monkeypatch.setattr(Pulse, "rates", {"product": rate, "read": 100.0})
    monkeypatch.setattr(Pulse, "varied", None)
    pulse = Pulse()
    known = dataclasses.replace(ceilings, pulse={"product": 100.0, "read": 100.0}, threads=torch.get_num_threads())
    report = reported(measured, known, steps(100.0), pulse=pulse)
    disturbed = [note for note in report.notes if note.startswith("Disturbed")]
    assert report.summary.disturbed is bool(said)
    assert bool(disturbed) is bool(said)
    assert all(said in note and "gains below 20 ms; on" in note for note in disturbed)
    others = dataclasses.replace(known, threads=torch.get_num_threads() + 1)
    assert not reported(measured, others, steps(100.0), pulse=pulse).summary.disturbed


@pytest.mark.parametrize(
    ("varied", "drift_ms", "said"),
    [
        (0.04, 4.0, None),
        (0.30, 0.0, "the rate of a fixed matrix product differed by 30% from moment to moment"),
        (0.04, 9.0, "the median of a step differed by 9 ms from moment to moment"),
    ],
)
def test_a_cpu_that_is_not_equally_fast_for_a_few_seconds_is_said(
    varied: float,
    drift_ms: float,
    said: str | None,
    measured: Profile,
    ceilings: Ceilings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest windows agree with the median, but the next process measures another time."""
    monkeypatch.setattr(Pulse, "varied", ("product", varied))
    wall = dataclasses.replace(steps(100.0), drift_ms=drift_ms)
    report = reported(measured, ceilings, wall, pulse=Pulse())
    assert report.summary.disturbed is (said is not None)
    notes = [note for note in report.notes if note.startswith("Disturbed: ")]
    assert [said in note for note in notes] == ([True] if said else [])
    # a GPU's clocks do not depend on the host
    assert not reported(measured, ceilings, wall, pulse=None).summary.disturbed


@pytest.mark.parametrize(("system_ms", "disturbed"), [(4.0, False), (30.0, True)])
def test_a_step_that_takes_its_memory_anew_does_not_repeat_in_another_process(
    system_ms: float, disturbed: bool, measured: Profile, ceilings: Ceilings
) -> None:
    report = reported(measured, ceilings, steps(100.0), faults=PageFaults(9_000.0, system_ms))
    assert report.summary.disturbed is disturbed
    notes = [note for note in report.notes if note.startswith("Disturbed: ")]
    assert len(notes) == disturbed
    part_ms = system_ms * (1 + 1 / torch.get_num_threads()) / 2
    assert all(f"a step took 9,000 pages of memory from the system in about {part_ms:.3g} ms" in note for note in notes)
    assert all(f"Ignore differences and gains below {part_ms:.3g} ms" in note for note in notes)


def test_two_states_of_the_heap_are_told_apart(measured: Profile, ceilings: Ceilings) -> None:
    first = PageFaults(7001.0, 12.0)

    def noted(otherwise: OtherState | None, labelled: PageFaults = first) -> list[str]:
        changes = {"faults": first, "labelled_faults": labelled, "otherwise": otherwise, "busy_ms": 50.0}
        return [n for n in reported(measured, ceilings, steps(100.0), **changes).notes if n.startswith("A step took")]

    (note,) = noted(OtherState(PageFaults(3.0, 0.1), steps(80.0)))
    assert note.startswith("A step took 7,001 pages of memory from the system at first, and 3 pages later (")
    assert "lasted 80 ms" in note
    assert "this adds about 20 ms to the launch gap" in note
    assert "MALLOC_TRIM_THRESHOLD_" in note
    (slower_later,) = noted(OtherState(PageFaults(20_000.0, 30.0), steps(120.0)))
    assert "launch gap" not in slower_later
    (only_labelled,) = noted(None, PageFaults(12.0, 0.0))
    threads = torch.get_num_threads()
    assert f"this adds about {12 * (1 + 1 / threads) / 2:.3g} ms to the launch gap" in only_labelled
    assert noted(None) == []
    assert noted(None, PageFaults(20_000.0, 30.0)) == []  # the records of a long step use additional pages
