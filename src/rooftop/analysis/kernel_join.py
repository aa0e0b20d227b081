"""Find the operator of each kernel: join the profiler's events through their correlation ids.

The profiler returns one flat list of events: operators and labels (with host thread and time), calls of the CUDA
runtime, and kernels (with their time on the device). A kernel has two ids: the id of the innermost operator that was
open at its launch (`linked_correlation_id`), and the id of the runtime call that launched it (`correlation_id`). Either
id leads to a host time, and the label that was open at that time identifies the operator.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.hardware.kernel_times import is_device_work


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, copy or fill on the device; times in ns."""

    name: str
    start_ns: int
    end_ns: int
    correlation_id: int
    linked_correlation_id: int

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def is_transfer(kernel: str) -> bool:
    """Whether a kernel with this name, such as "Memcpy HtoD (Pageable -> Device)", copies between host and device."""
    return "HtoD" in kernel or "DtoH" in kernel


def device_kernels(events: Iterable[Any]) -> list[Kernel]:
    """The kernels, copies and fills on the device, in order of start. The profiler's spans of labels are left out."""
    kernels = [
        Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id(), e.linked_correlation_id())
        for e in events
        if e.device_type().name == "CUDA" and e.duration_ns() > 0 and not e.is_user_annotation() and is_device_work(e)
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_ns)


def busy_ms(kernels: Iterable[Kernel]) -> float:
    """Time in ms during which at least one kernel ran: work that overlaps on several streams counts once."""
    total_ns, covered_until = 0, 0
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        total_ns += max(0, kernel.end_ns - max(kernel.start_ns, covered_until))
        covered_until = max(covered_until, kernel.end_ns)
    return total_ns / 1e6


def kernels_by_label(events: Sequence[Any], prefix: str) -> tuple[dict[int, list[Kernel]], list[Kernel]]:
    """Group kernels by the profiler label in which each kernel was launched. The labels' names are `prefix` and a
    number; the groups' keys are these numbers. Also return the kernels that were launched outside any label."""
    kernels = device_kernels(events)
    host = [e for e in events if e.device_type().name != "CUDA"]
    labels = _Labels((e for e in host if e.name().startswith(prefix)), prefix)
    operators: dict[int, Any] = {}  # correlation id of an operator or label on the host -> its event
    launches: dict[int, Any] = {}  # correlation id of a runtime call -> its event
    for event in host:
        (launches if _is_runtime_call(event) else operators)[event.correlation_id()] = event
    joined: dict[int, list[Kernel]] = defaultdict(list)
    orphans = []
    for kernel in kernels:
        opener = operators.get(kernel.linked_correlation_id) if kernel.linked_correlation_id else None
        launch = launches.get(kernel.correlation_id)
        number = None
        if opener is not None:
            number = labels.open_at(opener.start_ns(), opener.start_thread_id())
        if number is None and launch is not None:
            number = labels.open_at(launch.start_ns(), None)
        if number is None:
            orphans.append(kernel)
        else:
            joined[number].append(kernel)
    return joined, orphans


def _is_runtime_call(event: Any) -> bool:
    return event.name().startswith("cu") and not event.name().startswith("cudnn")


class _Labels:
    """Find the label that was open at a given time. Labels on one thread do not overlap."""

    def __init__(self, events: Iterable[Any], prefix: str) -> None:
        self._threads: dict[int | None, list[tuple[int, int, int]]] = defaultdict(list)  # (start, end, number)
        for event in events:
            span = (event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name().removeprefix(prefix)))
            self._threads[event.start_thread_id()].append(span)
            self._threads[None].append(span)
        for spans in self._threads.values():
            spans.sort()

    def open_at(self, time_ns: int, thread: int | None) -> int | None:
        """The number of the label that was open at this host time on this thread. A thread of None means any thread."""
        spans = self._threads.get(thread, [])
        position = bisect_right(spans, (time_ns, float("inf"), 0)) - 1
        if position >= 0 and time_ns <= spans[position][1]:
            return spans[position][2]
        return None
