"""The time of each kernel of a step that runs under the profiler alone, without labels.

Labels slow the host down. Between two labelled kernels the GPU is idle, so the next kernel runs at other clocks and
finds other data in the cache. So labels only show which operator launched which kernel. The kernel's time comes from a
sequence of steps without labels: a step launches the same kernels in the same order each time, so the n-th launch of a
step with labels is the n-th launch of a step without labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from rooftop.analysis.kernel_join import Kernel, busy_ms, device_kernels
from rooftop.hardware.sequences import synchronize
from rooftop.hardware.traces import Trace

WATCHED_S, MOST_WATCHED_STEPS = 0.3, 10
MOST_WATCHED_KERNELS = 6_000  # the profiler needs some 0.2 ms for each kernel
LEAD = 1  # this many steps at the start of a watched sequence are not counted


@dataclass(frozen=True)
class KernelTimes:
    """The kernels of one step, in the order of their launch.

    Attributes:
        names: name of each kernel.
        ms: median time of each kernel over the steps.
        busy_ms: time for which the device works in a step (median over the steps); work that overlaps counts once.
        steps: number of watched steps.
    """

    names: tuple[str, ...]
    ms: tuple[float, ...]
    busy_ms: float
    steps: int

    def of(self, launched: Sequence[Kernel]) -> list[float] | None:
        """The median times `ms` for the kernels that another run of the step launched, in launch order; None if these
        kernels have other names.
        """
        return list(self.ms) if tuple(kernel.name for kernel in launched) == self.names else None


def in_launch_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels in the order in which the host launched them. A CUDA graph is one launch; its kernels are in order of
    their start.
    """
    return sorted(kernels, key=lambda kernel: (kernel.correlation_id, kernel.start_ns))


def times_of_sequence(kernels: Sequence[Kernel], steps: int, lead: int) -> KernelTimes | None:
    """The kernels of one step, with median times over several steps; None if the steps launched different kernels.

    Args:
        kernels: kernels of all steps.
        steps: number of steps in `kernels`, including the first `lead` steps, whose times do not count.
    """
    ordered = in_launch_order(kernels)
    period, rest = divmod(len(ordered), steps)
    by_step = [ordered[number * period : (number + 1) * period] for number in range(steps)]
    names = tuple(kernel.name for kernel in by_step[-1])
    if rest or any(tuple(kernel.name for kernel in step) != names for step in by_step):
        return None
    counted = by_step[lead:]
    ms = tuple(median(kernel.ms for kernel in same) for same in zip(*counted, strict=True))
    return KernelTimes(names, ms, median(map(busy_ms, counted)), len(counted))


def watch_kernels(step: Callable[[], object], device: torch.device, step_ms: float, kernels: int) -> KernelTimes | None:
    """Time each kernel over some steps in sequence under the profiler; None if the steps launch different kernels, or
    no kernels.

    Args:
        step: runs one step.
        device: the program's device, a GPU.
        step_ms: approximate time of a step.
        kernels: approximate number of kernels that a step launches.
    """
    wanted = min(MOST_WATCHED_STEPS, math.ceil(1e3 * WATCHED_S / max(step_ms, 1e-3)))
    steps = LEAD + max(1, min(wanted, MOST_WATCHED_KERNELS // max(1, kernels) - LEAD))
    synchronize(device)
    with Trace(device, host=False) as trace:
        for _ in range(steps):
            step()
    seen = device_kernels(trace.events)
    return times_of_sequence(seen, steps, LEAD) if seen else None
