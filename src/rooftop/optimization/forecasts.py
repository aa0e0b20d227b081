"""Forecast what a compiler could fuse in a step, from the time and the tensors of each operator.

The rules of `rooftop.analysis.advice.fusion` find the operators that would share a kernel, and the memory traffic that
remains. The memory bandwidth is measured only roughly, because only its ratio to the bandwidth of the step's operators
matters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

import torch

from rooftop.analysis.advice.compiler_layouts import compiler_lays_out_channels_last
from rooftop.analysis.advice.fusion import fused
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import CountingMode
from rooftop.hardware.ceilings import Ceilings, MemoryPoint
from rooftop.hardware.figures import PRECISIONS
from rooftop.rewrites.candidates import Fusable
from rooftop.rewrites.timed_alone import AHEAD_MS, CYCLES_A_MS, MOST_AHEAD_MS, alone_ms, launch_ms

SIZES = (1 << 18, 1 << 22, 1 << 26)
"""Sizes in bytes of the copies that measure the memory bandwidth. The smaller copies fit in caches, and the largest
copy does not fit in the caches of most CPUs."""
EVENT_PAIRS = 20
LAUNCHES = 200
"""Number of timed launches: fewer than the 1000 or so that a device queues before the host has to wait."""


def quick_ceilings(device: torch.device) -> Ceilings:
    """Quickly measured limits of a device: memory bandwidths, the time of the shortest kernel, and the time of a
    launch. Arithmetic is not measured: the peak rates are infinite.
    """
    points = []
    for size in SIZES:
        source = torch.ones(size // 8, device=device)
        target = torch.empty_like(source)
        rate = size / (alone_ms(lambda t=target, s=source: t.copy_(s), device) / 1e3)  # type: ignore[misc]
        points.append(MemoryPoint(size, rate, rate, rate, rate))
    small = torch.ones(8, device=device)
    kernel_ms = alone_ms(lambda: small.add_(1), device)
    return Ceilings(
        device="",
        device_id="",
        kind=device.type,
        threads=torch.get_num_threads(),
        versions={},
        measured_at="",
        memory=tuple(points),
        levels=(),
        flops=dict.fromkeys(PRECISIONS, math.inf),
        kernel_floor_ms=kernel_ms,
        launch_eager_ms=launch_ms(lambda: small.add_(1), device, LAUNCHES),
        launch_graph_ms=0.0,
        transfers={},
        links={},
        spread={},
        disturbed=(),
    )


def fusable_of(run: Callable[[], object], device: torch.device, ceilings: Ceilings) -> Fusable:
    """The fusions that a compiler could make in one call of `run`, which runs forward or forward and backward."""
    clock = OperatorClock(device)
    with CountingMode(_place, clock.at) as counted:
        run()
    if clock.late:
        clock = OperatorClock(device, clock)
        with CountingMode(_place, clock.at) as counted:
            run()
    pairs = zip(counted.records, clock.times_ms(), strict=False)
    operators = [MeasuredOperator(record, ms, ()) for record, ms in pairs]
    found = fused(operators, ceilings)
    launches = sum(op.record.cost is None or op.record.cost.bytes > 0 for op in operators)
    channels_last = compiler_lays_out_channels_last(operators, device.type == "cuda")
    return Fusable(found.operators, found.kernels, found.now_ms, found.after_ms, launches, channels_last)


def _place() -> tuple[str, str]:
    return "", "backward" if torch._C._current_graph_task_id() != -1 else "forward"


class OperatorClock:
    """Measure the time of each operator by a context around the operator. The contexts cannot be nested.

    On a GPU, CUDA events measure the time. Before each operator the GPU waits 0.2 ms, so that the host has launched the
    operator by then. With `earlier`, the GPU waits twice the host's time for this operator in the earlier run, at least
    0.2 ms and at most 5 ms.

    Args:
        earlier: the clock of an earlier run of the same operators, which knows how long the host takes for each.

    Attributes:
        count: number of operators.
        late: whether the host took longer to launch an operator than the GPU waited. The operator's measured time is
            then too long.
    """

    def __init__(self, device: torch.device, earlier: OperatorClock | None = None) -> None:
        self.device = device
        self.count = 0
        self.late = False
        self._expected_ms = earlier._host_ms if earlier is not None else []
        self._host_ms: list[float] = []
        self._ahead_ms = AHEAD_MS
        self._ms: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def at(self, index: int) -> OperatorClock:
        """The context for an operator, as `CountingMode` asks for it."""
        return self

    def __enter__(self) -> OperatorClock:
        index = self.count
        self.count += 1
        if self.device.type == "cuda":
            expected_ms = self._expected_ms[index] if index < len(self._expected_ms) else 0.0
            self._ahead_ms = max(AHEAD_MS, min(MOST_AHEAD_MS, 2 * expected_ms))
            self._begin(self._ahead_ms)
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.device.type != "cuda":
            self._ms.append((time.perf_counter_ns() - self._began) / 1e6)
            return
        self._events[-1][1].record(torch.cuda.current_stream(self.device))
        self._host_ms.append((time.perf_counter_ns() - self._began) / 1e6)
        self.late |= self._host_ms[-1] > self._ahead_ms

    def _begin(self, ahead_ms: float = AHEAD_MS) -> None:
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(ahead_ms * CYCLES_A_MS))
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record(stream)
            self._events.append(pair)

    def times_ms(self) -> list[float]:
        """The time in ms of each operator that has run, in order: on a GPU the device's time, on a CPU the wall
        time.
        """
        if self.device.type != "cuda":
            return self._ms
        count = len(self._events)
        for _ in range(EVENT_PAIRS):  # measure the time between two events without work
            self._begin()
            self._events[-1][1].record(torch.cuda.current_stream(self.device))
        torch.cuda.synchronize(self.device)
        empty = sorted(start.elapsed_time(end) for start, end in self._events[count:])[EVENT_PAIRS // 2]
        self._events, ended = self._events[:count], self._events[:count]
        return [max(0.0, start.elapsed_time(end) - empty) for start, end in ended]
