"""How fast this CPU is now, compared with its best so far.

Other guests of its host slow a virtual machine down, which is not told of it; a laptop that is warm lowers its clocks.
Steps then take longer from the first to the last, so that their times agree. So two fixed pieces of work are timed with
the ceilings, and again with each step that is compared with these.

    product    a matrix product of 1024 x 1024 x 1024 in float32, flop/s
    read       a sum over 64 MiB, bytes/s
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["Pulse"]

SIDE, READ_BYTES = 1024, 64 << 20
LEAST_CALLS, LEAST_S = 3, 0.02


class Pulse:
    """Attributes:
    rates: by name, the best so far; empty before `take`.
    """

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        left, right, out = (torch.rand(SIDE, SIDE) for _ in range(3))
        numbers, total = torch.rand(READ_BYTES // 4), torch.empty(())
        self._work: dict[str, tuple[float, Callable[[], object]]] = {
            "product": (2.0 * SIDE**3, lambda: torch.mm(left, right, out=out)),
            "read": (float(READ_BYTES), lambda: torch.sum(numbers, 0, out=total)),
        }

    def take(self) -> None:
        """Time both, for some 20 ms each."""
        with torch.no_grad():
            for name, (amount, call) in self._work.items():
                self.rates[name] = max(self.rates.get(name, 0.0), amount / _best_s(call))

    def share_of(self, best: Mapping[str, float]) -> tuple[str, float] | None:
        """Name of the rate that fell most below its earlier best, and its share of it; None without earlier rates."""
        shares = {name: rate / best[name] for name, rate in self.rates.items() if best.get(name)}
        return min(shares.items(), key=lambda share: share[1]) if shares else None


def _best_s(call: Callable[[], object]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < LEAST_CALLS or time.perf_counter() - began < LEAST_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
