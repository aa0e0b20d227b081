"""Measure the durations of a call's kernels with PyTorch's profiler, which also times the operators of a program.

Events around back-to-back launches measure something else: they include the gaps between kernels, and a chip that is
busy for long lowers its clocks. Here each call runs alone between two markers, and the profiler returns the duration of
each kernel. All calls run on one stream, where kernels run in launch order. So the kernels between two markers belong
to the call between these markers, and device events need not be matched with host events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rooftop.errors import MeasurementError
from rooftop.hardware.traces import Trace

MARKER = "rooftop_marker"
"""Name of the empty kernel that runs before and after each timed call."""

Kernels = tuple[float, ...]
"""Durations in ms of the kernels of one call, in order of start."""


def nothing() -> None:
    """A preparation that does nothing."""


@dataclass(frozen=True)
class Variant:
    """A call to be timed.

    Attributes:
        run: the call, which must launch at least one kernel.
        prepare: function that runs before each call, untimed, to set the contents of the caches.
        repeats: the number of calls.
        pause_s: pause of the device before the first call, so that its clocks are high again.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    repeats: int = 4
    pause_s: float = 0.0


def kernel_times(variants: Sequence[Variant], device: torch.device) -> list[list[Kernels]]:
    """Durations of the kernels in each repetition of each variant, all from one profiler session.

    The calls run while `device` is the current device, because the markers are launched there.

    Raises:
        MeasurementError: the profiler did not record all kernels.
    """
    from rooftop.hardware.bandwidth_kernels import marker

    with torch.cuda.device(device):
        marker()  # compile the marker before the trace
        torch.cuda.synchronize()
        with Trace(device, host=False) as trace:
            for variant in variants:
                if variant.pause_s:
                    torch.cuda.synchronize()
                    time.sleep(variant.pause_s)
                for _ in range(variant.repeats):
                    variant.prepare()
                    marker()
                    variant.run()
                    marker()
    return joined(trace.events, [variant.repeats for variant in variants])


def joined(events: Iterable[Any], repeats: Sequence[int]) -> list[list[Kernels]]:
    """Durations in ms from the profiler's events, by variant, repetition and kernel.

    Raises:
        MeasurementError: a repetition does not have two markers, or no kernel lies between two markers.
    """
    calls: list[Kernels] = []
    inside: list[float] | None = None
    for name, duration_ns in _device_work(events):
        if name.startswith(MARKER):
            if inside is not None:
                calls.append(tuple(inside))
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(duration_ns / 1e6)
    if inside is not None or len(calls) != sum(repeats) or not all(calls):
        empty = sum(not call for call in calls)
        raise MeasurementError(
            f"the profiler recorded {len(calls)} of {sum(repeats)} calls, and found no kernel in {empty} of the "
            "recorded ones. This measurement needs CUPTI's kernel records: end other profilers that use this GPU, or "
            "run: rooftop doctor"
        )
    remaining = iter(calls)
    return [[next(remaining) for _ in range(count)] for count in repeats]


def _device_work(events: Iterable[Any]) -> list[tuple[str, int]]:
    """(name, ns) of each kernel, copy and fill on the device, in order of start, without the spans of
    `record_function`.
    """
    work = [e for e in events if e.device_type().name == "CUDA" and not e.is_user_annotation() and is_device_work(e)]
    work.sort(key=lambda event: event.start_ns())
    return [(event.name(), event.duration_ns()) for event in work]


def is_device_work(event: Any) -> bool:
    """Whether a device event is a kernel, copy or fill, not a wait for an event or a stream.

    Older profilers do not report the type of an event, so all their events count.
    """
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    return not kind or kind in ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
