"""Differences between two reports: measured values of the step, its operators, and its modules.

Operators are compared by phase and name, over all their shapes and dtypes. So a change of dtype, layout or batch size
makes no new operator, and its effect on each operator is visible. Of the modules, only those without children
are compared, by path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import ModuleNode
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.figures import in_words
from rooftop.hardware.histories import figures_of

SAME_CEILING = 0.01  # relative change up to which a ceiling counts as unchanged
LEAST_NOISE = 0.01  # relative difference in wall time that two runs of one program on an idle machine may have


@dataclass(frozen=True)
class Change:
    """One quantity before and after a change; None if the quantity did not exist. Times are in ms.

    Attributes:
        name: the name of a value of the step, an operator as "aten::add (backward)", or a module's path.
        before, after: values of the quantity.
        calls_before, calls_after: numbers of calls of an operator.
    """

    name: str
    before: float | None
    after: float | None
    calls_before: int = 0
    calls_after: int = 0

    @property
    def difference(self) -> float:
        """After minus before. A quantity that does not exist counts as 0."""
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True)
class Comparison:
    """The changes from the first report to the second.

    Attributes:
        speedup: wall time before divided by wall time after.
        noise: noise of the wall time, as a fraction of it; a smaller change of the wall time is not significant.
        figures: values of the step (times, roofs, bytes), in the order of the report.
        operators, modules: the largest change first.
        differences: other differences (device, inputs, versions, mode), each as a sentence.
    """

    speedup: float
    noise: float
    figures: tuple[Change, ...]
    operators: tuple[Change, ...]
    modules: tuple[Change, ...]
    differences: tuple[str, ...]

    @property
    def significant(self) -> bool:
        """Whether the wall time changed by more than the noise."""
        return abs(self.speedup - 1) > self.noise

    @property
    def slowdown(self) -> float:
        """The relative increase of the wall time: 0.1 if the step takes 10% longer, negative if it is faster."""
        return 1 / self.speedup - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.significant}


def compare_reports(before: Report, after: Report) -> Comparison:
    """Compare two analyses of the same program, or of two versions of it."""
    return Comparison(
        speedup=before.summary.wall_ms / after.summary.wall_ms,
        noise=max(LEAST_NOISE, before.summary.wall_spread, after.summary.wall_spread),
        figures=tuple(_figures(before, after)),
        operators=_by_size(_operators(before), _operators(after)),
        modules=_by_size(_leaves(before.modules), _leaves(after.modules)),
        differences=tuple(_differences(before, after)),
    )


def _figures(before: Report, after: Report) -> Iterator[Change]:
    for name in ("wall_ms", "busy_ms", "op_roof_ms", "fused_roof_ms", "percent_of_roof", "flops", "bytes", "kernels"):
        yield Change(name, getattr(before.summary, name), getattr(after.summary, name))
    for name in ("kernel_gap_ms", "fusion_headroom_ms", "launch_gap_ms"):
        yield Change(name, getattr(before.gaps, name), getattr(after.gaps, name))
    yield Change("peak_bytes", before.peak_bytes, after.peak_bytes)
    yield Change("coverage", before.coverage, after.coverage)


Totals = Mapping[str, tuple[float, int]]  # name -> (ms, calls)


def _operators(report: Report) -> Totals:
    found: dict[str, tuple[float, int]] = {}
    for row in report.ops:
        name = row.name if row.phase == "forward" else f"{row.name} ({row.phase})"
        ms, calls = found.get(name, (0.0, 0))
        found[name] = (ms + row.measured_ms, calls + row.calls)
    return found


def _leaves(node: ModuleNode, path: str = "") -> Totals:
    """(time in ms, calls) of each module without children, by path. The times of these modules do not overlap."""
    if not node.children:
        return {path or "(model)": (node.measured_ms, node.calls)}
    found: dict[str, tuple[float, int]] = {}
    for child in node.children:
        found |= _leaves(child, f"{path}.{child.name}" if path else child.name)
    return found


def _by_size(before: Totals, after: Totals) -> tuple[Change, ...]:
    changes = []
    for name in dict.fromkeys([*before, *after]):
        (ms_before, calls_before), (ms_after, calls_after) = (side.get(name, (None, 0)) for side in (before, after))
        changes.append(Change(name, ms_before, ms_after, calls_before, calls_after))
    return tuple(sorted(changes, key=lambda change: -abs(change.difference)))


def _differences(before: Report, after: Report) -> Iterator[str]:
    for what, old, new in (
        ("device", before.device.get("name"), after.device.get("name")),
        ("target", before.target, after.target),
        ("mode", before.mode, after.mode),
        ("inputs", ", ".join(before.inputs), ", ".join(after.inputs)),
    ):
        if old != new:
            yield f"{what}: {old} -> {new}"
    for package in sorted({*before.versions, *after.versions}):
        old, new = before.versions.get(package), after.versions.get(package)
        if old != new:
            yield f"{package}: {old or 'none'} -> {new or 'none'}"
    yield from _ceilings_changed(before, after)


def _ceilings_changed(before: Report, after: Report) -> Iterator[str]:
    """A sentence about the ceilings that differ between the two reports, if there are any."""
    old, new = (figures_of(Ceilings.from_dict(report.ceilings)) for report in (before, after))
    both = [name for name in old if old[name] and new.get(name) and not name.startswith(("sustained", "pulse"))]
    changes = {name: new[name] / old[name] - 1 for name in both}
    changed = sorted((name for name in changes if abs(changes[name]) > SAME_CEILING), key=lambda n: -abs(changes[n]))
    if changed:
        largest = ", ".join(f"{in_words(name)} {changes[name]:+.1%}" for name in changed[:3])
        others = f" and {len(changed) - 3} others" if len(changed) > 3 else ""
        yield f"ceilings: {largest}{others}; so roofs, percents and gaps differ, too"
