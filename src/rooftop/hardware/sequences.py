"""Measure the time of a step in a sequence of steps, and the time of one step alone.

In a loop the host prepares the next step while the device works on the present step. So a step takes as long as the
slower of host and device: its **wall** time. A single step from an idle device also waits for the host's first
launches. The time of such a single step, the **latency**, is the waiting time of a single request. Wall time and
latency are measured separately and never mixed.

- A *block* is a run of steps between which this module does not synchronize. The first steps of a block are not
  counted: they fill the queue and bring the device to its sustained clocks.
- Between steps, an event is recorded on a GPU, and the host's clock is read on a CPU.
- Blocks run at several moments of an analysis, since a host's speed varies over time. On a CPU the memory that an
  analysis uses can make steps faster (see `page_faults`). Blocks whose page faults differ from those of the first block
  are excluded.
- Ten steps in a row are a *window*. The reported time is the 10th percentile of the windows' mean step times. Other
  work of a host can only lengthen a step. On a shared H100 host, the median of the same program varied by 40% between
  processes, the fastest windows by 6%. The interval reaches from the fastest window to the median, so it shows the
  effect of other work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rooftop.hardware.page_faults import NO_FAULTS, PageFaults, page_faults

LEAD_STEPS, LEAD_S = 2, 0.15
"""The first steps are not counted: at least this many, and for at least this many seconds. After a pause, an H100 runs
matrix products for some 50 ms at higher clocks than its power limit sustains. A CPU needs one uncounted step.
"""
REST_S = 0.1
"""Seconds for which a GPU pauses before the latency of single steps is measured."""
LEAST_STEPS, MOST_STEPS = 3, 2000  # smallest and largest number of steps in a block
WINDOW_STEPS, LEAST_WINDOWS = 10, 10
LOWER_TENTH = 0.1


@dataclass(frozen=True)
class StepTime:
    """The time of a step in ms, with an interval. A window's time is the mean of up to `WINDOW_STEPS` steps in a row.

    Attributes:
        ms: the time: the 10th percentile of the windows' times, or the mean of all steps if `mean`.
        low_ms, high_ms: the ends of the interval: the shortest and the median window's time; if `mean`, see `of_loop`.
        steps, blocks: the number of timed steps, and the number of their blocks.
        mean: whether the time is the mean of all steps.
        drift_ms: the difference between the highest and the lowest of the blocks' median step times.
    """

    ms: float
    low_ms: float
    high_ms: float
    steps: int
    blocks: int = 1
    mean: bool = False
    drift_ms: float = 0.0

    @property
    def spread(self) -> float:
        """The width of the interval from `low_ms` to `high_ms`, divided by `ms`."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms > 0 else 0.0

    @classmethod
    def of(cls, blocks: Sequence[Sequence[float]]) -> StepTime:
        """The time of a step that always does the same work, from the ms of each step in each block (at least one step
        in total).
        """
        windows, steps = _windows(blocks)
        ms = windows[int(LOWER_TENTH * (len(windows) - 1))]
        medians = [statistics.median(block) for block in blocks]
        drift_ms = max(medians) - min(medians)
        return cls(ms, windows[0], statistics.median(windows), steps, len(blocks), drift_ms=drift_ms)

    @classmethod
    def of_loop(cls, durations_ms: Sequence[float]) -> StepTime:
        """The time of a step in a program's own loop, whose steps differ. The time is the mean, because work that only
        some steps do (printing a value) counts for all steps. The interval contains the middle half of the windows,
        and the mean.
        """
        windows, steps = _windows([durations_ms])
        mean, quarter = statistics.fmean(durations_ms), len(windows) // 4
        low_ms, high_ms = windows[quarter], windows[len(windows) - 1 - quarter]
        return cls(mean, min(mean, low_ms), max(mean, high_ms), steps, mean=True)


def _windows(blocks: Sequence[Sequence[float]]) -> tuple[list[float], int]:
    """The means over windows of successive steps of a block, in ascending order, and the number of steps in all blocks.

    Steps left over at the end of a block join its last window.
    """
    steps = sum(map(len, blocks))
    size = max(1, min(WINDOW_STEPS, steps // LEAST_WINDOWS))
    windows = []
    for block in blocks:
        count = max(1, len(block) // size)
        borders = [number * size for number in range(count)] + [len(block)]
        windows += [statistics.fmean(block[start:end]) for start, end in pairwise(borders) if end > start]
    return sorted(windows), steps


@dataclass(frozen=True)
class OtherState:
    """Page faults and wall time of a step in the excluded blocks, in which the heap was in another state than in the
    first block (see `page_faults`).
    """

    faults: PageFaults
    wall: StepTime


class StepClock:
    """Time a step repeatedly. Each call of `run_block` or `run_alone` runs and times more steps.

    Args:
        step: function that runs one step, and may synchronize.
        device: the device of the step.
        beside: a function to call after each block.
    """

    def __init__(
        self, step: Callable[[], object], device: torch.device, beside: Callable[[], object] | None = None
    ) -> None:
        self._step, self._device, self._beside = step, device, beside
        self._blocks: list[list[float]] = []
        self._alone_ms: list[float] = []
        self._launching_ms: list[float] = []
        self._faults: list[PageFaults] = []  # page faults per step, for each block

    @property
    def blocks(self) -> int:
        """The number of blocks, including excluded blocks."""
        return len(self._blocks)

    @property
    def wall(self) -> StepTime:
        """The wall time of a step, from all blocks with about as many page faults as the first block. At least one
        block must have run.
        """
        return StepTime.of(self._alike(True))

    @property
    def faults(self) -> PageFaults:
        """Mean page faults of a step in the first block; 0 on a GPU."""
        return self._faults[0]

    @property
    def otherwise(self) -> OtherState | None:
        """Wall time and page faults of a step in the excluded blocks; None if no block is excluded. The page faults are
        those of the last excluded block.
        """
        blocks = self._alike(False)
        if not blocks:
            return None
        faults = next(found for found in reversed(self._faults) if not found.is_like(self.faults))
        return OtherState(faults, StepTime.of(blocks))

    def _alike(self, wanted: bool) -> list[list[float]]:
        return [
            block
            for block, found in zip(self._blocks, self._faults, strict=True)
            if found.is_like(self._faults[0]) is wanted
        ]

    @property
    def latency(self) -> StepTime:
        """The time of one step alone, from an idle device to the end of its work. `run_alone` must have been called."""
        return StepTime.of([[ms] for ms in self._alone_ms])

    @property
    def launching_ms(self) -> float | None:
        """The shortest time from the call of a single step until its return; None on a CPU.

        Other work of the host can only lengthen this time, so the shortest of several times is taken.
        """
        return min(self._launching_ms, default=None) if self._device.type == "cuda" else None

    def run_block(self, seconds: float) -> StepTime:
        """Time one more block of about `seconds`. Return the result of this block alone."""
        on_gpu = self._device.type == "cuda"
        least, lead = LEAD_STEPS if on_gpu else 1, 0
        began = time.perf_counter()
        while lead < least or (on_gpu and lead < MOST_STEPS and time.perf_counter() - began < min(LEAD_S, seconds)):
            self._step()
            lead += 1
        if self._blocks:
            took_s = 1e-3 * statistics.median(self._blocks[-1])
        else:  # the time of a step is still unknown
            synchronize(self._device)
            took_s = (time.perf_counter() - began) / lead
            self._step()
        count = max(LEAST_STEPS, min(MOST_STEPS, math.ceil(seconds / max(took_s, 1e-9))))
        durations_ms = self._durations_ms(count)
        self._blocks.append(durations_ms)
        if self._beside is not None:
            self._beside()
        return StepTime.of([durations_ms])

    def run_alone(self, times: int) -> None:
        """Time single steps, each from an idle device to the end of its work.

        A GPU first rests, because a GPU that has just run at its power limit is slower than a GPU that waits for a
        request.
        """
        synchronize(self._device)
        if times and self._device.type == "cuda":
            time.sleep(REST_S)
        for _ in range(times):
            synchronize(self._device)
            began = time.perf_counter()
            self._step()
            self._launching_ms.append(1e3 * (time.perf_counter() - began))
            synchronize(self._device)
            self._alone_ms.append(1e3 * (time.perf_counter() - began))

    def _durations_ms(self, count: int) -> list[float]:
        if self._device.type != "cuda":
            before = page_faults()
            ticks = [time.perf_counter_ns()]
            for _ in range(count):
                self._step()
                ticks.append(time.perf_counter_ns())
            self._faults.append(page_faults().since(before, count))
            return [(after - before) / 1e6 for before, after in pairwise(ticks)]
        self._faults.append(NO_FAULTS)
        with torch.cuda.device(self._device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                self._step()
                event.record()
            events[-1].synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(events)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
