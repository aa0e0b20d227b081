"""Climb the python ladder: compare every rung's result with the first rung's, time the rung, and compare its time with
the roof that limits the rung."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.analysis.formats import percent_text
from rooftop.cost import roof
from rooftop.hardware import Timing, compare, measure_ceilings
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.load import other_load
from rooftop.hardware.timing import compare_slow
from rooftop.ladder.climbing import ABSENT, CHECKED, FAILED, MEASURED, WRONG
from rooftop.ladder.nearest import FLOPS_PER_PAIR, INSTRUCTIONS_PER_PAIR, Array
from rooftop.ladder.python_ladder import ALL, GPU, NUMBA, ONE, PROCESSES, SpeedLadder, SpeedRung

SLOW_S = 0.2  # rungs whose call takes longer are timed one call at a time
# Highest share of the peak that this work can reach. The peak counts a fused multiply-add as two flops, and some of the
# work's operations are not fused.
FMA_SHARE = FLOPS_PER_PAIR / (2 * INSTRUCTIONS_PER_PAIR)


@dataclass(frozen=True)
class SpeedOutcome:
    """The result of a rung.

    Attributes:
        status: "measured". "absent": a package or device that the rung needs is missing. "wrong": its
            result differs from the first rung's. "failed": the rung returned no result.
        roof: the roof that limits the rung: "one core", "all cores" or "GPU".
        stop: the condition under which this rung is fast enough, in words.
        note: a remark, or after an error the error's message.
        copied_bytes: bytes that one call copies between processes, or to and from the GPU; None if nothing is copied.
        ms: time of the fastest call. (Other programs disturb a CPU, and a roof is also a fastest time.) For plain
            Python, the time of the fastest part, times the number of parts.
        spread: spread of the times of all calls (see `Timing`).
        speed_up: the first rung's time divided by this rung's time.
        percent_of_roof: 100 * roof / ms.
    """

    name: str
    tool: str
    roof: str
    status: str
    stop: str
    note: str = ""
    copied_bytes: int | None = None
    ms: float | None = None
    spread: float | None = None
    speed_up: float | None = None
    percent_of_roof: float | None = None


@dataclass(frozen=True)
class SpeedClimb:
    """The results of climbing the python ladder.

    Attributes:
        devices: the CPU, and the GPU if there is one.
        threads, processes: how many threads and processes the rungs on all cores use.
        roofs_ms: roofs of the work, by "one core", "all cores", "GPU".
        rungs: in the ladder's order.
        other_cores: cores that other programs kept busy during the measurement.
        remarks: sentences to print below the table.
    """

    work: str
    devices: tuple[str, ...]
    threads: int
    processes: int
    roofs_ms: Mapping[str, float]
    rungs: tuple[SpeedOutcome, ...]
    other_cores: float
    remarks: tuple[str, ...]

    @property
    def failures(self) -> tuple[SpeedOutcome, ...]:
        """The rungs that computed a wrong result or raised an error."""
        return tuple(rung for rung in self.rungs if rung.status in (WRONG, FAILED))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def climb_python(
    ladder: SpeedLadder,
    device: torch.device,
    *,
    seconds: float = 0.1,
    progress: Progress = lambda what, fraction: None,
) -> SpeedClimb:
    """Check every rung, and time the rungs that are right.

    Args:
        ladder: made by `python_ladder`.
        device: device of the rungs on a GPU; "cpu" if there is none.
        seconds: about how long to time a rung. A rung whose call takes longer than 0.2 s is timed by two calls instead.
            Plain Python is timed on the first points only, at least 128 if there are so many, and the time is scaled up
            to all points.
        progress: called with (the current activity, fraction done).
    """
    progress("roofs", 0.0)
    roofs, devices = _roofs(ladder, device)
    with other_load() as load:
        outcomes, took = _checked(ladder, progress)
        progress("timing", 0.6)
        timings = _timed(ladder, outcomes, took, device, seconds)
    outcomes = _with_times(outcomes, timings, roofs)
    return SpeedClimb(
        work=ladder.work,
        devices=devices,
        threads=torch.get_num_threads(),
        processes=ladder.processes,
        roofs_ms=roofs,
        rungs=tuple(outcomes),
        other_cores=round(load.cores, 1),
        remarks=tuple(_remarks(outcomes)),
    )


def _roofs(ladder: SpeedLadder, device: torch.device) -> tuple[dict[str, float], tuple[str, ...]]:
    """The work's time in ms at the ceilings of one core, all cores and the GPU, and the names of the devices."""
    roofs = {}
    for which, threads in ((ONE, 1), (ALL, torch.get_num_threads())):
        with _threads(threads):
            found = measure_ceilings("cpu", precisions=("fp32",), transfers=False, links=False)
        roofs[which] = roof(ladder.cost, found).ms
    # more cores cannot raise this time: a longer time means that other programs used the cores
    roofs[ALL] = min(roofs.values())
    devices = [found.device]
    if device.type == "cuda":
        found = measure_ceilings(device, precisions=("fp32",), transfers=False, links=False)
        roofs[GPU] = roof(ladder.cost, found).ms
        devices.append(found.device)
    return roofs, tuple(devices)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_array(result: object) -> Array:
    """The distances that a rung computed, as float64 on the host."""
    return np.array(result.cpu().numpy() if isinstance(result, Tensor) else result, dtype=np.float64)


def difference(found: Array, expected: Array) -> str:
    """Describe how a rung's distances `found` differ from the first rung's distances `expected`; "" if they are
    equal.
    """
    if found.shape != expected.shape:
        return f"a result of shape {found.shape}, expected {expected.shape}"
    far = np.flatnonzero(found != expected)  # NaN counts as different
    if not far.size:
        return ""
    place = int(far[0])
    return (
        f"{far.size:,} of {expected.size:,} distances are wrong: point {place:,} has {found[place]:.6g}, "
        f"expected {expected[place]:.6g}"
    )


def _checked(ladder: SpeedLadder, progress: Progress) -> tuple[list[SpeedOutcome], list[float]]:
    """Compare each rung's result with the first rung's. Return the outcomes, and the seconds of one call of each rung.

    If the first call was slow, a second call is made, because the first may have included compiling or starting
    processes.
    """
    expected, outcomes, took = np.empty(0), [], []
    for done, rung in enumerate(ladder.rungs):
        progress(f"{rung.tool}: {rung.name}", 0.1 + 0.5 * done / len(ladder.rungs))
        outcome = SpeedOutcome(rung.name, rung.tool, rung.roof, CHECKED, rung.stop, rung.note)
        seconds = 0.0
        if rung.run is None:
            outcome = replace(outcome, status=ABSENT)
        else:
            try:
                began = perf_counter()
                found = as_array(rung.run())
                seconds = perf_counter() - began
                expected = expected if done else found
                wrong = difference(found, expected)
                outcome = replace(outcome, copied_bytes=rung.copied() if rung.copied is not None else None)
                if wrong:
                    outcome = replace(outcome, status=WRONG, note=wrong)
                elif rung.clock == "host" and rung.part is None and seconds > SLOW_S:
                    began = perf_counter()
                    rung.run()
                    seconds = perf_counter() - began
            except Exception as error:  # any tool may raise: show the error, and continue with the other rungs
                outcome = replace(outcome, status=FAILED, note=f"{type(error).__name__}: {error}")
        outcomes.append(outcome)
        took.append(seconds)
    return outcomes, took


def _timed(
    ladder: SpeedLadder, outcomes: list[SpeedOutcome], took: list[float], device: torch.device, seconds: float
) -> dict[int, Timing]:
    """Time all rungs with a correct result. Return the timings by the rung's index. Rungs that are timed in the same
    way (`SpeedRung.clock`) are interleaved. On the host there are three such groups: rungs of which only a part of the
    work is timed (`SpeedRung.part`), other slow rungs, and all others.
    """
    right = {place: rung for place, rung in enumerate(ladder.rungs) if outcomes[place].status == CHECKED}

    def calls(belongs: Callable[[int, SpeedRung], bool]) -> dict[str, Callable[[], object]]:
        return {str(place): rung.run for place, rung in right.items() if rung.run is not None and belongs(place, rung)}

    parted = {str(place): partial(rung.part, ladder.parts) for place, rung in right.items() if rung.part is not None}
    slow = calls(lambda place, rung: rung.clock == "host" and took[place] > SLOW_S and str(place) not in parted)
    fast = calls(lambda place, rung: rung.clock == "host" and took[place] <= SLOW_S and str(place) not in parted)
    timings = dict(compare_slow(slow)) if slow else {}
    if parted:
        for place, timing in compare(parted, device="cpu", seconds=5 * seconds, warm_up_seconds=0.0).items():
            timings[place] = replace(
                timing, median_ms=ladder.parts * timing.median_ms, best_ms=ladder.parts * timing.best_ms
            )
    timings |= compare(fast, device="cpu", seconds=seconds, warm_up_seconds=seconds / 4) if fast else {}
    for clock in ("graph", "device"):
        there = calls(lambda place, rung, clock=clock: rung.clock == clock)  # type: ignore[misc]
        if there and device.type == "cuda":
            timings |= compare(there, device=device, seconds=seconds, graph=clock == "graph")
    return {int(place): timing for place, timing in timings.items()}


def _with_times(
    outcomes: list[SpeedOutcome], timings: Mapping[int, Timing], roofs: Mapping[str, float]
) -> list[SpeedOutcome]:
    first = timings[0].best_ms if 0 in timings else None
    return [
        replace(
            outcome,
            status=MEASURED,
            ms=timings[place].best_ms,
            spread=timings[place].spread,
            speed_up=first / timings[place].best_ms if first is not None else None,
            percent_of_roof=100 * roofs[outcome.roof] / timings[place].best_ms,
        )
        if place in timings
        else outcome
        for place, outcome in enumerate(outcomes)
    ]


def _remarks(outcomes: list[SpeedOutcome]) -> list[str]:
    """Sentences to print below the table. A sentence is left out if a rung that it compares was not timed."""
    remarks = [
        f"The roof assumes {FLOPS_PER_PAIR} operations per pair, at a measured rate that counts a fused "
        f"multiply-add as two. A pair takes at least {INSTRUCTIONS_PER_PAIR} instructions, so no rung can exceed "
        f"{percent_text(100 * FMA_SHARE)} of the roof."
    ]
    timed = [each for each in outcomes if each.ms is not None]
    by_name = {(each.tool, each.name): each for each in timed}
    shared = by_name.get((PROCESSES, "share_memory_, compiled"))
    copying = [each for each in timed if each.tool == PROCESSES and each.name.endswith(", compiled") and each != shared]
    if shared is not None and shared.ms and copying:
        said = ", ".join(f"{each.name.split(',')[0]} {(each.ms or 0.0) / shared.ms:.1f} times" for each in copying)
        copied = max(each.copied_bytes or 0 for each in copying)
        remarks.append(
            "The cost of copies: compared with share_memory_, the same loop in as many processes takes "
            f"{said} as long. Those copy {copied:,} bytes a call; share_memory_ copies {shared.copied_bytes:,}."
        )
    best = min((each for each in timed if each.roof != GPU), key=lambda each: each.ms or 0.0, default=None)
    plain = by_name.get((NUMBA, "the same loops, compiled"))
    if best is not None and best.percent_of_roof is not None and plain is not None:
        remarks.append(
            f"The fastest rung on the CPU is {best.tool}, {best.name}: {percent_text(best.percent_of_roof)} of the "
            f"roof of {best.roof}, {best.speed_up or 0.0:,.0f} times as fast as plain Python. The original loops, only "
            f"compiled, are {plain.speed_up or 0.0:,.0f} times as fast."
        )
    return remarks
