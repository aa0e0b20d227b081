"""The time of a step in a sequence of steps, and the time of one step alone.

In a loop the host prepares the next step while the device works on this one. So a step takes as long as the slower of
the two: its **wall** time. One step from an idle device also waits for the host's first launches: its **latency**, what
one request waits for. The two are measured apart and never mixed.

- A *block* is a run of steps without a synchronization of ours between them. The first steps of a block fill the
  queue and bring the device to the clocks of lasting work; they are not counted.
- On a GPU an event stands between steps, on a CPU the host's clock is read there.
- Blocks are taken at several moments of an analysis, since a host is not equally fast at all times. The wall time is the
  median over windows of steps, and its interval contains the median of each block.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

LEAD_STEPS, LEAD_S = 2, 0.15
"""Steps before those that are counted: at least so many, and for at least so long. An H100 that was idle runs matrix
products some 50 ms above the clocks that its power limit lets it keep."""
LEAST_STEPS, MOST_STEPS = 3, 400  # of a block
WINDOW_STEPS, LEAST_WINDOWS = 10, 5
CONFIDENCE = 0.95  # of the interval around the median


@dataclass(frozen=True)
class StepTime:
    """Time of a step in ms, with the interval in which it lies.

    Attributes:
        ms: median over windows of steps.
        low_ms, high_ms: the interval. It contains the median of each block, and with 95% confidence that of all windows.
        best_ms: the fastest window.
        steps, blocks: how many steps were timed, at how many moments.
    """

    ms: float
    low_ms: float
    high_ms: float
    best_ms: float
    steps: int
    blocks: int = 1

    @property
    def spread(self) -> float:
        """Width of the interval, relative to the time."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms > 0 else 0.0

    @classmethod
    def of(cls, blocks: Sequence[Sequence[float]]) -> StepTime:
        """From the time in ms of each step of each block (at least one step in all)."""
        counted = [list(block) for block in blocks if block]
        steps = sum(len(block) for block in counted)
        size = max(1, min(WINDOW_STEPS, steps // LEAST_WINDOWS))
        by_block = [_windows(block, size) for block in counted]
        windows = sorted(ms for block in by_block for ms in block)
        middles = [statistics.median(block) for block in by_block]
        low_ms, high_ms = _median_interval(windows)
        return cls(
            ms=statistics.median(windows),
            low_ms=min(low_ms, *middles),
            high_ms=max(high_ms, *middles),
            best_ms=windows[0],
            steps=steps,
            blocks=len(counted),
        )


def _windows(block: list[float], size: int) -> list[float]:
    """Means over successive steps; what is left at the end joins the last window."""
    count = max(1, len(block) // size)
    borders = [number * size for number in range(count)] + [len(block)]
    return [statistics.fmean(block[start:end]) for start, end in pairwise(borders)]


def _median_interval(ascending: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median by order statistics, which assumes no distribution."""
    count, rank, tail = len(ascending), 0, 0.5 ** len(ascending)
    # So many of the smallest may lie below the interval that the median does so with 2.5% at most.
    while rank + 1 < (count + 1) // 2 and tail + math.comb(count, rank + 1) * 0.5**count <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return ascending[rank], ascending[count - 1 - rank]


class StepClock:
    """Times one step, again and again, at the moments at which it is asked to.

    Args:
        step: runs once; it may synchronize by itself.
        device: where it runs.
    """

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self._step, self._device = step, device
        self._blocks: list[list[float]] = []
        self._alone_ms: list[float] = []
        self._launching_ms: list[float] = []

    @property
    def wall(self) -> StepTime:
        """Of a step in sequence. At least one block was run."""
        return StepTime.of(self._blocks)

    @property
    def latency(self) -> StepTime:
        """Of one step alone, from an idle device to the end of its work. `run_alone` was called."""
        return StepTime.of([[ms] for ms in self._alone_ms])

    @property
    def launching_ms(self) -> float | None:
        """From the call of a step alone until it returned, the least that was seen; None on a CPU.

        What else the host does only adds to it: the least of several is what the program itself needs.
        """
        return min(self._launching_ms, default=None) if self._device.type == "cuda" else None

    @property
    def blocks_agree(self) -> float:
        """How far the medians of the blocks are apart, relative to the smallest."""
        middles = [statistics.median(block) for block in self._blocks]
        return max(middles) / min(middles) - 1 if middles and min(middles) > 0 else 0.0

    def run_block(self, seconds: float) -> StepTime:
        """Time one more block of about so long; returns what it alone says."""
        took_s, lead = 0.0, 0
        if self._blocks:
            took_s = 1e-3 * statistics.median(self._blocks[-1])
        began = time.perf_counter()
        while lead < LEAD_STEPS or (lead < MOST_STEPS and time.perf_counter() - began < min(LEAD_S, seconds)):
            self._step()
            lead += 1
        if not took_s:  # the first block: how long a step takes is not known yet
            synchronize(self._device)
            took_s = (time.perf_counter() - began) / lead
            self._step()
        count = max(LEAST_STEPS, min(MOST_STEPS, math.ceil(seconds / max(took_s, 1e-9))))
        durations_ms = self._durations_ms(count)
        self._blocks.append(durations_ms)
        return StepTime.of([durations_ms])

    def run_alone(self, times: int) -> None:
        """Time single steps, each from an idle device to the end of its work."""
        for _ in range(times):
            synchronize(self._device)
            began = time.perf_counter()
            self._step()
            self._launching_ms.append(1e3 * (time.perf_counter() - began))
            synchronize(self._device)
            self._alone_ms.append(1e3 * (time.perf_counter() - began))

    def _durations_ms(self, count: int) -> list[float]:
        if self._device.type != "cuda":
            ticks = [time.perf_counter_ns()]
            for _ in range(count):
                self._step()
                ticks.append(time.perf_counter_ns())
            return [(after - before) / 1e6 for before, after in pairwise(ticks)]
        with torch.cuda.device(self._device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                self._step()
                event.record()
            events[-1].synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(events)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
