"""The contents of a finished analysis.

Times are milliseconds of one step. A multiply-add counts as two `flops`.
Rows of operators and modules hold totals over their calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rooftop.analysis.formats import time_text
from rooftop.analysis.ranks.merging import Ranks

FLAGGED_PERCENT = 102.0
"""A result above this percentage of its roof is marked, because the cost model or the measurement must be wrong."""


@dataclass(frozen=True)
class OperatorRow:
    """All executions of one operator with the same phase, shapes and dtype.

    Attributes:
        name: e.g. "aten::convolution".
        phase: "forward", "backward" or "optimizer".
        shapes: shapes of its input tensors.
        dtype: dtype of the first floating-point input.
        calls: number of executions. All other numbers in the row are totals over these executions.
        bound: the limit that sets the roof: "memory", "compute", "launch", "none" (a view) or "uncovered".
        modules: paths of the modules that called the operator.
        kernels: names of its kernels, copies and fills on the device.
        uncovered: why the operator has no cost (it has no formula, its formula failed, or the machine's rate for its
            precision is unknown); "" if it has a cost.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    calls: int
    flops: int
    flops_by_precision: dict[str, int]
    bytes: int
    roof_ms: float
    measured_ms: float
    bound: str
    modules: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    uncovered: str = ""

    @property
    def percent_of_roof(self) -> float | None:
        """100 * roof / measured; None if the operator has no formula, no time, or neither bytes nor flops."""
        if self.bound in ("none", "uncovered") or self.measured_ms <= 0:
            return None
        return 100 * self.roof_ms / self.measured_ms

    @property
    def flagged(self) -> bool:
        return self.percent_of_roof is not None and self.percent_of_roof > FLAGGED_PERCENT

    @property
    def gap_ms(self) -> float:
        return self.measured_ms - self.roof_ms


@dataclass(frozen=True)
class ModuleNode:
    """A module; `children` are the modules directly below it, `name` is the last part of its path, "" for the root."""

    name: str
    type: str
    calls: int
    parameters: int
    flops: int
    bytes: int
    measured_ms: float
    op_roof_ms: float
    fused_roof_ms: float
    children: tuple[ModuleNode, ...] = ()

    @property
    def percent_of_roof(self) -> float | None:
        """100 * fused roof / measured; None if the module has no time or no roof."""
        return 100 * self.fused_roof_ms / self.measured_ms if self.measured_ms > 0 and self.op_roof_ms > 0 else None

    def find(self, path: str) -> ModuleNode:
        """The module at a path such as "layer1.0.conv1".

        Raises:
            KeyError: there is no such module.
        """
        node = self
        for part in path.split(".") if path else ():
            match = next((child for child in node.children if child.name == part), None)
            if match is None:
                where, names = repr(node.name) if node.name else "the root", [child.name for child in node.children]
                raise KeyError(f"no module {path!r}: {where} has {', '.join(names) or 'no modules'}")
            node = match
        return node


@dataclass(frozen=True)
class Gaps:
    """wall = fused roof + fusion headroom + kernel gap + launch gap.

    Attributes:
        kernel_gap_ms: device's busy time - op roof: the time lost by kernels that are slower than the machine allows.
        fusion_headroom_ms: op roof - fused roof: the time for intermediate values that operators write to memory and
            read again.
        launch_gap_ms: wall time - device's busy time: the time for which the device waits for the host.
    """

    kernel_gap_ms: float
    fusion_headroom_ms: float
    launch_gap_ms: float


@dataclass(frozen=True)
class Advice:
    """A change that would make the step faster, with its gain and the evidence.

    Attributes:
        gain_ms: ms that each step of a loop would save.
        low_ms, high_ms: interval of the gain, from the noise of the wall time; None if nothing was measured.
        command: a command to type or code to write; None if it takes more than one line.
    """

    title: str
    evidence: str
    gain_ms: float
    command: str | None = None
    low_ms: float | None = None
    high_ms: float | None = None


@dataclass(frozen=True)
class GraphBreak:
    """A graph break of `torch.compile`: its position ("file:line"), the reason, and the seconds to compile the code
    after the break."""

    line: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Recompilation:
    """A function that was recompiled: "file:line" of its definition, its name, the guard that failed, and the seconds
    of compilation."""

    line: str
    function: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """The work of `torch.compile` while the program was analyzed: number of graphs, number of their kernels, seconds of
    compilation, graph breaks and recompilations."""

    graphs: int
    kernels: int
    seconds: float
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The step as a whole.

    Attributes:
        wall_ms: time of a step in a sequence of steps, as a loop runs them.
        wall_spread: width of the wall time's interval, divided by the wall time.
        busy_ms: time during which the device works.
        op_roof_ms, fused_roof_ms: see `rooftop.analysis.floors`.
        kernels: launches of one step.
        samples: samples of one step, from its first input (see `Program.samples`).
        repeats: number of labelled steps (see `rooftop.analysis.profiling`); 0 in a prediction.
        wall_low_ms, wall_high_ms: interval of the wall time. For an analysis it reaches from the fastest steps to the
            median, for a recording it contains the middle half of the steps (see `StepTime`).
        latency_ms: time of one step alone, from an idle device to the end of the step's work. A single request waits
            this long.
        latency_low_ms, latency_high_ms: interval of the latency.
        disturbed: whether other programs used resources that this program needed, or repeated timings disagreed (a note
            says which).

    In a report that an older version wrote, fields that it lacks have their default values.
    """

    wall_ms: float
    wall_spread: float
    busy_ms: float
    op_roof_ms: float
    fused_roof_ms: float
    flops: int
    bytes: int
    parameters: int
    kernels: int
    samples: int | None
    repeats: int
    wall_low_ms: float | None = None
    wall_high_ms: float | None = None
    latency_ms: float | None = None
    latency_low_ms: float | None = None
    latency_high_ms: float | None = None
    disturbed: bool = False

    @property
    def percent_of_roof(self) -> float:
        """100 * fused roof / wall."""
        return 100 * self.fused_roof_ms / self.wall_ms

    @property
    def percent_interval(self) -> tuple[float, float]:
        """The percent of roof at the ends of the wall time's interval, the lower one first."""
        low_ms, high_ms = self.wall_low_ms or self.wall_ms, self.wall_high_ms or self.wall_ms
        return 100 * self.fused_roof_ms / high_ms, 100 * self.fused_roof_ms / low_ms

    @property
    def device_bound(self) -> bool:
        """Whether the device, not the host, sets the pace of a loop of such steps."""
        return self.busy_ms >= DEVICE_BOUND * self.wall_ms


DEVICE_BOUND = 0.9
"""A device sets the pace if it works for at least this share of the wall time."""


@dataclass(frozen=True, repr=False)
class ReportContents:
    """The contents of `rooftop.analyze`'s result; `rooftop.analysis.Report` has its output formats.

    Attributes:
        target, mode, inputs, created: what was analyzed and when (UTC). The mode is "inference", "training" or
            "callable"; for a recording "recorded" or, for example, "60 recorded steps".
        device, versions, ceilings: the machine, as plain dicts like those in the JSON.
        summary, gaps, coverage: the step as a whole; coverage is the fraction of the measured operator time that is
            spent in operators with a cost (in a prediction, the fraction of operators with a cost).
        ops: operators, the longest time first.
        modules: the root of the module tree.
        advice: the largest gain first.
        memory, peak_bytes: curve of (ms since the step began, allocated bytes), and its maximum in bytes.
        compilation: the work of `torch.compile`; None if nothing is compiled.
        ranks: ranks of a distributed step; None in a single process. All other data are those of rank 0.
        predicted: whether this is a prediction, in which each operator takes its roof time (see `rooftop.predict`).
        notes: remarks on the measurement that a reader should know.
    """

    target: str
    mode: str
    inputs: tuple[str, ...]
    created: str
    device: dict[str, Any]
    versions: dict[str, str]
    ceilings: dict[str, Any]
    summary: Summary
    gaps: Gaps
    coverage: float
    ops: tuple[OperatorRow, ...]
    modules: ModuleNode
    advice: tuple[Advice, ...]
    memory: tuple[tuple[float, int], ...] = ()
    peak_bytes: int = 0
    compilation: Compilation | None = None
    ranks: Ranks | None = None
    predicted: bool = False
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def uncovered(self) -> list[OperatorRow]:
        """Operators without a cost, the longest time first."""
        return [row for row in self.ops if row.bound == "uncovered"]

    @property
    def pace(self) -> str:
        """A sentence that says whether the GPU or the host limits a loop of steps, and how long one step alone takes;
        "" if no GPU was timed.
        """
        summary = self.summary
        if self.predicted or summary.latency_ms is None:
            return ""
        share, leader = 100 * summary.busy_ms / summary.wall_ms, "GPU" if summary.device_bound else "host"
        loop = f"In a loop the {leader} sets the pace: the GPU works for {share:.0f}% of a step."
        lead_ms = summary.latency_ms - summary.wall_ms
        if lead_ms <= 0.05 * summary.wall_ms:
            return f"{loop} A single step takes the same time."
        return f"{loop} A single step takes {time_text(summary.latency_ms)}, because it begins with an idle GPU."
