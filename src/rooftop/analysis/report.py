"""A finished analysis: what it holds, and its forms as a table, JSON and HTML.

Times are milliseconds of one step. `flops` count multiplications and additions separately.
Rows of operators and modules hold totals over their calls.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path
from typing import Any

from rooftop.analysis.formats import time_text
from rooftop.analysis.ranks.merging import Ranks
from rooftop.hardware.ceilings import Ceilings, write_whole

FORMAT = 1
FLAGGED_PERCENT = 102.0
"""Above this percentage of its roof a result is an error of the cost model or of the measurement, and is marked so."""


@dataclass(frozen=True)
class OperatorRow:
    """All executions of one operator with the same phase, shapes and dtype.

    Attributes:
        name: e.g. "aten::convolution".
        phase: "forward", "backward" or "optimizer".
        shapes: of its input tensors. dtype: of the first floating-point one.
        calls: executions; the figures below are totals over them.
        bound: what sets the roof: "memory", "compute", "launch", "none" (a view) or "uncovered".
        modules: paths of the modules that called it. kernels: names of what ran on the device.
        uncovered: why there is no cost formula, "" if there is one.
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
        """100 * roof / measured; None where there is no work or no time to compare."""
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
    """A module with everything below it; `name` is its last path component, "" for the root."""

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
        """100 * fused roof / measured."""
        return 100 * self.fused_roof_ms / self.measured_ms if self.measured_ms > 0 and self.op_roof_ms > 0 else None

    def find(self, path: str) -> ModuleNode:
        """The module at a path such as "layer1.0.conv1".

        Raises:
            KeyError: there is none.
        """
        node = self
        for part in path.split(".") if path else ():
            match = next((child for child in node.children if child.name == part), None)
            if match is None:
                raise KeyError(f"no module {path!r}: {node.name!r} has {[c.name for c in node.children]}")
            node = match
        return node


@dataclass(frozen=True)
class Gaps:
    """wall = fused roof + fusion headroom + kernel gap + launch gap.

    Attributes:
        kernel_gap_ms: device busy - op roof: kernels slower than the machine allows.
        fusion_headroom_ms: op roof - fused roof: intermediates that go through memory between operators.
        launch_gap_ms: wall - device busy: the device waits for the host.
    """

    kernel_gap_ms: float
    fusion_headroom_ms: float
    launch_gap_ms: float


@dataclass(frozen=True)
class Advice:
    """Something that would make the step faster, by how much, and what that is concluded from.

    Attributes:
        gain_ms: of a step in sequence. low_ms, high_ms: the interval that the noise of the wall time leaves it, None
            where nothing was measured.
        command: what to type or to write, None if there is no one line for it.
    """

    title: str
    evidence: str
    gain_ms: float
    command: str | None = None
    low_ms: float | None = None
    high_ms: float | None = None


@dataclass(frozen=True)
class GraphBreak:
    """A place where `torch.compile` had to leave its graph: "file:line", why, and the seconds that compiling what
    follows it took."""

    line: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Recompilation:
    """A function that was compiled again: "file:line" of its definition, its name, the guard that failed, seconds."""

    line: str
    function: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """What `torch.compile` did while the program was analyzed: graphs, the kernels in them, seconds, and what it could
    not keep in one graph or had to do again."""

    graphs: int
    kernels: int
    seconds: float
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The step as a whole.

    Attributes:
        wall_ms: of a step in a sequence of steps, as a loop runs them. wall_spread: width of its interval over itself.
        busy_ms: time during which the device works.
        op_roof_ms, fused_roof_ms: see `rooftop.analysis.floors`.
        kernels: launches of one step. samples: of one step, as its first input tells
            (see `Program.samples`).
        repeats: how often each operator was timed.
        wall_low_ms, wall_high_ms: its interval: the fastest steps, and what half of them stayed below.
        latency_ms: of one step alone, from an idle device to the end of its work; what one request waits for.
        latency_low_ms, latency_high_ms: its interval.
        disturbed: other programs took what this one needed, or its times were not reproduced (a note says which).

    What a report before these had no place for is None.
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
        """Whether the device sets the pace of a loop of such steps, and not the host."""
        return self.busy_ms >= DEVICE_BOUND * self.wall_ms


DEVICE_BOUND = 0.9
"""A device that works for this part of the wall time sets the pace."""


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `rooftop.analyze`.

    Attributes:
        target, mode ("inference", "training" or "callable"), inputs, created: what was analyzed and when (UTC).
        device, versions, ceilings: where. They are plain dicts, as in the JSON.
        summary, gaps, coverage: the step as a whole; coverage is the fraction of the measured operator time that has
            a real cost formula.
        ops: by falling time. modules: the tree's root. advice: by falling gain.
        memory: (ms since the step began, allocated bytes) and `peak_bytes`.
        compilation: what `torch.compile` did, None if nothing is compiled.
        ranks: of a distributed step, None in a single process; the rest is then about rank 0.
        predicted: nothing was measured: each operator takes its roof (see `rooftop.predict`).
        notes: what a reader should know about the measurement.
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
        """Operators without a cost formula, by falling time."""
        return [row for row in self.ops if row.bound == "uncovered"]

    @property
    def pace(self) -> str:
        """What sets the pace of a loop of such steps, and what one step alone waits for; "" if no GPU was timed."""
        summary = self.summary
        if self.predicted or summary.latency_ms is None:
            return ""
        share, leader = 100 * summary.busy_ms / summary.wall_ms, "GPU" if summary.device_bound else "host"
        loop = f"In a loop the {leader} sets the pace: the GPU works for {share:.0f}% of a step."
        lead_ms = summary.latency_ms - summary.wall_ms
        if lead_ms <= 0.05 * summary.wall_ms:
            return f"{loop} A step alone takes as long."
        return f"{loop} A step alone takes {time_text(summary.latency_ms)}: it begins with an idle GPU."

    def table(self, rows: int = 12) -> str:
        """The summary, the opportunities and the `rows` slowest operators as text."""
        from rooftop.analysis.text import render_text

        return render_text(self, rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers: the JSON form."""
        plain: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        plain["summary"]["percent_of_roof"] = self.summary.percent_of_roof
        plain["summary"]["percent_interval"] = list(self.summary.percent_interval)
        plain["pace"] = self.pace
        plain["memory"] = {"peak_bytes": plain.pop("peak_bytes"), "timeline": [list(p) for p in self.memory]}
        plain["ranks"] = self.ranks.to_dict() if self.ranks is not None else None
        plain["ops"] = [_operator_dict(row, self.predicted) for row in self.ops]
        plain["modules"] = _module_dict(self.modules)
        plain["uncovered"] = [
            {"name": row.name, "calls": row.calls, "measured_ms": row.measured_ms, "reason": row.uncovered}
            for row in self.uncovered
        ]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Report:
        """The report that `to_dict` gave.

        Raises:
            ValueError: not a report, or of another format version.
        """
        if "levels" in plain and "flops" in plain:
            raise ValueError("it holds ceilings of a machine; reports are what `rooftop analyze --json FILE` writes")
        if plain.get("format") != FORMAT:
            raise ValueError(f"expected a rooftop report of format {FORMAT}, got format {plain.get('format')!r}")
        try:
            later = {"memory", "peak_bytes", "compilation", "predicted", "ranks"}
            values = {name: plain[name] for name in cls.__dataclass_fields__ if name not in later}
            values["inputs"], values["notes"] = tuple(plain["inputs"]), tuple(plain["notes"])
            values["summary"] = _from(Summary, plain["summary"])
            if values["summary"].wall_ms <= 0:
                raise ValueError(
                    f"damaged rooftop report: wall_ms is {values['summary'].wall_ms}, expected more than 0"
                )
            _number("coverage", plain["coverage"])
            values["device"] = {"name": plain["device"]["name"], **plain["device"]}
            values["versions"] = dict(plain["versions"])
            Ceilings.from_dict(plain["ceilings"])
            values["gaps"] = _from(Gaps, plain["gaps"])
            values["ops"] = tuple(_operator(row) for row in plain["ops"])
            values["modules"] = _module(plain["modules"])
            values["advice"] = tuple(_from(Advice, item) for item in plain["advice"])
            values["memory"] = tuple((float(ms), int(size)) for ms, size in plain["memory"]["timeline"])
            values["compilation"] = _compilation(plain.get("compilation"))
            values["ranks"] = Ranks.from_dict(plain["ranks"]) if plain.get("ranks") else None
            values["predicted"] = bool(plain.get("predicted", False))
            return cls(**values, peak_bytes=plain["memory"]["peak_bytes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"damaged rooftop report: {type(error).__name__} {error}") from error

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `to_json` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a report.
        """
        try:
            plain = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(plain, dict):
                raise ValueError(f"expected an object, got {type(plain).__name__}")
            return cls.from_dict(plain)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise ValueError(f"{os.fspath(path)} is not a rooftop report: {error}") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained HTML page.

        Raises:
            MissingExtraError: plotly is not installed.
        """
        from rooftop.analysis.page import render_page

        write_text(path, render_page(self.to_dict()))

    def __repr__(self) -> str:
        share = "predicted" if self.predicted else f"{self.summary.percent_of_roof:.1f}% of roof"
        return f"<Report of {self.target} {self.mode}: {time_text(self.summary.wall_ms)}, {share}>"

    def _repr_html_(self) -> str:
        """The report inside a notebook: the page in a frame of its own; the table where plotly is not installed.

        The frame is sandboxed: its scripts run, but cannot reach the notebook, whatever a report holds.
        """
        from rooftop.analysis.page import render_page
        from rooftop.errors import MissingExtraError

        try:
            page = render_page(self.to_dict())
        except MissingExtraError:
            return f"<pre>{html.escape(self.table())}</pre>"
        style = "width: 100%; height: 48rem; border: 1px solid #8884"
        source = page.replace("&", "&amp;").replace('"', "&quot;")  # all that an attribute needs; html.escape adds 1 MB
        return f'<iframe title="Rooftop report" sandbox="allow-scripts" srcdoc="{source}" style="{style}"></iframe>'


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all; a device or a pipe as it is."""
    write_whole(Path(path), text)


def _operator_dict(row: OperatorRow, predicted: bool) -> dict[str, Any]:
    plain = asdict(row)
    plain["shapes"] = [list(shape) for shape in row.shapes]
    plain["percent_of_roof"] = None if predicted else row.percent_of_roof
    if row.flagged and not predicted:
        plain["flagged"] = True
    return plain


def _module_dict(node: ModuleNode) -> dict[str, Any]:
    plain = {name: getattr(node, name) for name in ModuleNode.__dataclass_fields__ if name != "children"}
    return {
        **plain,
        "percent_of_roof": node.percent_of_roof,
        "children": [_module_dict(child) for child in node.children],
    }


def _operator(plain: Mapping[str, Any]) -> OperatorRow:
    row = {**plain, "shapes": tuple(tuple(shape) for shape in plain["shapes"])}
    row["modules"], row["kernels"] = tuple(plain["modules"]), tuple(plain["kernels"])
    return _from(OperatorRow, row)


def _module(plain: Mapping[str, Any]) -> ModuleNode:
    return _from(ModuleNode, {**plain, "children": tuple(_module(child) for child in plain["children"])})


def _compilation(plain: Mapping[str, Any] | None) -> Compilation | None:
    if plain is None:
        return None
    breaks = tuple(_from(GraphBreak, item) for item in plain["graph_breaks"])
    again = tuple(_from(Recompilation, item) for item in plain["recompilations"])
    return Compilation(plain["graphs"], plain["kernels"], plain["seconds"], breaks, again)


def _from(kind: Any, plain: Mapping[str, Any]) -> Any:
    """A dataclass from a dict that may also hold its derived properties, and lack fields that have a default.

    Raises:
        KeyError, TypeError: a field is missing, or no number where one belongs.
    """
    given = {}
    for name, declared in kind.__dataclass_fields__.items():
        if name not in plain and declared.default is not MISSING:
            continue
        given[name] = plain[name]
        optional = declared.type in ("int | None", "float | None")
        if declared.type in ("int", "float") or (optional and plain[name] is not None):
            _number(name, plain[name])
    return kind(**given)


def _number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} is {value!r}, expected a number")
