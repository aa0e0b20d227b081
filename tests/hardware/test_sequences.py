"""The time of a step in a sequence is the time on an undisturbed host. The time's interval shows the effect of other
programs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.hardware import sequences
from rooftop.hardware.sequences import LEAST_STEPS, WINDOW_STEPS, StepClock, StepTime

CPU = torch.device("cpu")
durations = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=80)


@given(blocks=st.lists(durations, min_size=1, max_size=5))
def test_the_time_lies_in_its_interval_and_among_the_steps(blocks: list[list[float]]) -> None:
    seen = StepTime.of(blocks)
    every = [ms for block in blocks for ms in block]
    assert seen.low_ms <= seen.ms <= seen.high_ms
    assert min(every) * (1 - 1e-9) <= seen.low_ms
    assert seen.high_ms <= max(every) * (1 + 1e-9)
    assert (seen.steps, seen.blocks) == (len(every), len(blocks))


@given(block=durations)
def test_a_loops_own_time_lies_in_its_interval(block: list[float]) -> None:
    seen = StepTime.of_loop(block)
    assert seen.low_ms <= seen.ms <= seen.high_ms
    assert min(block) * (1 - 1e-9) <= seen.ms <= max(block) * (1 + 1e-9)


def test_a_host_that_is_slow_most_of_the_time_leaves_the_time_alone() -> None:
    """Three of four blocks were slowed down by half or more, so the result is the time of the fourth block."""
    blocks = [[15.0] * 100, [10.0] * 100, [17.0] * 100, [16.0] * 100]
    seen = StepTime.of(blocks)
    assert seen.ms == pytest.approx(10.0)
    assert seen.high_ms == pytest.approx(15.5)
    assert seen.spread > 0.5


def test_blocks_that_differ_are_told_by_their_medians() -> None:
    found = StepTime.of([[10.0] * 50, [10.0] * 30 + [12.0] * 31, [10.0] * 50])
    assert found.drift_ms == pytest.approx(2.0)
    assert StepTime.of([[10.0, 99.0, 10.0]]).drift_ms == 0.0


def test_one_lucky_window_is_not_the_time() -> None:
    seen = StepTime.of([[10.0] * 300 + [5.0] * WINDOW_STEPS])
    assert (seen.ms, seen.low_ms) == (10.0, 5.0)


def test_what_comes_every_few_steps_belongs_to_the_step() -> None:
    """A garbage collection at every tenth step lengthens each window by a tenth of the collection's time."""
    seen = StepTime.of([([10.0] * 9 + [20.0]) * 12])
    assert seen.ms == pytest.approx(11.0)


def test_the_steps_of_a_loop_differ_and_all_of_them_count() -> None:
    seen = StepTime.of_loop([10.0] * 9 + [30.0])
    assert seen.ms == pytest.approx(12.0)
    assert (seen.low_ms, seen.high_ms) == (10.0, 12.0)


def test_a_clock_counts_what_comes_after_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of each block is slow, as after a pause, and does not count."""
    now, first = 0.0, True

    def step() -> None:
        nonlocal now, first
        now += 0.05 if first else 0.002
        first = False

    ticks = SimpleNamespace(perf_counter=lambda: now, perf_counter_ns=lambda: round(1e9 * now))
    monkeypatch.setattr(sequences, "time", ticks)
    clock = StepClock(step, CPU)
    for _ in range(3):
        first = True
        clock.run_block(0.02)
    assert clock.wall.blocks == 3
    assert clock.wall.steps >= 3 * LEAST_STEPS
    assert (clock.wall.ms, clock.wall.high_ms) == (pytest.approx(2.0), pytest.approx(2.0))
    assert clock.launching_ms is None


def test_single_steps_are_timed_apart() -> None:
    clock = StepClock(lambda: time.sleep(0.003), CPU)
    clock.run_alone(4)
    assert clock.latency.steps == 4
    assert clock.latency.ms >= 3.0


@pytest.mark.gpu
def test_a_sequence_hides_the_host_behind_the_gpu() -> None:
    """The host needs 30 ms for a step that takes the GPU 40 ms. The host's time is hidden in a sequence, but not in a
    single step.

    Other tests may share the GPU, so sequence and single step are timed in turn.
    """
    x = torch.randn(8192, 8192, device="cuda")

    def work() -> None:
        for _ in range(2):
            torch.mm(x, x)

    def step() -> None:
        time.sleep(0.03)
        work()

    clock, bare = (StepClock(fn, torch.device("cuda")) for fn in (step, work))
    for _ in range(3):
        for each in (clock, bare):
            each.run_block(0.2)
    clock.run_alone(5)
    assert clock.wall.ms < 1.4 * bare.wall.ms
    assert clock.latency.ms > 60.0
    assert clock.launching_ms is not None
    assert clock.launching_ms >= 30.0


@pytest.mark.gpu
def test_a_slow_host_sets_the_pace() -> None:
    x = torch.randn(64, 64, device="cuda")

    def step() -> None:
        time.sleep(0.003)
        torch.mm(x, x)

    clock = StepClock(step, torch.device("cuda"))
    clock.run_block(0.2)
    assert 3.0 <= clock.wall.ms < 4.0
