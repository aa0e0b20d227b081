"""Measure a rank's part of a step: the time of communication and the time of other work.

On a GPU these times come from kernels: NCCL's kernels have "nccl" in their names. On a CPU these times come from the
profiler's spans "gloo:all_reduce", "gloo:broadcast", "gloo:recv", ... (PyTorch 2.13). A span lasts from the call of a
collective to its end, including waits. Operators that the calling thread runs during a collective count as other work.
Python's own time during a collective counts as exposed communication, and so does the time of compiled CPU kernels,
which leave no events.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from rooftop.analysis.kernel_join import device_kernels
from rooftop.analysis.program import Program
from rooftop.analysis.ranks.lockstep import barrier, on_all_ranks, rank_name, several_ranks
from rooftop.analysis.ranks.merging import RankRow, Ranks, compared
from rooftop.hardware.sequences import synchronize
from rooftop.hardware.traces import Label, Trace

RANK_STEP_LABEL = "rooftop step of a rank"
STEPS = 10
RANK_WARM_UP_STEPS = 2  # after the first step, DistributedDataParallel puts its buckets into their final order


def measure_ranks(program: Program, device: torch.device, steps: int = STEPS) -> Ranks | None:
    """Measure all ranks together; None if there is a single process. Every rank must call this, and gets the same
    result.

    Raises:
        MeasurementError: a rank failed; the message has the rank and the reason.
    """
    if not several_ranks():
        return None
    return compared(on_all_ranks(lambda: measure_rank(program, device, steps)))


def measure_rank(program: Program, device: torch.device, steps: int = STEPS) -> RankRow:
    """Measure this rank's part of some steps under the profiler. All ranks start together, so every rank must call this
    function.

    The program's state is preserved (see `Program.preserved`).

    Raises:
        ValueError: the number of steps is below 1.
        ModelRunError: the program raised.
    """
    if steps < 1:
        raise ValueError(f"measure_rank expects at least one step, got steps={steps}")
    with program.preserved():
        for _ in range(RANK_WARM_UP_STEPS):
            program.step()
        synchronize(device)
        with Trace(device) as trace:
            if several_ranks():
                barrier(device)  # the profiler starts at different times on different ranks
            for _ in range(steps):
                with Label(RANK_STEP_LABEL):
                    program.step()
                    synchronize(device)
    rank = dist.get_rank() if several_ranks() else 0
    return rank_row(trace.events, rank, device)


def rank_row(events: Sequence[Any], rank: int, device: torch.device) -> RankRow:
    """Compute a rank's row from the profiler's events of some steps. Each step is inside a label
    `RANK_STEP_LABEL`, which ends after a synchronization."""
    work = _work_on_gpu(events, device) if device.type == "cuda" else _work_on_cpu(events)
    communication, other = merged(work[0]), merged(work[1])
    both = merged([*communication, *other])
    host = [event for event in events if event.device_type().name == "CPU"]
    walls, busy, communicating, exposed = [], [], [], []
    for start, end in sorted(_span(event) for event in host if event.name() == RANK_STEP_LABEL):
        step_communication = clipped(communication, start, end)
        walls.append((end - start) / 1e6)
        busy.append(length(clipped(both, start, end)) / 1e6)
        communicating.append(length(step_communication) / 1e6)
        exposed.append(length(without(step_communication, other)) / 1e6)
    own = [wall - part for wall, part in zip(walls, exposed, strict=True)]
    quarters = quantiles(own, n=4, method="inclusive") if len(own) > 1 else [0.0, 0.0, 0.0]
    return RankRow(
        rank=rank,
        device=rank_name(device),
        wall_ms=median(walls),
        busy_ms=median(busy),
        communication_ms=median(communicating),
        exposed_ms=median(exposed),
        own_spread_ms=quarters[2] - quarters[0],
    )


Interval = tuple[int, int]
"""(start, end) in ns."""

HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
NO_WORK = re.compile(r"c10d::|_?c10d_functional::|_c10d_functional_autograd::|record_param_comms|nccl:")
"""Matches operators that only start a collective or wait for one."""


def _work_on_gpu(events: Sequence[Any], device: torch.device) -> tuple[list[Interval], list[Interval]]:
    """The intervals of communication on this device, and of its other work. The intervals of collectives on the host
    (gloo) also count as communication."""
    here = (e for e in events if e.device_type().name != "CUDA" or e.device_index() == (device.index or 0))
    communication = [_span(event) for event in events if HOST_COLLECTIVE.match(event.name())]
    other: list[Interval] = []
    for kernel in device_kernels(here):
        (communication if "nccl" in kernel.name.lower() else other).append((kernel.start_ns, kernel.end_ns))
    return communication, other


def _work_on_cpu(events: Sequence[Any]) -> tuple[list[Interval], list[Interval]]:
    """The intervals of communication and of other work. Only innermost operators count as work, because an outer
    operator may wait for a collective inside it.
    """
    communication = [_span(event) for event in events if HOST_COLLECTIVE.match(event.name())]
    # (start, -end, name) of the events of each thread; sorting puts outer operators before inner ones
    threads: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if not event.is_user_annotation() and not HOST_COLLECTIVE.match(event.name()) and event.duration_ns() > 0:
            start, end = _span(event)
            threads[event.start_thread_id()].append((start, -end, event.name()))
    other = []
    for spans in threads.values():
        spans.sort()
        following = [start for start, _, _ in spans[1:]]
        for (start, minus_end, name), next_start in zip(spans, [*following, None], strict=True):
            innermost = next_start is None or next_start >= -minus_end
            if innermost and not NO_WORK.match(name):
                other.append((start, -minus_end))
    return communication, other


def _span(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()


# ---- intervals ---------------------------------------------------------------------------------------------------


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as ordered intervals that neither overlap nor touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def clipped(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """The parts of the intervals between two times."""
    return [(max(start, a), min(end, b)) for a, b in intervals if min(end, b) > max(start, a)]


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of the intervals that no interval of `others` covers. Both arguments are results of `merged`."""
    left: list[Interval] = []
    first = 0  # index of the first other interval that ends after this one begins
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        index = first
        while index < len(others) and others[index][0] < end:
            if others[index][0] > start:
                left.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """The total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
