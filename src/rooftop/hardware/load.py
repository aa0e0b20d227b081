"""Measure the CPU use of other processes during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

DISTURBING_SHARE = 0.05
"""If other programs took more than this share of the cores that a measurement needed, they may have slowed the
measurement down."""
LEAST_S = 0.2  # Linux counts in ticks of 10 ms, so a shorter block gives no useful figure


@dataclass
class OtherLoad:
    """The CPU use of other processes during the `with` block of `other_load`.

    Attributes:
        cores: the number of cores that other processes kept busy, on average over the block.
        seconds: duration of the block.
    """

    cores: float = 0.0
    seconds: float = 0.0

    def disturbs(self, threads: int) -> bool:
        """Whether other processes took cores from a measurement that needed `threads` cores. False if the watched
        `with` block was too short for a useful figure."""
        missing = self.cores + threads - (os.cpu_count() or 1)
        return self.seconds >= LEAST_S and missing > DISTURBING_SHARE * threads


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Watch the CPU's load in the `with` block. The result is filled in when the block ends."""
    seen = OtherLoad()
    began, all_before, own_before = time.perf_counter(), _busy_s(), _own_s()
    try:
        yield seen
    finally:
        seen.seconds = time.perf_counter() - began
        others_s = (_busy_s() - all_before) - (_own_s() - own_before)
        seen.cores = max(0.0, others_s / max(seen.seconds, 1e-9))


def _busy_s() -> float:
    """Seconds for which cores have worked since the machine started, including time that other virtual machines on the
    host took.
    """
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in fields))


def _own_s() -> float:
    """CPU seconds of all threads of this process. Child processes do not count: they take cores from this process like
    any other program.
    """
    own = psutil.Process().cpu_times()
    return float(own.user + own.system)
