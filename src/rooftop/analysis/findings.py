"""The input of the rules that give advice: the measurements of one step, and the ceilings of its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rooftop.analysis.host_operators import LEAST_WORK
from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.report_contents import Gaps, OperatorRow, Summary
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.page_faults import NO_FAULTS, PageFaults

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Findings:
    """The measurements of one step of a program, as the input of the rules that give advice.

    Attributes:
        operators: the operators that the step executed, in order.
        rows: the rows of the report's table: operators with the same name, phase, shapes and dtype share a row.
        summary: the times of the step as a whole.
        gaps: the parts of the wall time above the step's roof.
        ceilings: the highest rates of the machine, to compare the step with.
        plain: the step's run under the profiler without labels; None if the step was not run.
        host_ms: time that the host takes to launch the step; None if unknown.
        best_ms: lower end of the interval of the step's wall time (see `Summary`); None if the step was not run.
        optimizers: the optimizers whose `step` the program called and that still exist.
        refuses_capture: whether the settings of an optimizer in `optimizers` keep its step out of a CUDA graph.
        traced_more_ms: additional busy time of the device if the program takes its code path for compilation or
            capture; None if the program then fails.
        host_work: bytes plus flops that the CPU processed in a step on a GPU.
        faults: page faults of a step; none on a GPU.
        batched: whether more samples need no additional launches. (For a detector's list of images, each further image
            needs additional launches.)
        device: the device of the step, on which operators are timed again.
        timed: measurements that several rules share, by name.
    """

    operators: Sequence[MeasuredOperator]
    rows: Sequence[OperatorRow]
    summary: Summary
    gaps: Gaps
    ceilings: Ceilings
    plain: Plain | None = None
    host_ms: float | None = None
    best_ms: float | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    refuses_capture: bool = False
    traced_more_ms: float | None = 0.0
    batched: bool = True
    host_work: int = 0
    faults: PageFaults = NO_FAULTS
    device: torch.device = CPU
    timed: dict[str, Any] = field(default_factory=dict)

    @property
    def noise_ms(self) -> float:
        """The uncertainty of the step's wall time in ms. A gain below this time would not be visible."""
        low_ms, high_ms = self.summary.wall_low_ms, self.summary.wall_high_ms
        if low_ms is None or high_ms is None:
            return 0.0
        return max(high_ms - self.summary.wall_ms, self.summary.wall_ms - low_ms)

    @property
    def quiet_wall_ms(self) -> float:
        """Wall time of the step in ms if other programs do not slow down the host. The GPU then either runs kernels
        back to back or waits for the host.

        The GPU's time between two kernels of a stream is about the same as between two kernels of a CUDA graph.
        """
        least_ms = self.summary.wall_ms if self.best_ms is None else self.best_ms
        if self.host_ms is None:
            return least_ms
        following_ms = self.summary.busy_ms + self.summary.kernels * self.ceilings.launch_graph_ms
        return min(least_ms, max(following_ms, self.host_ms))

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the step: it has kernels, does not fail during capture (see
        `traced_more_ms`), and the host neither waits for a value nor computes one."""
        if self.traced_more_ms is None or self.host_works or not self.summary.busy_ms:
            return False
        waiting = self.plain is not None and self.plain.waiting_ms > 0
        return not waiting and not any(waits_for_device(op) for op in self.operators)

    @property
    def host_works(self) -> bool:
        """Whether the CPU computes at least `LEAST_WORK` in a step that runs on a GPU. A program that only counts its
        steps computes less."""
        return self.host_work >= LEAST_WORK

    @property
    def said_of_tracing(self) -> str:
        """A sentence for advice to compile or capture the step: how much more time the operators take that the program
        then chooses instead. "" if compiling or capturing does not change the operators."""
        if not self.traced_more_ms:
            return ""
        return (
            "; when compiled or captured, this program chooses other operators, which take "
            f"{self.traced_more_ms:.2f} ms more"
        )

    @property
    def training(self) -> bool:
        return any(row.phase == "backward" for row in self.rows)

    @property
    def repeatable(self) -> bool:
        """Whether the step's operators can be timed again in this process: the step ran, and it ran on this machine."""
        return self.plain is not None

    @property
    def on_gpu(self) -> bool:
        return self.ceilings.kind == "cuda"

    def undisturbed_ms(self, labelled_ms: float) -> float:
        """Convert operators' time `labelled_ms`, measured in a step with profiler labels, to a step without labels.
        Without labels, all operators together take at most the device's busy time.
        """
        return labelled_ms * self._undisturbed

    @cached_property
    def _undisturbed(self) -> float:
        labelled_ms = sum(op.measured_ms for op in self.operators)
        return min(1.0, self.summary.busy_ms / labelled_ms) if labelled_ms else 1.0

    def saved_ms(self, labelled_ms: float, more_host_ms: float = 0.0) -> float:
        """The time in ms by which a step becomes shorter if its operators take `labelled_ms` less. The step never
        becomes shorter than the host's time to launch it.

        The host's shortest time is compared with the step's shortest time, because other work of the host delays the
        step equally with and without the change.

        Args:
            labelled_ms: time that a change to the program saves in operators, in a step with profiler labels.
            more_host_ms: additional host time to launch the changed operators.
        """
        busy_ms = self.undisturbed_ms(labelled_ms)
        if self.host_ms is None:
            return busy_ms
        wall_ms = self.summary.wall_ms if self.best_ms is None else self.best_ms
        return wall_ms - max(self.host_ms + more_host_ms, wall_ms - busy_ms)

    def saved_in_graph_ms(self, labelled_ms: float) -> float:
        """The time in ms by which a step becomes shorter if its operators take `labelled_ms` less, and a CUDA graph
        launches all kernels except the optimizer's."""
        busy_ms = self.summary.busy_ms - self.undisturbed_ms(labelled_ms)
        outside = sum(op.record.phase == "optimizer" for op in self.operators)
        return self.summary.wall_ms - max(busy_ms, self.launched_ms(outside))

    def launched_ms(self, operators: int) -> float:
        """Time in ms that the host takes to launch `operators` operators, at the step's average time per operator; 0 if
        unknown."""
        return (self.host_ms or 0.0) * operators / max(1, len(self.operators))

    def saved_by_ms(self, after_ms: Sequence[float], more_host_ms: float = 0.0) -> float:
        """Like `saved_ms`, but `after_ms` has each operator's time after a change to the program, in order of
        execution. The times are those of a step with profiler labels.

        In one part of the step the GPU may wait for the host, while in another part the host is far ahead. So
        faster small operators save nothing where the GPU waits for the host. Large operators at the end run after all
        launches, so their gains count in full.
        """
        now_ms = [op.measured_ms for op in self.operators]
        most_ms = self.saved_ms(sum(now_ms) - sum(after_ms), more_host_ms)
        if self.host_ms is None:
            return most_ms
        return min(most_ms, self._done_ms(now_ms, self.host_ms) - self._done_ms(after_ms, self.host_ms + more_host_ms))

    def _done_ms(self, labelled_ms: Sequence[float], host_ms: float) -> float:
        """The time in ms from the start of the step until the GPU has finished all operators.

        Args:
            labelled_ms: the time that each operator takes on the GPU, in a step with labels, in order of execution.
            host_ms: the time that the host takes to launch all operators. The launches are spread over this time as in
                the measured step.
        """
        kernels = [max(1, len(op.kernels)) for op in self.operators]
        launched, done_ms, total = 0, 0.0, sum(kernels)
        for count, ms in zip(kernels, labelled_ms, strict=True):
            launched += count
            done_ms = max(done_ms, host_ms * self._launched(launched / total)) + self.undisturbed_ms(ms)
        return done_ms

    def _launched(self, part: float) -> float:
        """When the host has launched the first kernels of a step, as a number from 0 (the start of the step) to 1 (the
        end of the step's last launch). `part` is the number of these kernels, divided by the number of all kernels.

        If the moments of the launches are unknown, the host is assumed to launch at a constant pace.
        """
        pace = self.plain.launched if self.plain is not None else ()
        return (
            pace[min(len(pace) - 1, round(part * len(pace)) - 1)] if len(pace) > 1 and part * len(pace) >= 1 else part
        )


def waits_for_device(op: MeasuredOperator) -> bool:
    """Whether the host waits for an operator. For a copy, the host waits only if the copy goes to the host or comes
    from pageable memory."""
    if not op.record.place:
        return False
    is_copy = op.record.name in ("aten::copy_", "aten::_to_copy")
    return not is_copy or any("DtoH" in kernel or "Pageable" in kernel for kernel in op.kernels)


LEAST_GAIN = 0.02
"""Advice that would gain less than this fraction of the wall time is omitted."""
