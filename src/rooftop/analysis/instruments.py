"""The instruments that watch a step. Each instrument is a context manager around one step. An instrument's `result` is
set at the end of the step.

    Plain      the profiler alone: the device's busy time, memory over time, waits, transfers
    Labelled   every operator by name, module and time (the counting mode and, on a GPU, the profiler)
    Compiled   every operator of compiled code, from the profiler alone

On a GPU an operator's time is the time of its kernels in steps without labels (see `kernel_times`). The profiler's
correlation ids join kernels and operators (see `kernel_join`). On a CPU an operator's time is measured with the host's
clock around the operator.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Any

import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraph
from rooftop.analysis.compiled.joining import join_compiled
from rooftop.analysis.compiled.reconstruction import recorded_tensors
from rooftop.analysis.kernel_join import Kernel, busy_ms, device_kernels, is_transfer, kernels_by_label
from rooftop.analysis.kernel_times import KernelTimes, in_launch_order
from rooftop.cost import CountingMode, Record
from rooftop.cost.accounting import FREE
from rooftop.hardware.traces import Label, Trace
from rooftop.user_paths import user_path

STEP_LABEL = "rooftop step"
OPERATOR_LABEL = "rooftop operator "
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Names, or beginnings of names, of the CUDA runtime calls that may block the host until the device is done. `_waits`
excludes `cudaMemcpyAsync`.
"""


@dataclass(frozen=True)
class Plain:
    """One step under the profiler alone.

    Attributes:
        busy_ms: time during which the device works: the union of its kernels; 0 on a CPU.
        kernels: the kernels, copies and fills that the device ran.
        memory: (ms since the start of the step, bytes allocated on the device) at each change of these bytes.
        waiting_ms: time for which the device is idle after the host waited for it, because the host launches the next
            work only after that wait.
        loading_ms: time for which the step waited for a `DataLoader`.
        compiled: whether compiled code ran.
        launched: for each launch of a kernel, copy or fill, the moment at which the launch ends: 0 is the start of the
            step, 1 is the end of the last launch; ascending.
    """

    busy_ms: float
    kernels: list[Kernel]
    memory: list[tuple[float, int]]
    waiting_ms: float
    loading_ms: float
    compiled: bool
    launched: tuple[float, ...] = ()

    @property
    def has_transfers(self) -> bool:
        """Whether the step copies between host and device memory."""
        return any(is_transfer(kernel.name) for kernel in self.kernels)


@dataclass(frozen=True)
class Labelled:
    """One step, broken down by operator.

    Attributes:
        records: the operators in order of execution.
        times: for each operator, (its time in ms, names of its kernels).
        unattributed_ms: time of the kernels that no operator launched.
        kernels: for each operator the kernels that it launched; the last entry has the kernels without an operator.
            Empty on a CPU.
    """

    records: list[Record]
    times: list[tuple[float, tuple[str, ...]]]
    unattributed_ms: float
    kernels: tuple[tuple[Kernel, ...], ...] = ()

    @classmethod
    def on_gpu(cls, records: list[Record], kernels: Sequence[Sequence[Kernel]], orphans: Sequence[Kernel]) -> Labelled:
        """Make a `Labelled` from the operators, the kernels that each operator launched, and the kernels (`orphans`)
        that no operator launched."""
        times = [(sum(k.ms for k in group), tuple(k.name for k in group)) for group in kernels]
        return cls(records, times, sum(k.ms for k in orphans), (*map(tuple, kernels), tuple(orphans)))

    def timed_by(self, undisturbed: KernelTimes) -> Labelled | None:
        """The same result with kernel times from a run without labels; None if that run launched other kernels."""
        launched = in_launch_order([kernel for group in self.kernels for kernel in group])
        times_ms = undisturbed.of(launched)
        if times_ms is None:
            return None
        ms = {id(kernel): time_ms for kernel, time_ms in zip(launched, times_ms, strict=True)}
        *by_operator, orphans_ms = (sum(ms[id(kernel)] for kernel in group) for group in self.kernels)
        times = [(time_ms, names) for time_ms, (_, names) in zip(by_operator, self.times, strict=True)]
        return Labelled(self.records, times, orphans_ms, self.kernels)


@dataclass(frozen=True, slots=True)
class MeasuredOperator:
    """One executed operator, its time in ms (see `medians`) and the names of the kernels that it launched."""

    record: Record
    measured_ms: float
    kernels: tuple[str, ...]


def require_folder_of(trace: str | os.PathLike[str] | None) -> None:
    """Check before any run that the trace file can be written. The profiler itself would print a message and raise no
    error.

    Raises:
        ValueError: the trace cannot be written.
    """
    if trace is None:
        return
    path = user_path(trace)
    # the path is a folder, or a device file, which the profiler would replace by a regular file
    special = path.exists() and not path.is_file()
    if special or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"trace={os.fspath(trace)!r}: expected the path of a file in an existing, writable folder")


class PlainInstrument:
    """Measure one step under the profiler alone (see `Plain`).

    Args:
        device: the device on which the step runs.
        base_bytes: memory allocated before the step.
        trace: a file for the profiler's trace in Chrome's format, which Perfetto opens.
    """

    def __init__(self, device: torch.device, base_bytes: int, trace: str | os.PathLike[str] | None = None) -> None:
        self._device, self._base_bytes = device, base_bytes
        self._profiled = Trace(device, save_to=trace, profile_memory=True, record_shapes=trace is not None)
        self._stack = ExitStack()
        self.result: Plain

    def __enter__(self) -> PlainInstrument:
        self._stack.enter_context(self._profiled)
        self._stack.enter_context(Label(STEP_LABEL))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)
        if error is not None:  # the events of a failed step are not read
            return
        events = self._profiled.events
        kernels = device_kernels(events)
        self.result = Plain(
            busy_ms=busy_ms(kernels),
            kernels=kernels,
            memory=_memory_timeline(events, self._device, self._base_bytes),
            waiting_ms=_waiting_ms(events, kernels),
            loading_ms=sum(e.duration_ns() for e in events if e.name().startswith("enumerate(DataLoader)")) / 1e6,
            compiled=any(e.name().startswith(("## Call CompiledFxGraph", "Torch-Compiled Region")) for e in events),
            launched=_launched(events),
        )


def _waiting_ms(events: Iterable[Any], kernels: Sequence[Kernel]) -> float:
    """Total time in ms for which the device was idle between two successive kernels, if a blocking call returned
    between the starts of these kernels."""
    idle_ns, position = 0, 0
    starts = sorted(kernel.start_ns for kernel in kernels)
    ends = sorted(kernel.end_ns for kernel in kernels)
    returns = sorted(e.start_ns() + e.duration_ns() for e in events if _waits(e))
    seen: set[int] = set()
    for returned in returns:
        while position < len(starts) and starts[position] < returned:
            position += 1
        if position == 0 or position == len(starts) or position in seen:
            continue
        seen.add(position)
        # The device has been idle since the previous kernel ended. Time in which kernels still run after the call
        # returned is not idle time.
        idle_ns += max(0, starts[position] - ends[position - 1])
    return idle_ns / 1e6


LAUNCHING_CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


def _launched(events: Iterable[Any]) -> tuple[float, ...]:
    """When each launch ended: 0 is the start of the step, 1 the end of the last launch. () if the step launched
    nothing."""
    starts = [e.start_ns() for e in events if e.name() == STEP_LABEL and e.device_type().name == "CPU"]
    ends = sorted(e.start_ns() + e.duration_ns() for e in events if e.name().startswith(LAUNCHING_CALLS))
    if not starts or not ends or ends[-1] <= starts[0]:
        return ()
    return tuple(max(0.0, (end - starts[0]) / (ends[-1] - starts[0])) for end in ends)


def _waits(event: Any) -> bool:
    name = event.name()
    return name.startswith(WAITING_CALLS) and not name.startswith("cudaMemcpyAsync") and event.duration_ns() > 0


def _memory_timeline(events: Iterable[Any], device: torch.device, base_bytes: int) -> list[tuple[float, int]]:
    """(ms since the step began, allocated bytes) after each allocation and release on the device."""
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


class _HostClock:
    """Times each `with` block of one run with the host's clock."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []

    def __call__(self, index: int) -> AbstractContextManager[Any]:
        return self

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.times_ms.append((time.perf_counter_ns() - self._start_ns) / 1e6)


class LabelledInstrument:
    """Measure one step by operator (see `Labelled`). `tracker` must be active: it finds the module and phase
    of each operator.

    Args:
        limit: maximum number of operators to record. Later operators run unrecorded.

    Attributes:
        full_at: time (`time.perf_counter`) at which `limit` operators had been recorded; None if the limit was not
            reached.
    """

    def __init__(self, device: torch.device, tracker: ModuleTracker, limit: int = sys.maxsize) -> None:
        self._clock = _HostClock()
        self._profiled = Trace(device) if device.type == "cuda" else None
        self._counted = CountingMode(tracker.locate, self._clock if self._profiled is None else _label, limit)
        self._stack = ExitStack()
        self.result: Labelled

    @property
    def full_at(self) -> float | None:
        return self._counted.full_at

    def __enter__(self) -> LabelledInstrument:
        if self._profiled is not None:
            self._stack.enter_context(self._profiled)
        self._stack.enter_context(_seldom_collecting())
        self._stack.enter_context(self._counted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)
        if error is not None:  # the events of a failed step are not read
            return
        records = [_as_it_ran(record) for record in self._counted.records]
        if self._profiled is None:
            self.result = Labelled(records, [(ms, ()) for ms in self._clock.times_ms[: len(records)]], 0.0)
            return
        by_label, orphans = kernels_by_label(self._profiled.events, OPERATOR_LABEL)
        self.result = Labelled.on_gpu(records, [by_label.get(index, []) for index in range(len(records))], orphans)


def _as_it_ran(record: Record) -> Record:
    """Set the cost of operators on the meta device to zero, because nothing is moved or computed there."""
    return replace(record, cost=FREE) if record.device == "meta" and record.cost is not None else record


RECORDED_OBJECTS = 200_000  # the objects in the records of some 15,000 operators


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Within the block, let Python collect garbage only after 200,000 new objects. Python's default is
    700 or 2,000, by its version.

    Otherwise, garbage collections would visit the records made so far again and again, although none of them is
    garbage. These visits would take longer than making the records.
    """
    first, *others = gc.get_threshold()
    ours = (max(first, RECORDED_OBJECTS), *others)
    if first:  # a threshold of 0 means that the program has disabled collections
        gc.set_threshold(*ours)
    try:
        yield
    finally:
        if first and gc.get_threshold() == ours:  # restore only if the program has not changed the threshold
            gc.set_threshold(first, *others)


def collect_garbage() -> None:
    """Collect garbage now, so that Rooftop's records cause no collection (up to 0.2 s) in a timed step."""
    if gc.isenabled():
        gc.collect()


def _label(index: int) -> AbstractContextManager[Any]:
    return Label(f"{OPERATOR_LABEL}{index}")


class CompiledInstrument:
    """Measure one step of compiled code by operator (see `Labelled`). `graphs` are the compiled graphs, by key."""

    def __init__(self, device: torch.device, graphs: Mapping[str, CompiledGraph]) -> None:
        self._device, self._graphs = device, graphs
        self._profiled = Trace(device, read=recorded_tensors, record_shapes=True)
        self.result: Labelled

    def __enter__(self) -> CompiledInstrument:
        self._profiled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._profiled.__exit__(kind, error, tb)
        if error is not None:  # the events of a failed step are not read
            return
        profiled = self._profiled
        operators, orphans = join_compiled(profiled.events, self._graphs, str(self._device), profiled.found)
        records = [op.record for op in operators]
        if self._device.type == "cuda":
            self.result = Labelled.on_gpu(records, [op.kernels for op in operators], orphans)
        else:
            self.result = Labelled(records, [(op.host_ms, ()) for op in operators], 0.0)


FASTER = 3
"""Only the fastest labelled runs count: the fastest 1/`FASTER` of them."""


def medians(
    runs: Sequence[Labelled], notes: list[str], undisturbed: KernelTimes | None = None
) -> tuple[list[MeasuredOperator], float]:
    """Each operator's time in ms, and the total time in ms of the kernels without an operator: medians over the fastest
    runs (the fastest 1/`FASTER` of them).

    Slow runs do not count, because other work on the host can only make a run longer. For the same reason `analyze`
    reports a low percentile, the 10th, as the wall time (see `hardware.sequences`). If the runs differ in operators or
    sizes, only the last run counts, and a note is added to `notes`.

    Args:
        undisturbed: the time of each kernel without labels. If the last labelled run launched the same kernels, the
            result has these times instead of medians. If it launched other kernels, a note is added to `notes`.
    """
    last = runs[-1]
    ran = [(record.name, record.shapes) for record in last.records]
    if any([(record.name, record.shapes) for record in run.records] != ran for run in runs):
        names = [name for name, _ in ran]
        same = all([record.name for record in run.records] == names for run in runs)
        what = "operators on other sizes" if same else "other operators"
        notes.append(f"The step runs {what} each time; the times shown are from its last run.")
        runs = [last]
    if undisturbed is not None:
        timed = last.timed_by(undisturbed)
        if timed is not None:
            runs = [timed]
        else:
            notes.append(
                "The step launched different kernels with and without labels on its operators: the operators' times "
                "are from the runs with labels."
            )
    runs = sorted(runs, key=lambda run: sum(ms for ms, _ in run.times))[: -(-len(runs) // FASTER)]
    operators = [
        MeasuredOperator(record, median(run.times[i][0] for run in runs), last.times[i][1])
        for i, record in enumerate(last.records)
    ]
    return operators, median(run.unattributed_ms for run in runs)
