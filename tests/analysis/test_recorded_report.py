"""The report of a recording describes its steady steps. Earlier work is reported separately, and so are recordings that
are too short. Only the ceilings that the program needs are measured."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis import Recording, Report, machine_ceilings
from rooftop.analysis.stages import NEEDED
from rooftop.hardware.ceilings import Ceilings

Check = Callable[[Report], None]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def train(model: nn.Module, steps: int, pause_s: float = 0.0) -> list[float]:
    """Return the time of each step, in ms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ends = [time.perf_counter()]
    for _ in range(steps):
        time.sleep(pause_s)
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(ends)]


def recorded(program: Callable[[], Any], ceilings: Ceilings | None) -> Recording:
    with rooftop.recording(device="cpu", ceilings=ceilings, find_steps=True) as recording:
        program()
    return recording


def report_of(program: Callable[[], Any], ceilings: Ceilings) -> Report:
    return recorded(program, ceilings).report


def note_of(report: Report, words: str) -> str:
    (note,) = [note for note in report.notes if words in note]
    return note


def times_in(text: str) -> list[float]:
    """Parse "took 1,733 ms, 21 ms (watched), 300 us" to ms."""
    scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    return [float(number.replace(",", "")) * scale[unit] for number, unit in re.findall(r"([\d.,]+) (us|ms|s)\b", text)]


# ---- the reported steps ------------------------------------------------------------------------------------------


def test_the_start_up_is_told_apart_and_is_no_part_of_a_step(ceilings: Ceilings) -> None:
    took: list[float] = []

    def program() -> None:
        time.sleep(0.15)
        model = net()
        nn.init.orthogonal_(nn.Linear(200, 200).weight)
        model.double().float()
        took.append(1e3 * (time.perf_counter() - began))
        took.extend(train(model, NEEDED + 8, pause_s=0.002))

    began = time.perf_counter()
    report = report_of(program, ceilings)
    note = note_of(report, "Before the first step the program needed")
    start_up_ms, *first_ms = times_in(note.replace("(imports, data, weights)", ""))
    assert 150 < start_up_ms < 1.01 * (took[0] + took[1])  # a step begins at the call of its module
    assert len(first_ms) == 3
    assert "The wall time is from later steps." in note
    assert report.mode == f"{NEEDED + 8} recorded steps"
    assert 2 < report.summary.wall_ms < 1.5 * max(took[2:])  # even on a busy machine
    names = {row.name for row in report.ops}
    assert "aten::addmm" in names
    assert not names & {"aten::uniform_", "aten::linalg_qr", "aten::normal_"}
    assert not any("qr" in item.title + item.evidence for item in report.advice)


def test_a_slow_first_step_is_not_in_the_wall_time(ceilings: Ceilings) -> None:
    """The first step also reads the data set, like a loader's first batch."""

    took: list[float] = []

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        began = time.perf_counter()
        for step in range(NEEDED + 3):
            loss = model(torch.ones(8, 32)).sum()
            time.sleep(0.2 if step == 0 else 0.003)
            loss.backward()
            optimizer.step()
            took.append(1e3 * (time.perf_counter() - began) - sum(took))

    report = report_of(program, ceilings)
    assert report.summary.wall_ms < 1.5 * max(took[1:])  # even on a busy machine
    assert times_in(note_of(report, "Its first steps took").partition("first steps took")[2])[0] > 200


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_few_steps_are_told_with_the_duration_of_each(steps: int, ceilings: Ceilings) -> None:
    model = net()
    took: list[float] = []
    report = report_of(lambda: took.extend(train(model, steps, pause_s=0.03)), ceilings)
    said = "There was only 1 step." if steps == 1 else f"There were only {steps} steps."
    assert said in note_of(report, said)
    first = "Its first step took" if steps == 1 else "Its first steps took"
    told = note_of(report, first).partition(first)[2]
    durations = times_in(told)
    assert len(durations) == min(steps, 3)
    assert all(ms > 29 for ms in durations[1:])  # the first step begins at the call of its module
    assert told.count("(watched)") == min(steps, 2)
    assert (30 if steps > 2 else 0) < report.summary.wall_ms < 1.5 * max(took)
    if steps == 3:
        assert report.summary.wall_ms == pytest.approx(durations[2], rel=0.05)
    assert report.modules.find("(optimizer)").calls == 1


def test_an_inference_loop_of_15_calls_is_reported_by_one_call(ceilings: Ceilings) -> None:
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    took: list[float] = []

    def program() -> None:
        with torch.no_grad():
            for _ in range(15):
                began = time.perf_counter()
                model(torch.ones(400, 400))
                time.sleep(0.004)
                took.append(1e3 * (time.perf_counter() - began))

    report = report_of(program, ceilings)
    assert report.mode == "15 recorded steps"
    assert 0.5 * min(took[-4:]) < report.summary.wall_ms < 1.5 * max(took[-4:])  # other programs may use the machine
    assert report.summary.flops == pytest.approx(2 * 2 * 400**3, rel=0.01)
    assert {row.phase for row in report.ops} == {"forward"}


def test_weights_updated_by_hand_have_steps(ceilings: Ceilings) -> None:
    weight = torch.ones(32, 4, requires_grad=True)

    def program() -> None:
        for _ in range(NEEDED + 4):
            (torch.ones(8, 32) @ weight).square().sum().backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight.sub_(1e-5 * weight.grad)
                weight.grad = None

    report = report_of(program, ceilings)
    assert report.mode == f"{NEEDED + 4} recorded steps"
    assert report.summary.flops < 3 * 2 * 8 * 32 * 4


def test_evaluation_after_training_is_not_in_the_verdict(ceilings: Ceilings) -> None:
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(4):
            for _ in range(7):
                model(torch.ones(8, 32)).sum().backward()
                optimizer.step()
            with torch.no_grad():
                for _ in range(5):
                    model(torch.ones(8, 32))
                    time.sleep(0.1)

    report = report_of(program, ceilings)
    assert report.summary.wall_ms < 80
    assert next(row.calls for row in report.ops if row.name == "aten::relu") == 1


@pytest.mark.parametrize(
    "make", [partial(torch.optim.LBFGS, max_iter=3), torch.optim.SGD], ids=["LBFGS", "as Lightning does"]
)
def test_in_a_closure_forward_and_backward_have_their_own_phases(make: Callable[..., Any], ceilings: Ceilings) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 32)).square().mean()
        loss.backward()
        return loss

    report = report_of(lambda: [optimizer.step(closure) for _ in range(NEEDED + 2)], ceilings)
    phases = {row.name: row.phase for row in report.ops if row.name in ("aten::addmm", "aten::threshold_backward")}
    assert phases == {"aten::addmm": "forward", "aten::threshold_backward": "backward"}
    assert any(row.phase == "optimizer" for row in report.ops)
    assert report.modules.find("0").flops > 0
    assert not any("optimizer" in item.title and "linear" in item.title.lower() for item in report.advice)


def test_a_program_that_goes_on_with_a_finer_habit_keeps_its_coarser_steps(ceilings: Ceilings) -> None:
    """An evaluation of ten calls, then training of many steps. The report is about the training."""
    model = net()

    def program() -> None:
        with torch.no_grad():
            for _ in range(10):
                model(torch.ones(8, 32))
        train(model, NEEDED + 1)

    report = report_of(program, ceilings)
    assert report.mode == f"{NEEDED + 1} recorded steps"
    assert {row.phase for row in report.ops} == {"forward", "backward", "optimizer"}


# ---- ceilings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Each requested measurement of this machine, with the number of torch's threads and the default device."""
    asked: list[dict[str, Any]] = []

    def measure(device: torch.device, **words: Any) -> Ceilings:
        words.pop("progress", None)
        asked.append({**words, "threads": torch.get_num_threads(), "default": torch.empty(0).device.type})
        return ceilings

    monkeypatch.setattr(machine_ceilings, "measure_ceilings", measure)
    monkeypatch.setattr(machine_ceilings, "raised_and_kept", lambda found, operators, device: (found, []))
    return asked


def test_before_a_program_only_what_it_probably_needs_is_measured(measured: list[dict[str, Any]]) -> None:
    model = net().double()
    recording = recorded(lambda: [model(torch.ones(8, 32).double()) for _ in range(3)], None)
    (before,) = measured
    assert set(before["precisions"]) == {"fp32", "bf16"}
    assert before["links"] is False
    assert recording.report.summary.flops > 0
    _, after = measured
    assert set(after["precisions"]) == {"bf16", "fp64"}
    assert after["links"] is False


def test_ceilings_that_are_given_are_not_completed(measured: list[dict[str, Any]], ceilings: Ceilings) -> None:
    model = net()
    assert recorded(lambda: train(model, 3), ceilings).report.ops
    assert measured == []


def test_operators_above_their_roof_raise_the_ceilings(
    measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings
) -> None:
    given: list[str] = []

    def raise_and_keep(found: Ceilings, operators: Any, device: torch.device) -> tuple[Ceilings, list[str]]:
        given.extend(op.record.name for op in operators)
        return found, ["They raised the ceilings."]

    monkeypatch.setattr(machine_ceilings, "raised_and_kept", raise_and_keep)
    model = net()
    assert "They raised the ceilings." in recorded(lambda: train(model, NEEDED), None).report.notes
    assert "aten::addmm" in given
    assert "They raised the ceilings." not in recorded(lambda: train(model, NEEDED), ceilings).report.notes


def test_what_a_program_has_set_does_not_change_the_machine(measured: list[dict[str, Any]]) -> None:
    """The program's threads would change a CPU's ceilings, and its default device would move the measured work."""

    def program() -> None:
        train(net(), 3)
        torch.set_num_threads(2)
        torch.set_default_device("meta")

    try:
        assert recorded(program, None).report.ops
        assert (torch.get_num_threads(), torch.get_default_device().type) == (2, "meta")
    finally:
        torch.set_num_threads(1)
        torch.set_default_device(None)
    assert [(each["threads"], each["default"]) for each in measured] == [(1, "cpu")] * 2


def test_a_device_that_is_full_after_the_program_costs_no_report(
    measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rooftop.recording(device="cpu", find_steps=True) as recording:
        train(net(), NEEDED)

    def full(*given: Any, **words: Any) -> Ceilings:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")

    monkeypatch.setattr(machine_ceilings, "measure_ceilings", full)
    assert any("Tried to allocate 20 GiB" in note for note in recording.report.notes)
