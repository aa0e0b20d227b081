"""Choose a fast way to make batches ("here", "threads" or "processes") by timing the first batches of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

QUICK_S = 1e-3
"""If a batch takes at most this time, in seconds, the training loop itself makes the batches. Handing a batch from one
thread to another takes about a tenth of this time.
"""
NEAR_LINEAR = 0.75
"""If threads reach this fraction of the ideal speed, processes are not tried, because they could be only a little
faster than threads.
"""
PROCESSES_GAIN = 0.9
"""Processes are chosen only if they take less than this fraction of the time of each other way, because processes need
memory for copies of each batch and of the program.
"""


@dataclass
class Choice:
    """Says which way to make batches is to be timed next, and chooses one from the recorded times.

    The remaining ways are not timed if "here" takes at most `QUICK_S` per batch, or if threads make at least
    `NEAR_LINEAR` * `workers` times as many batches per second as "here".

    Attributes:
        ways: ways to try, in this order. If there is only one way, it is chosen without a measurement.
        workers: number of threads or processes.
        overlaps: whether workers can make batches while a device computes. If so, "here" is chosen only if it takes at
            most `QUICK_S` per batch, or if no other way works, because with "here" the device waits for each batch.
        seconds: for each timed way, the measured seconds per batch.
        refused: for each way that failed, the reason.
        chosen: the chosen way; None until a way is chosen.
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
        """The next way of making batches ("here", "threads" or "processes") to time; None if a way is already
        chosen."""
        if self.chosen is not None:
            return None
        return next(way for way in self.ways if way not in self.seconds and way not in self.refused)

    def timed(self, way: str, seconds: float) -> None:
        """Record how many seconds a batch takes with this way of making batches."""
        self.seconds[way] = seconds
        self._settle()

    def failed(self, way: str, why: str) -> None:
        """Record that this way of making batches failed, and the reason."""
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
        """Describe in words which way of making batches was chosen, with the seconds measured for each way."""
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
    """Return the fastest way; "processes" only if it takes less than `PROCESSES_GAIN` times as long as each other way.

    "here" is always chosen if it takes at most `QUICK_S` per batch. Otherwise, if workers can make batches while a
    device computes (`overlaps`), "here" is chosen only if no other way was timed.
    """
    here = seconds.get("here", float("inf"))
    if here <= QUICK_S:
        return "here"
    cost = {
        way: value / PROCESSES_GAIN if way == "processes" else value
        for way, value in seconds.items()
        if not (overlaps and way == "here")
    }
    return min(cost, key=cost.__getitem__) if cost else "here"
