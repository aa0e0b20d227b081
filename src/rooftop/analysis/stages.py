"""The stages of a recording: the measurement made in each step, and the data kept for each kind of step.

    step of a script        1      2      3     4      5-7       8         9 and on
                            whole  early  warm  plain  labelled  settling  timed

The steps `whole` and `early` are labelled: the report is based on them if too few steps follow. `warm` lets caches
settle, `plain` runs under the profiler alone, `labelled` steps measure each operator's time, `settling` lets the host
run ahead of the GPU again, and `timed` steps are undisturbed. If the program compiles code, its first steps run without
profiler and labels. If the program is one of several ranks, a few more steps run under the profiler (`ranks`). Ranks on
GPUs use NCCL, and then CUPTI stays attached after the profiler (see `hardware.cupti`) and slows later steps. So some
steps are timed `before` the profiler begins. A step is not typical if its number of module calls or of backward calls
differs from that of most steps, for example because it contains an evaluation. The time of such a step does not count,
and a watched stage that includes such a step is repeated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.instruments import Labelled, Plain
from rooftop.analysis.profiling import COMPILED_WARM_UP_STEPS
from rooftop.hardware.page_faults import NO_FAULTS, PageFaults, page_faults

LABELLED = 3
LONG_LABELLED_MS = 2000.0  # if the `early` step took longer than this, only one more step is labelled
WARM_UP = 3  # number of steps that are not counted, while allocators and autotuners warm up
# number of steps that are not counted, if the program compiles code in these steps
COMPILED_WARM_UP = 1 + COMPILED_WARM_UP_STEPS
# Limits of stage `timed`: its minimum number of steps, and the number of steps or seconds after which it ends.
LEAST_TIMED, TIMED_STEPS, TIMED_SECONDS = 3, 1000, 10.0
NEEDED = WARM_UP + 1 + LABELLED + 1 + LEAST_TIMED
"""Number of steps of a complete recording (more if the program compiles, or is one of several ranks)."""
RANK_STEPS = 6  # number of steps of a rank under the profiler
# stage `before` ends after this many steps, or after this many seconds if it has at least `LEAST_TIMED` steps
BEFORE_STEPS, BEFORE_SECONDS = 6, 2.0
MOST_REPEATS = 5  # most repeats, in all watched stages together, of steps that were not typical

# largest number of calls of outermost modules in one watched stage; the profiler needs at least 50 kB for each call
MOST_MODULE_CALLS = 3_000
# A watched stage is given up if it takes longer than both limits: this many seconds, and this many times the median
# step.
LONG_STAGE_S, LONG_STAGE_LAPS = 10.0, 20

UNDISTURBED = ("warm", "before", "settling", "timed")
Calls = tuple[int, int]
"""(module calls, backward calls) of a step. These numbers distinguish a step with an evaluation from a step without
one."""
NO_STEP: Calls = (-1, -1)
"""Marks a stretch of other work between two steps, such as the work between two trainings."""


@dataclass(frozen=True)
class Stage:
    """A stage: its name and its number of steps (0 if this number is not fixed: `timed`, `off`)."""

    name: str
    steps: int


def stages(*, found: bool, compiled: bool, ranks: bool, stays: bool = False) -> list[Stage]:
    """The stages of a recording, in order.

    Args:
        found: whether the steps were found instead of reported by the program. If steps are found, the recording knows
            from the first step on whether the program compiles code.
        compiled: whether the program compiles code.
        ranks: whether this is one of several ranks.
        stays: whether CUPTI stays attached once a profiler has begun. If so, some steps are timed before it begins.
    """
    first = "unwatched" if compiled or stays else "whole"
    warm_up = COMPILED_WARM_UP if compiled else WARM_UP
    early = [Stage("early", 1)] if found and not stays else []
    communicating = [Stage("ranks", RANK_STEPS)] if ranks else []
    watched = [Stage("plain", 1), Stage("labelled", LABELLED)]
    return [
        Stage(first, 1),
        *early,
        Stage("warm", warm_up - 1 - len(early)),
        *([Stage("before", BEFORE_STEPS), *watched, *communicating] if stays else [*communicating, *watched]),
        Stage("settling", 1),
        Stage("timed", 0),
    ]


def steps_needed(planned: Sequence[Stage]) -> int:
    """Number of steps that a recording with these stages needs to be complete."""
    return LEAST_TIMED + sum(stage.steps for stage in planned)


@dataclass(frozen=True)
class Lap:
    """One step, timed by the host's clock: its number (from 1), stage, time in ms, and the numbers of module and of
    backward calls."""

    number: int
    stage: str
    ms: float
    calls: Calls


@dataclass(frozen=True)
class Watched:
    """Labelled steps: their operators, the inputs and outputs of their modules, their total time, the number of steps
    (0: a block without steps), and whether the limit of records was reached before the end (`cut`)."""

    labelled: Labelled
    seen: ModuleTracker
    ms: float
    steps: int = 1
    cut: bool = False


@dataclass
class Laps:
    """The recorded steps that one marker ended (see `step_finding`), or that the program reported.

    Attributes:
        steps: number of completed steps.
        laps: the first steps (at most `recordings.MOST_LAPS`), timed by the host's clock.
        whole, early: the first and the second step, labelled, for a program that ends soon.
        plain, labelled: the step under the profiler alone, and the labelled steps.
        timed_ms, timed_calls: durations of undisturbed steps, and the calls in each.
        before_ms, before_calls: durations and calls of steps that were timed before the profiler began.
        faults: page faults of a timed step; 0 on a GPU.
    """

    steps: int = 0
    laps: list[Lap] = field(default_factory=list)
    whole: Watched | None = None
    early: Watched | None = None
    plain: Plain | None = None
    labelled: list[Watched] = field(default_factory=list)
    timed_ms: list[float] = field(default_factory=list)
    timed_calls: list[Calls] = field(default_factory=list)
    before_ms: list[float] = field(default_factory=list)
    before_calls: list[Calls] = field(default_factory=list)
    faults: PageFaults = NO_FAULTS
    repeats: int = 0

    @property
    def usual_calls(self) -> Calls | None:
        """The most frequent (module calls, backward calls) of a step; None until two steps agree."""
        counts = Counter([*(lap.calls for lap in self.laps if lap.number > 1), *self.timed_calls])
        calls, times = counts.most_common(1)[0] if counts else ((0, 0), 0)
        return calls if times > 1 else None

    def is_unusual(self, calls: Calls) -> bool:
        usual = self.usual_calls
        return usual is not None and calls != usual

    @property
    def median_ms(self) -> float:
        """Median time of the steps so far, watched or not; 0 before the first step has ended."""
        return median(lap.ms for lap in self.laps) if self.laps else 0.0

    @property
    def steady_ms(self) -> list[float]:
        """The times of the timed steps that make the usual calls."""
        return self._usual(self.timed_ms, self.timed_calls)

    @property
    def steady_before_ms(self) -> list[float]:
        """The times of the steps with the usual calls, timed before the profiler began."""
        return self._usual(self.before_ms, self.before_calls)

    def _usual(self, durations_ms: list[float], called: list[Calls]) -> list[float]:
        usual, steps = self.usual_calls, list(zip(durations_ms, called, strict=True))
        return [ms for ms, calls in steps if usual is None or calls == usual] or durations_ms

    @property
    def is_complete(self) -> bool:
        return bool(self.labelled) and max(len(self.steady_ms), len(self.steady_before_ms)) >= LEAST_TIMED

    @property
    def undisturbed_ms(self) -> list[float]:
        """The times of unwatched steps from the third step on. If there are no such steps, the times of unwatched steps
        from the second step on."""
        usual = self.usual_calls
        laps = [lap for lap in self.laps if lap.stage in UNDISTURBED and (usual is None or lap.calls == usual)]
        return [lap.ms for lap in laps if lap.number > 2] or [lap.ms for lap in laps if lap.number > 1]


class StepClock:
    """Time steps from mark to mark. The clock never waits for the device: on a GPU the marks are events in a stream.

    A host that runs ahead of its GPU passes some marks early and is held up at others. The GPU reaches each mark only
    after the work before the mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.began = time.perf_counter()
        self._faults = page_faults()
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def steps(self) -> int:
        return len(self._marks) - 1

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def faults(self) -> PageFaults:
        """Mean page faults of the steps so far; 0 on a GPU."""
        if self._device.type == "cuda" or not self.steps:
            return NO_FAULTS
        return page_faults().since(self._faults, self.steps)

    def durations_ms(self) -> list[float]:
        """The duration of each step that the device has finished."""
        if self._device.type == "cuda":
            passed = list(takewhile(lambda event: event.query(), self._marks))
            return [begin.elapsed_time(end) for begin, end in pairwise(passed)]
        return [1e3 * (end - begin) for begin, end in pairwise(self._marks)]
