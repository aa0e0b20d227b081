"""Pages that the process takes are counted, and a step on a CPU says how many it took."""

from __future__ import annotations

import mmap

import torch

from rooftop.hardware.page_faults import page_faults
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


def test_a_clock_has_the_pages_of_a_step_at_each_moment() -> None:
    clock = StepClock(touch_new_memory, torch.device("cpu"))
    clock.run_block(0.01)
    clock.run_block(0.01)
    assert len(clock.faults) == clock.wall.blocks == 2
    assert all(PAGES <= faults.count < 1.2 * PAGES for faults in clock.faults)
    kept = torch.ones(10)
    quiet = StepClock(kept.sum, torch.device("cpu"))
    quiet.run_block(0.01)
    assert quiet.faults[0].count < 10
