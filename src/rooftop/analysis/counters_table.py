"""A table of counters: each kernel's measured traffic next to the traffic that its operators require."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.analysis.counters import KernelRow
from rooftop.analysis.formats import quantity_text, time_text
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import OperatorRow

REREADING = 1.3
"""If a kernel moves more than this many times the counted bytes, the report says that it moves data more than once."""
LEAST_BYTES = 1 << 18
"""Kernels with fewer bytes than this get no ratio. On an H200, a kernel that needs 4 bytes reads 5 kB: its own code and
constants."""


@dataclass(frozen=True)
class Counted:
    """Bytes that the operators of a kernel must move, as Rooftop counts them.

    Attributes:
        bytes: None if no operator launches the kernel, or if an operator that launches it has no cost.
        shared: whether some of these operators also launch other kernels. The bytes of such an operator are divided
            among its kernels in proportion to the moved bytes. So the ratio of moved to required bytes is the same for
            all kernels of an operator.
    """

    bytes: float | None
    shared: bool = False


def counted_bytes(rows: Sequence[KernelRow], operators: Sequence[OperatorRow]) -> dict[str, Counted]:
    """For each kernel name, the bytes that must be moved by the operators that launched the kernel.

    ncu does not count the driver's copies and fills, which are not kernels. So all bytes of an operator count for its
    kernels.
    """
    by_name = {row.name: row for row in rows}
    counted: dict[str, Counted] = {}
    for operator in operators:
        kernels = [by_name[name] for name in operator.kernels if name in by_name]
        moved = sum(kernel.dram_bytes for kernel in kernels)
        for kernel in kernels:
            before = counted.get(kernel.name, Counted(0.0))
            if before.bytes is None or operator.bound == "uncovered" or not moved > 0:
                counted[kernel.name] = Counted(None)
                continue
            part = operator.bytes * kernel.dram_bytes / moved
            counted[kernel.name] = Counted(before.bytes + part, before.shared or len(kernels) > 1)
    return {row.name: counted.get(row.name, Counted(None)) for row in rows}


def counters_table(rows: Sequence[KernelRow], report: Report, limit: int = 12) -> RenderableType:
    """A table of at most `limit` kernels, the longest first, with the operators of the report that launched them."""
    title = f"\nhardware counters ({min(limit, len(rows))} of {len(rows)} kernels, each started with empty caches)"
    table = Table(box=None, padding=(0, 1), title=title, title_justify="left")
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=30)
    columns = ("calls", 5), ("time", 7), ("moved", 7), ("GB/s", 5), ("of DRAM", 7)
    for name, width in (*columns, ("tensor", 6), ("occup.", 6), ("must move", 9), ("ratio", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    ceiling = _dram_ceiling(report)
    counted = counted_bytes(rows, report.ops)
    for row in rows[:limit]:
        must = counted[row.name]
        table.add_row(
            short_name(row.name),
            str(row.calls),
            time_text(row.ms),
            _bytes_text(row.dram_bytes),
            "-" if math.isnan(row.dram_rate) else f"{row.dram_rate / 1e9:,.0f}",
            _percent(100 * row.dram_rate / ceiling),
            _percent(row.tensor_percent),
            _percent(row.occupancy_percent),
            ("~" if must.shared else "") + _bytes_text(must.bytes),
            _ratio(row.dram_bytes, must.bytes),
        )
    return Group(table, *(Text(note, style="dim") for note in _notes(rows, counted)))


def _notes(rows: Sequence[KernelRow], counted: dict[str, Counted]) -> list[str]:
    both = [(row.dram_bytes, must) for row in rows if (must := counted[row.name].bytes) is not None]
    if not both:
        return []
    moved, must = sum(moved for moved, _ in both), sum(must for _, must in both)
    notes = [
        f"{_bytes_text(moved)} moved, {_bytes_text(must)} necessary, over the kernels whose operators have a cost "
        "formula"
    ]
    if any(must >= LEAST_BYTES and moved > REREADING * must for moved, must in both):
        notes.append(f"ratio above {REREADING} (!): data goes through DRAM more than once, or in partly used sectors")
    if any(must.shared for must in counted.values()):
        notes.append("~: the operator runs several kernels, and the ratio is for all of them together")
    return [f"note: {note}" for note in notes]


def _dram_ceiling(report: Report) -> float:
    """DRAM bandwidth in bytes/s, reads and writes together; nan if unknown."""
    rates = [level["rate"] for level in report.ceilings["levels"] if level["capacity_bytes"] is None]
    return float(rates[0]) if rates else math.nan


def short_name(name: str) -> str:
    """A kernel's name without its return type, its namespaces and its arguments; template arguments stay."""
    name = re.sub(r"\(anonymous namespace\)::|^void |^std::enable_if<.*?>::type ", "", name)
    match = re.match(r"(?:\w+::)*(\w+)(<.*>)?(\(|$)", name)
    if match is None:
        return name
    return match[1] + re.sub(r"\w+::", "", match[2] or "")


def _bytes_text(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{quantity_text(value)}B"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}%"


def _ratio(moved: float, must: float | None) -> Text:
    if must is None or must < LEAST_BYTES or math.isnan(moved):
        return Text("-")
    ratio = moved / must
    return Text(f"{ratio:.2f} (!)", style="yellow") if ratio > REREADING else Text(f"{ratio:.2f}")
