"""Chooses the fastest way to make batches, by timing the first batches of each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

QUICK_S = 1e-3
"""The training loop itself makes batches that take less time than this: handing a batch from one thread to another
takes about a tenth of it.
"""
NEAR_LINEAR = 0.75
"""Processes are not tried if threads reach this fraction of the ideal speed: processes can gain only the rest.
"""
PROCESSES_GAIN = 0.9
"""Processes are chosen only if they take less than this fraction of the threads' time, because they hold copies of each
batch and of the program.
"""


@dataclass
class Choice:
    """Time each way to make batches, then keep the fastest.

    Attributes:
        ways: ways to try, in this order; a single way is not timed.
        workers: number of threads or processes.
        overlaps: whether workers can make batches while a device computes. Batches made in the loop keep the device
            waiting.
        seconds: measured seconds per batch of each timed way.
        refused: the reason of failure for each way that failed.
        chosen: the chosen way; None while ways remain to be tried.
    """

    ways: Sequence[str]
    workers: int
    overlaps: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None

    def __post_init__(self) -> None:
        if len(self.ways) == 1:
            self.chosen = self.ways[0]

    @property
    def trial(self) -> str | None:
        """The next way to try; None once a way is chosen."""
        if self.chosen is not None:
            return None
        return next(way for way in self.ways if way not in self.seconds and way not in self.refused)

    def timed(self, way: str, seconds: float) -> None:
        """Record the seconds per batch of a way."""
        self.seconds[way] = seconds
        self._settle()

    def failed(self, way: str, why: str) -> None:
        """Record that a way failed, and why."""
        self.refused[way] = why
        self._settle()

    def _settle(self) -> None:
        waiting = [way for way in self.ways if way not in self.seconds and way not in self.refused]
        here, threads = self.seconds.get("here"), self.seconds.get("threads")
        if (here is not None and here <= QUICK_S) or not waiting:
            self.chosen = _fastest(self.seconds, self.overlaps)
        elif here is not None and threads is not None and threads * self.workers * NEAR_LINEAR <= here:
            self.chosen = "threads"

    def __str__(self) -> str:
        """Describe the choice, with its measurements."""
        measured = self._measured()
        if self.chosen is None:
            return f"not chosen yet: {measured or 'nothing was measured'}"
        return f"{self._words(self.chosen)} ({measured})" if measured else self._words(self.chosen)

    def _measured(self) -> str:
        times = ", ".join(f"{seconds * 1e3:.3g} ms {self._words(way)}" for way, seconds in self.seconds.items())
        refused = [f"not {self._words(way)}: {why}" for way, why in self.refused.items()]
        return "; ".join([*([f"a batch takes {times}"] if times else []), *refused])

    def _words(self, way: str) -> str:
        if way == "here":
            return "in the loop"
        kind = {"threads": "thread", "processes": "process"}[way] if self.workers == 1 else way
        return f"by {self.workers} {kind}"


def _fastest(seconds: Mapping[str, float], overlaps: bool) -> str:
    """The fastest way.

    If batches can be made while a device works, the training loop makes them itself only if that takes at most
    `QUICK_S`.
    """
    here = seconds.get("here", float("inf"))
    if here <= QUICK_S:
        return "here"
    cost = {
        way: value * (PROCESSES_GAIN**-1 if way == "processes" else 1.0)
        for way, value in seconds.items()
        if not (overlaps and way == "here")
    }
    return min(cost, key=cost.__getitem__) if cost else "here"
