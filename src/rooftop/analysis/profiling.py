"""What a step costs in time: wall, device busy, each operator, and memory over time.

Three kinds of runs, because each disturbs something:

1. plain runs give the wall time;
2. (GPU) runs under the profiler alone give the time the device is busy, and memory over time;
3. labelled runs, in which the counting mode names every operator, give each operator's own time. On a GPU that is the
   time of its kernels, joined through the profiler's correlation ids (see `kernel_join`): labels slow the host down,
   not the kernels. On a CPU it is the host clock around the operator.

A compiled program cannot be labelled (PyTorch does not run compiled code under a mode): its operators are taken from
what the profiler saw and from what the compiler said of its kernels (see `compiled_join`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled import CompiledGraphs
from rooftop.analysis.compiled_join import join_compiled
from rooftop.analysis.kernel_join import Kernel, busy_ms, device_kernels, kernels_by_label
from rooftop.analysis.program import Program
from rooftop.analysis.report import Compilation
from rooftop.cost import CountingMode, Record, distinct_bytes
from rooftop.cost.accounting import tensors_in
from rooftop.hardware.timing import Timing, measure

Progress = Callable[[str, float], None]
"""Called with (what is being done, fraction done from 0 to 1)."""

# The profiler's native part announces itself on stderr at each start unless told not to before it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

STEP_LABEL = "rooftop step"
OPERATOR_LABEL = "rooftop operator "

WARM_UP_STEPS = 2
COMPILED_WARM_UP_STEPS = 5  # compile, warm up and capture CUDA graphs, forward and backward
LABELLED_SECONDS = 8.0  # bounds the labelled runs of slow programs ...
LABELLED_RUNS = (3, 9)  # ... to at least and at most this many


@dataclass(frozen=True, slots=True)
class MeasuredOperator:
    """One executed operator, its time (ms, median over the labelled runs) and the kernels that it launched."""

    record: Record
    measured_ms: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """One step, measured.

    Attributes:
        operators: in order of execution.
        wall: of a plain step.
        busy_ms: time during which the device works: union of its kernels (GPU), sum of the operators (CPU).
        kernel_launches: kernels, copies and fills on the device in one step (GPU), operators (CPU).
        unattributed_ms: device time of kernels that no operator launched, already part of `busy_ms`.
        memory: (ms since the start of the step, bytes allocated) at each change.
        peak_bytes: largest of these.
        tracker: what the modules and optimizers took in and gave out.
        runs: labelled runs.
        compilation: what `torch.compile` did, None if nothing is compiled.
        notes: what a reader should know about this measurement.
    """

    operators: list[MeasuredOperator]
    wall: Timing
    busy_ms: float
    kernel_launches: int
    unattributed_ms: float
    memory: list[tuple[float, int]]
    peak_bytes: int
    tracker: ModuleTracker
    runs: int
    compilation: Compilation | None
    notes: list[str]


def profile_program(program: Program, progress: Progress = lambda what, fraction: None) -> Profile:
    """Measure one step of a program. Its state is preserved (see `Program.preserved`).

    Raises:
        ModelRunError: the program raised.
    """
    device = program.device
    notes: list[str] = []
    graphs = CompiledGraphs() if program.compiled else None
    with program.preserved(), graphs or nullcontext():
        progress("compiling" if graphs else "warming up", 0.0)
        for _ in range(COMPILED_WARM_UP_STEPS if graphs else WARM_UP_STEPS):
            program.step()
        progress("timing the step", 0.1)
        wall = measure(program.step, device=device)
        progress("profiling", 0.4)
        natural = _natural_profile(program, device)
        progress("profiling each operator", 0.5)
        least, most = LABELLED_RUNS
        runs = max(least, min(most, int(1e3 * LABELLED_SECONDS / max(wall.median_ms, 1e-3))))
        with ModuleTracker(program.module, inside=graphs is None) as tracker:
            run_once = _compiled_run(graphs) if graphs else _run_on_gpu if device.type == "cuda" else _run_on_cpu
            labelled = _labelled_runs(program, device, tracker, runs, progress, run_once)
    operators, unattributed_ms = _medians(labelled, notes)
    if device.type == "cuda":
        busy, launches = natural.busy_ms, natural.kernels
    else:
        busy, launches = sum(op.measured_ms for op in operators), len(operators)
    if wall.spread > 0.10:
        notes.append(f"The wall time varied by {wall.spread:.0%} between runs: something else was using the machine.")
    return Profile(
        operators=operators,
        wall=wall,
        busy_ms=busy,
        kernel_launches=launches,
        unattributed_ms=unattributed_ms,
        memory=natural.memory,
        peak_bytes=max((size for _, size in natural.memory), default=0),
        tracker=tracker,
        runs=runs,
        compilation=graphs.compilation() if graphs else None,
        notes=notes,
    )


@dataclass(frozen=True)
class _Natural:
    busy_ms: float
    kernels: int
    memory: list[tuple[float, int]]


def _natural_profile(program: Program, device: torch.device) -> _Natural:
    """One step under the profiler alone: device busy time and memory over time."""
    activities = [ProfilerActivity.CPU]
    base_bytes = _resident_bytes(program)
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        base_bytes = torch.cuda.memory_allocated(device)
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        with record_function(STEP_LABEL):
            program.step()
        _synchronize(device)
    events = profiler.profiler.kineto_results.events()
    kernels = device_kernels(events)
    return _Natural(busy_ms(kernels), len(kernels), _memory_timeline(events, device, base_bytes))


def _resident_bytes(program: Program) -> int:
    """What the program holds before the step: parameters, buffers and inputs."""
    module = program.module
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    return distinct_bytes([*held, *tensors_in([program.args, program.kwargs])])


def _memory_timeline(events: Iterable[Any], device: torch.device, base_bytes: int) -> list[tuple[float, int]]:
    """Allocated bytes after each allocation and release on the device, ms since the step began."""
    changes, start_ns = [], None
    for event in events:
        if event.name() == STEP_LABEL and start_ns is None:
            start_ns = event.start_ns()
        elif event.name() == "[memory]" and (event.device_type().name == "CUDA") == (device.type == "cuda"):
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort()
    timeline, allocated = [(0.0, base_bytes)], base_bytes
    for at_ns, delta in changes:
        allocated += delta
        timeline.append((max(0.0, (at_ns - (start_ns or changes[0][0])) / 1e6), allocated))
    return timeline


@dataclass(frozen=True)
class _Run:
    """One labelled step: its records, and for each (ms, kernel names)."""

    records: list[Record]
    times: list[tuple[float, tuple[str, ...]]]
    unattributed_ms: float


_RunOnce = Callable[[Program, torch.device, ModuleTracker], _Run]


def _labelled_runs(
    program: Program,
    device: torch.device,
    tracker: ModuleTracker,
    runs: int,
    progress: Progress,
    run_once: _RunOnce,
) -> list[_Run]:
    done = []
    for run in range(runs):
        tracker.restart()
        done.append(run_once(program, device, tracker))
        progress("profiling each operator", 0.5 + 0.5 * (run + 1) / runs)
    return done


class _HostClock:
    """Times what runs inside its `with` block; one instance serves one run."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []

    def __call__(self, index: int) -> AbstractContextManager[Any]:
        return self

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.times_ms.append((time.perf_counter_ns() - self._start_ns) / 1e6)


def _run_on_cpu(program: Program, device: torch.device, tracker: ModuleTracker) -> _Run:
    clock = _HostClock()
    with CountingMode(tracker.locate, clock) as counted:
        program.step()
    return _Run(counted.records, [(ms, ()) for ms in clock.times_ms], 0.0)


def _run_on_gpu(program: Program, device: torch.device, tracker: ModuleTracker) -> _Run:
    def label(index: int) -> AbstractContextManager[Any]:
        return record_function(f"{OPERATOR_LABEL}{index}")

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        with CountingMode(tracker.locate, label) as counted:
            program.step()
        _synchronize(device)
    by_label, orphans = kernels_by_label(profiler.profiler.kineto_results.events(), OPERATOR_LABEL)
    none: list[Kernel] = []
    times = []
    for index in range(len(counted.records)):
        kernels = by_label.get(index, none)
        times.append((sum(k.ms for k in kernels), tuple(k.name for k in kernels)))
    return _Run(counted.records, times, sum(k.ms for k in orphans))


def _compiled_run(graphs: CompiledGraphs) -> _RunOnce:
    """One step of a compiled program under the profiler alone."""

    def run(program: Program, device: torch.device, tracker: ModuleTracker) -> _Run:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
            program.step(lambda output: tracker.observe(program.module, [program.args, program.kwargs], output))
            _synchronize(device)
        events = profiler.profiler.kineto_results.events()
        operators, orphans = join_compiled(events, graphs.graphs, str(device))
        times = [
            (sum(k.ms for k in op.kernels) if device.type == "cuda" else op.host_ms, tuple(k.name for k in op.kernels))
            for op in operators
        ]
        return _Run([op.record for op in operators], times, sum(k.ms for k in orphans))

    return run


def _medians(runs: list[_Run], notes: list[str]) -> tuple[list[MeasuredOperator], float]:
    """Each operator's median time over the runs, if all runs executed the same operators; else the last run alone."""
    last = runs[-1]
    names = [record.name for record in last.records]
    if any([record.name for record in run.records] != names for run in runs):
        notes.append("The step runs other operators each time; times are those of its last run.")
        runs = [last]
    operators = [
        MeasuredOperator(record, median(run.times[i][0] for run in runs), last.times[i][1])
        for i, record in enumerate(last.records)
    ]
    return operators, median(run.unattributed_ms for run in runs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
