"""Measure the CPU's current speed, and compare it with the best speed measured earlier.

Other virtual machines on the same host can slow a machine down unnoticed, and a warm laptop lowers its clocks. All
steps then take longer, and since their times agree, nothing looks wrong. So two fixed pieces of work are timed when the
ceilings are measured, and again with the steps that are compared with the ceilings. A host may repeatedly take a core
away for some milliseconds, which very short calls would miss. So each piece of work takes some milliseconds, like a
step.

    product    a matrix product of 1024 x 1024 x 1024 in float32, flop/s
    read       a sum over 64 MiB, bytes/s
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median

import torch

from rooftop.hardware.defaults import usual_defaults

__all__ = ["Pulse"]

SIDE, READ_BYTES = 1024, 64 << 20
LEAST_CALLS, LEAST_S = 3, 0.03


class Pulse:
    """Measure the rates of two fixed pieces of work repeatedly during a measurement."""

    def __init__(self) -> None:
        self._taken: defaultdict[str, list[float]] = defaultdict(list)
        with usual_defaults():
            left, right, out = (torch.full((SIDE, SIDE), 0.5) for _ in range(3))
            numbers, total = torch.full((READ_BYTES // 4,), 0.5), torch.empty(())
        self._work: dict[str, tuple[float, Callable[[], object]]] = {
            "product": (2.0 * SIDE**3, lambda: torch.mm(left, right, out=out)),
            "read": (float(READ_BYTES), lambda: torch.sum(numbers, 0, out=total)),
        }

    def take(self) -> None:
        """Time both pieces of work, for some 30 ms each."""
        with usual_defaults(), torch.no_grad():
            for name, (amount, call) in self._work.items():
                self._taken[name].append(amount / _mean_s(call))

    @property
    def rates(self) -> dict[str, float]:
        """The median of the samples of each rate, by name; empty before `take`. (The best sample may come from a moment
        in which no step ran.)
        """
        return {name: median(rates) for name, rates in self._taken.items()}

    @property
    def varied(self) -> tuple[str, float] | None:
        """Name of the rate that varied most between calls of `take`, and its (maximum - minimum) / median; None after
        fewer than two calls."""
        spans = {
            name: (max(rates) - min(rates)) / median(rates) for name, rates in self._taken.items() if len(rates) > 1
        }
        return max(spans.items(), key=lambda span: span[1]) if spans else None

    def share_of(self, best: Mapping[str, float]) -> tuple[str, float] | None:
        """Name of the rate that is furthest below its earlier best, and the rate as a fraction of that best; None
        without earlier rates.
        """
        shares = {name: rate / best[name] for name, rate in self.rates.items() if best.get(name)}
        return min(shares.items(), key=lambda share: share[1]) if shares else None


def _mean_s(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    calls = 0
    while calls < LEAST_CALLS or time.perf_counter() - began < LEAST_S:
        call()
        calls += 1
    return max(time.perf_counter() - began, 1e-9) / calls
