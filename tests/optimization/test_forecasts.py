"""Predicted gains: what a compiler would fuse, and the separate gains of the host and the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rooftop.optimization import forecasts
from rooftop.optimization.forecasts import OperatorClock, fusable_of, quick_ceilings
from rooftop.optimization.outcomes import Step
from rooftop.optimization.timing import ahead, times_of
from rooftop.rewrites import Candidate, Compile, CompileBlocks, CudaGraphs, FusedOptimizer, Times, timed_alone
from rooftop.rewrites.candidates import Call, Compiled, Fusable, OptimizerStep
from rooftop.rewrites.graph_rules import GAP_MS
from rooftop.rewrites.timed_alone import AHEAD_MS, CYCLES_A_MS, alone_ms

CPU = torch.device("cpu")


def test_elementwise_operators_between_products_are_fused() -> None:
    first, second = nn.Linear(64, 512), nn.Linear(512, 64)
    x = torch.randn(4096, 64)

    def run() -> None:
        with torch.no_grad():
            second(first(x).sin().mul(2.0).add(1.0).cos())

    found = fusable_of(run, CPU, quick_ceilings(CPU))
    assert (found.operators, found.kernels) == (4, 1)
    assert 0 < found.after_ms < found.now_ms
    assert found.launches == 6
    assert not found.channels_last


def test_the_clock_of_operators_counts_and_times_them() -> None:
    clock = OperatorClock(CPU)
    for index in range(3):
        with clock.at(index):
            torch.randn(1000).sum()
    assert clock.count == 3
    assert len(clock.times_ms()) == 3
    assert all(ms > 0 for ms in clock.times_ms())


def times(device_ms: float | None, host_ms: float | None, fusable: Fusable | None = None) -> Times:
    calls = (Call(torch.ops.aten.relu.default, (), CPU, 10, 2.0), Call(torch.ops.aten.mm.default, (), CPU, 10, 4.0))
    return Times(max(device_ms or 0.0, host_ms or 8.0), calls, device_ms=device_ms, host_ms=host_ms, fusable=fusable)


def test_the_longer_of_host_and_device_sets_the_gain() -> None:
    assert times(None, None).gain_ms(2.0, 10) == 2.0
    assert times(8.0, 4.0).gain_ms(2.0, 10) == pytest.approx(2.0), "the device is always busy, so its gain counts"
    assert times(2.0, 8.0).gain_ms(1.0, 10) == pytest.approx(4.0), (
        "the host is the limit, and half of its launches are saved"
    )
    assert times(7.0, 8.0).gain_ms(0.5, 10) == pytest.approx(1.5), "with fewer launches, the device is the limit"


def test_graphs_gain_what_the_device_waits() -> None:
    rule = CudaGraphs()
    assert rule.predicted_ms(times(2.0, 8.0)) == 6.0
    assert rule.predicted_ms(times(8.0, 2.0)) == 0.0
    assert rule.predicted_ms(times(None, None)) == 0.0
    fusable = Fusable(operators=0, kernels=0, now_ms=0.0, after_ms=0.0, launches=200, channels_last=False)
    assert rule.predicted_ms(times(8.0, 2.0, fusable)) == pytest.approx(200 * GAP_MS), "and what is between kernels"


def test_graphs_copy_arguments_and_results() -> None:
    fusable = Fusable(operators=12, kernels=2, now_ms=3.0, after_ms=1.0, launches=20, channels_last=False)
    copying = replace(times(8.0, 2.0, fusable), copies_ms=0.5)
    assert CudaGraphs().predicted_ms(copying) == pytest.approx(20 * GAP_MS - 0.5)
    assert Compile().predicted_ms(copying) == pytest.approx(2.0)
    assert Compile("reduce-overhead").predicted_ms(copying) == pytest.approx(1.5)
    measured = replace(copying, compiled=Compiled(6.0, 6.0, 1.0, whole=True))
    assert Compile("reduce-overhead").predicted_ms(measured) == pytest.approx(1.5)


def test_the_compiler_gains_what_it_fuses_and_launches_less() -> None:
    fusable = Fusable(operators=12, kernels=2, now_ms=3.0, after_ms=1.0, launches=20, channels_last=False)
    assert Compile().predicted_ms(times(None, None)) == 0.0, "without times of the step, nothing can be predicted"
    assert Compile().predicted_ms(times(8.0, 2.0, fusable)) == pytest.approx(2.0)
    bound_by_host = times(4.0, 8.0, fusable)
    assert Compile("reduce-overhead").predicted_ms(bound_by_host) == pytest.approx(8.0 - 2.0)
    assert 2.0 < Compile().predicted_ms(bound_by_host) <= 6.0
    assert 0 < CompileBlocks().predicted_ms(bound_by_host) < Compile().predicted_ms(bound_by_host)
    assert Compile().predicted_ms(times(None, None, fusable)) == pytest.approx(2.0, abs=0.1)


def test_the_host_launches_each_compiled_kernel() -> None:
    fusable = Fusable(operators=200, kernels=30, now_ms=1.0, after_ms=0.5, launches=270, channels_last=False)
    bound_by_host = replace(times(2.0, 4.0, fusable), launch_ms=0.007)
    assert Compile().predicted_ms(bound_by_host) == pytest.approx(4.0 - 0.1 - 100 * 4 * 0.007)
    assert Compile("reduce-overhead").predicted_ms(bound_by_host) == pytest.approx(4.0 - 1.5)
    slow_host = replace(bound_by_host, launch_ms=0.02)
    assert Compile().predicted_ms(slow_host) < 0, "eager launches are faster than compiled ones"
    graphs = replace(slow_host, wall_ms=2.0, host_ms=0.0)
    assert Compile().predicted_ms(graphs) == pytest.approx(0.5), "graphs are replayed, so the host launches nothing"


def test_a_graph_without_an_operator_also_waits_less() -> None:
    calls = (Call(torch.ops.aten.relu.default, (), torch.device("cuda"), 100, 0.3),)
    graphs = Times(0.5, calls, device_ms=0.5, host_ms=0.0)
    assert graphs.idle_ms == pytest.approx(0.002)
    assert graphs.gain_ms(0.1, 40) == pytest.approx(0.1 + 40 * 0.002)
    launched = replace(graphs, host_ms=0.4)
    assert launched.idle_ms == 0.0
    assert launched.gain_ms(0.1, 40) == pytest.approx(0.1)
    assert replace(graphs, wall_ms=0.2).idle_ms == 0.0, "operators alone may take longer than in a graph"
    fusable = Fusable(operators=60, kernels=20, now_ms=0.2, after_ms=0.1, launches=100, channels_last=False)
    assert Compile().predicted_ms(replace(graphs, fusable=fusable)) == pytest.approx(0.1 + 40 * 0.002)


def test_what_compiled_code_has_shown_predicts_the_rest() -> None:
    fusable = Fusable(operators=200, kernels=30, now_ms=1.0, after_ms=0.5, launches=270, channels_last=False)
    blocks = Compiled(wall_ms=3.2, device_ms=1.05, host_ms=3.2, whole=False)
    known = replace(times(2.0, 4.0, fusable), launch_ms=0.007, compiled=blocks)
    assert CompileBlocks().predicted_ms(known) == pytest.approx(0.8)
    assert Compile().predicted_ms(known) == pytest.approx(0.8)
    assert Compile("reduce-overhead").predicted_ms(known) == pytest.approx(4.0 - 1.0)
    whole = replace(known, compiled=replace(blocks, whole=True))
    assert Compile("reduce-overhead").predicted_ms(whole) == pytest.approx(4.0 - 1.05)
    on_cpu = replace(times(None, None, fusable), compiled=Compiled(5.0, None, None, whole=True))
    assert Compile().predicted_ms(on_cpu) == pytest.approx(3.0)


def test_compiling_takes_less_time_for_a_gpu() -> None:
    on_gpu = Times(1.0, (Call(torch.ops.aten.relu.default, (), torch.device("cuda"), 100, 1.0),))
    on_cpu = Times(1.0, (Call(torch.ops.aten.relu.default, (), CPU, 100, 1.0),))
    assert 5 < CompileBlocks().seconds(on_gpu) < Compile().seconds(on_gpu) < Compile().seconds(on_cpu)


def test_a_fused_optimizer_gains_what_its_step_alone_gains() -> None:
    now, then = OptimizerStep(3.0, 1.0, 3.0), OptimizerStep(0.5, 0.4, 0.1)
    on_cpu = replace(times(None, None), optimizer=now, fused=then)
    assert FusedOptimizer().predicted_ms(on_cpu) == 2.5
    assert FusedOptimizer().predicted_ms(replace(on_cpu, fused=None)) == 0.0
    bound_by_device = replace(times(8.0, 4.0), optimizer=now, fused=then)
    assert FusedOptimizer().predicted_ms(bound_by_device) == pytest.approx(0.6)
    bound_by_host = replace(times(4.0, 8.0), optimizer=now, fused=then)
    assert FusedOptimizer().predicted_ms(bound_by_host) == pytest.approx(2.9)
    assert CudaGraphs().predicted_ms(replace(times(2.0, 8.0), optimizer=now)) == 5.0, (
        "graphs do not save the optimizer's launches"
    )


def test_an_optimizer_and_its_fused_form_are_timed() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    given = ((torch.randn(4, 64),), {})
    candidate = Candidate.of(model, optimizer, training=True)
    found = times_of(candidate, Step(True), given, model, 1.0, quick_ceilings(CPU))
    assert found.optimizer.wall_ms > 0
    assert found.fused is not None
    assert found.fused.wall_ms > 0
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    sgd = torch.optim.ASGD(model.parameters())
    found = times_of(replace(candidate, optimizer=sgd), Step(True), given, model, 1.0, quick_ceilings(CPU))
    assert found.fused is None


class FakeEvent:
    """An event of a GPU on which each operator takes 1 ms, and waits take no time."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(FakeEvent, "now_ms", 0.0)
    for name, fake in {
        "Event": FakeEvent,
        "_sleep": lambda cycles: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device: None,
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return torch.device("cuda")


def work() -> None:
    FakeEvent.now_ms += 1.0


def test_events_take_the_times_of_operators_on_a_gpu(gpu: torch.device) -> None:
    clock = OperatorClock(gpu)
    for index in range(3):
        with clock.at(index):
            for _ in range(index):
                work()
    assert clock.times_ms() == [0.0, 1.0, 2.0]
    assert clock.times_ms() == [0.0, 1.0, 2.0], "a second query adds no events"


def test_the_device_waits_for_a_host_that_was_slow(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: waits.append(cycles / CYCLES_A_MS))
    now_ns = [0]
    monkeypatch.setattr(forecasts, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))

    def run(clock: OperatorClock) -> OperatorClock:
        for host_ms in (0.05, 2.0, 100.0):
            with clock.at(0):
                now_ns[0] += int(host_ms * 1e6)
        return clock

    first = run(OperatorClock(gpu))
    assert first.late
    second = run(OperatorClock(gpu, first))
    assert waits == [AHEAD_MS] * 4 + [4.0, forecasts.MOST_AHEAD_MS]
    assert second.late
    waits.clear()
    run(OperatorClock(gpu, OperatorClock(gpu)))
    assert waits == [AHEAD_MS] * 3, "an earlier run of fewer operators"


def test_the_device_works_alone_when_the_host_is_ahead(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone_ms(work, gpu) == 1.0
    assert ahead(work, torch.device("cpu"), 5.0) == (None, None)
    device_ms, host_ms = ahead(work, gpu, 5.0)
    assert device_ms == 5.0, "the step takes the same time if the host is ahead"
    assert host_ms is not None
    assert 0 < host_ms < 5.0
    paused: list[bool] = []

    def quick_after_a_pause() -> None:
        FakeEvent.now_ms += 1.0 if paused and paused.pop() else 4.0

    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: paused.append(True))
    assert ahead(quick_after_a_pause, gpu, 5.0)[0] == 1.25, "a quarter of the time of a run without a pause"
    assert ahead(quick_after_a_pause, gpu, 5.0, 0.5)[0] == 1.25, (
        "the operators' sum is no bound for a step that does not wait"
    )


def test_measured_code_keeps_its_share_on_a_host_that_becomes_slower() -> None:
    before = Times(10.0, (), device_ms=2.0, host_ms=10.0, compiled=Compiled(10.5, 2.0, 10.5, whole=True))
    assert Compile().predicted_ms(before) == pytest.approx(-0.5)
    assert Compile().predicted_ms(replace(before, wall_ms=13.0)) == pytest.approx(-0.65)


def test_the_time_of_a_slow_host_says_nothing_about_the_device(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s, paused = [0.0], list[bool]()
    monkeypatch.setattr(timed_alone, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: paused.append(True))

    def slow_to_launch() -> None:
        clock_s[0] += 20.0 / 1e3
        FakeEvent.now_ms += 15.0 if paused and paused.pop() else 20.0

    assert ahead(slow_to_launch, gpu, 30.0) == pytest.approx((15.0, 20.0)), "and not three quarters of 30 ms"


def test_an_operator_alone_is_not_timed_with_a_slow_host(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, ahead_ms = [0.0], [0.0]
    monkeypatch.setattr(timed_alone, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: ahead_ms.append(cycles / CYCLES_A_MS))

    def slow_to_launch() -> None:
        clock_s[0] += 0.5 / 1e3
        FakeEvent.now_ms += 0.1 + max(0.0, 0.5 - ahead_ms[-1])

    assert alone_ms(slow_to_launch, gpu) == pytest.approx(0.1)
    assert ahead_ms[1:] == [AHEAD_MS, 1.0, 1.0]


def test_a_step_that_waits_for_the_device_takes_at_most_the_time_of_its_operators(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s, slept_ms = [0.0], [0.0]
    monkeypatch.setattr(timed_alone, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept_ms.append(cycles / CYCLES_A_MS))

    def waiting() -> None:
        FakeEvent.now_ms += 4.0
        clock_s[0] += (slept_ms.pop() + 1.0 if len(slept_ms) > 1 else 2.0) / 1e3

    assert ahead(waiting, gpu, 5.0, 3.0) == (3.0, 2.0)
