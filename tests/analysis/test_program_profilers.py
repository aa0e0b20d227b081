"""A program that uses a profiler keeps this profiler and its results; the report then comes from a run without
Rooftop's profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.profiler import profile, schedule

import rooftop
from rooftop.analysis import recordings
from rooftop.analysis.program_profilers import ProgramProfilers
from rooftop.analysis.recordings import NEEDED, Recording
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.traces import Trace

OWN_PROFILER = "uses PyTorch's profiler itself"


def train(steps: int) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(profiled: profile) -> int:
    """Steps of the optimizer that a profiler has seen."""
    return sum(event.name == "Optimizer.step#SGD.step" for event in profiled.events() or ())


def found(ceilings: Ceilings, trace: Path | None = None) -> Recording:
    return rooftop.recording(ceilings=ceilings, device="cpu", find_steps=True, trace=trace)


def test_a_profiler_around_the_whole_program_sees_all_of_it(ceilings: Ceilings, tmp_path: Path) -> None:
    with found(ceilings, tmp_path / "trace.json") as recorded, profile(acc_events=True) as profiled:
        train(NEEDED + 10)
    assert seen(profiled) == NEEDED + 10
    report = recorded.report
    assert report.mode == f"{NEEDED + 10} recorded steps"
    assert report.modules.find("(optimizer)").calls == 1
    assert [OWN_PROFILER in note for note in report.notes].count(True) == 1
    assert not any("the program ran only" in note for note in report.notes)
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("before", range(NEEDED))
def test_a_profiler_that_begins_in_any_stage_sees_all_that_follows(before: int, ceilings: Ceilings) -> None:
    with found(ceilings) as recorded:
        train(before)
        with profile(acc_events=True) as profiled:
            train(3)
        train(NEEDED)
    assert seen(profiled) == 3
    recorded.report.table()


def test_a_profiler_with_a_schedule_sees_what_it_is_to_see(ceilings: Ceilings) -> None:
    traces = []
    planned = schedule(wait=1, warmup=1, active=2, repeat=3)
    with (
        found(ceilings) as recorded,
        profile(
            schedule=planned, acc_events=True, on_trace_ready=lambda seen_by: traces.append(seen(seen_by))
        ) as profiled,
    ):
        for _ in range(NEEDED + 4):
            train(1)
            profiled.step()
    assert traces == [2, 4, 6]
    recorded.report.table()


@pytest.mark.parametrize("begin", [profiler.emit_itt, lambda: profiler.profile(use_cpu=True), profile])
def test_each_kind_of_profiler_is_noticed_before_it_begins(begin: type) -> None:
    seen_before = []
    with ProgramProfilers(lambda: seen_before.append(torch.autograd._profiler_enabled())) as profilers:
        with Trace(torch.device("cpu")):
            torch.ones(3) + 1
        assert not profilers.used
        try:
            with begin():
                torch.ones(3) + 1
        except RuntimeError:  # PyTorch was built without ITT; Rooftop noticed the profiler first
            assert begin is profiler.emit_itt
    assert seen_before == [False]


def test_compiled_code_beside_a_profiler_is_refused_with_the_reason(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, nothing can be observed without a profiler, so the analysis is refused."""
    monkeypatch.setattr(Recording, "_runs_compiled", True)
    with found(ceilings) as recorded, profile():
        recorded.compiles()
        train(NEEDED + 10)
    with pytest.raises(rooftop.errors.InputError, match="run the program without its own profiler"):
        _ = recorded.report


def test_a_program_that_labels_slow_down_much_is_labelled_less(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "LONG_LABELLED_MS", 0.0)
    with found(ceilings) as recorded:
        train(NEEDED + 10)
    assert recorded.report.summary.repeats == 1
    assert recorded.report.mode == f"{NEEDED + 10} recorded steps"
