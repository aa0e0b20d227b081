"""The page faults of the process are counted, and a step on a CPU reports its number."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.hardware.page_faults import MANY, PageFaults, page_faults
from rooftop.hardware.sequences import StepClock

PAGES = 5_000


def touch_new_memory() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def test_each_new_page_counts_once() -> None:
    before = page_faults()
    for _ in range(2):
        touch_new_memory()
    taken = page_faults().since(before, steps=2)
    assert PAGES <= taken.count < 1.2 * PAGES
    assert taken.system_ms >= 0.0


def test_a_clock_has_the_pages_of_a_step() -> None:
    clock = StepClock(touch_new_memory, torch.device("cpu"))
    clock.run_block(0.01)
    clock.run_block(0.01)
    assert clock.blocks == clock.wall.blocks == 2
    assert PAGES <= clock.faults.count < 1.2 * PAGES
    assert clock.otherwise is None
    kept = torch.ones(10)
    quiet = StepClock(kept.sum, torch.device("cpu"))
    quiet.run_block(0.01)
    assert quiet.faults.count < 10


@pytest.mark.parametrize("taking_first", [True, False])
def test_the_wall_time_is_of_the_first_state_of_the_heap(taking_first: bool) -> None:
    """The wall time is from the state before any recording, whether this state is the faster one or not."""
    taking = taking_first

    def step() -> None:
        touch_new_memory() if taking else sum(range(10_000))

    clock = StepClock(step, torch.device("cpu"))
    for now in (taking_first, taking_first, not taking_first, not taking_first):
        taking = now
        clock.run_block(0.01)
    assert clock.blocks == 4
    assert clock.wall.blocks == 2
    assert (clock.faults.count >= PAGES) is taking_first
    assert clock.otherwise is not None
    assert clock.otherwise.wall.blocks == 2
    assert (clock.otherwise.faults.count >= PAGES) is not taking_first
    assert (clock.wall.ms > clock.otherwise.wall.ms) is taking_first


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_states_are_alike_in_both_directions(one: float, other: float) -> None:
    first, second = PageFaults(one), PageFaults(other)
    assert first.is_like(second) is second.is_like(first)
    assert first.is_like(first)
    assert first.is_like(PageFaults(1.5 * one))
    assert first.is_like(PageFaults(3 * one)) is (3 * one < MANY or one == 0)
