"""Show a report as text for the terminal: summary, gaps, opportunities, slowest operators."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.analysis.formats import (
    percent_interval_text,
    percent_text,
    quantity_text,
    shapes_text,
    short_reason,
    shortened,
    time_text,
)
from rooftop.analysis.ranks.merging import Ranks
from rooftop.analysis.report_contents import Advice, Compilation, OperatorRow, ReportContents
from rooftop.words import counted

WIDTH = 110
PARTS = (  # parts of the wall time, in the order of the bar, with their colours
    ("roof", "fused_roof_ms", "green", "inputs, parameters, outputs moved once; all flops"),
    ("fusion headroom", "fusion_headroom_ms", "cyan", "intermediates that go through memory"),
    ("kernel gap", "kernel_gap_ms", "yellow", "kernels slower than this machine allows"),
    ("launch gap", "launch_gap_ms", "magenta", "the device waits for the host"),
)
GAP_OF_A_CPU = "between operators: Python, PyTorch, and the system"


def render_text(report: ReportContents, rows: int) -> str:
    """The report as plain text, at most `WIDTH` columns wide, with at most `rows` operators."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(renderable(report, rows))
    return console.file.getvalue()  # type: ignore[attr-defined]


def renderable(report: ReportContents, rows: int) -> RenderableType:
    """The report for a rich console, in colour if the console supports it, with at most `rows` operators."""
    parts: list[RenderableType] = [_heading(report), _gaps(report)]
    if report.pace:
        parts.append(Text(report.pace, style="dim"))
    if report.advice:
        parts.append(_advice(report))
    if report.ranks is not None:
        parts += [ranks_table(report.ranks), Text(report.ranks.sentence)]
    parts.append(_operators(report, rows))
    if report.compilation is not None:
        parts.append(_compilation(report.compilation))
    parts.extend(Text(f"note: {note}", style="dim") for note in report.notes)
    return Group(*parts)


def _heading(report: ReportContents) -> Text:
    summary = report.summary
    rate = f" ({1e3 * summary.samples / summary.wall_ms:,.0f} samples/s)" if summary.samples else ""
    heading = Text()
    heading.append(f"{report.target}", style="bold")
    heading.append(f"  {', '.join([report.mode, *report.inputs, report.device['name']])}\n")
    if report.predicted:
        heading.append(f"predicted: at least {time_text(summary.wall_ms)} a step", style="bold")
        heading.append(
            f"{rate.replace('(', '(at most ')}, {time_text(summary.op_roof_ms)} with every operator at its roof"
        )
    else:
        heading.append(
            f"{percent_interval_text(summary.percent_of_roof, *summary.percent_interval)} of roof", style="bold"
        )
        heading.append(f": {time_text(summary.wall_ms)} a step{rate}")
        if summary.latency_ms is not None:
            heading.append(f", {time_text(summary.latency_ms)} alone")
    heading.append(f", roof {time_text(summary.fused_roof_ms)}; {quantity_text(summary.flops)}FLOP, ")
    of_what = "operators" if report.predicted else "operators' time"
    heading.append(f"coverage {100 * report.coverage:.1f}% of the {of_what}{_uncovered(report)}\n")
    return heading


def _uncovered(report: ReportContents) -> str:
    names = list(dict.fromkeys(row.name for row in report.uncovered))
    if not names:
        return ""
    return f" (uncovered: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _gaps(report: ReportContents) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    wall_ms = report.summary.wall_ms
    values = {"fused_roof_ms": report.summary.fused_roof_ms, **vars(report.gaps)}
    on_cpu = report.device["kind"] == "cpu"
    for label, name, colour, meaning in PARTS:
        if on_cpu and name == "launch_gap_ms":
            meaning = GAP_OF_A_CPU
        if report.predicted and name == "kernel_gap_ms":
            continue  # in a prediction each kernel takes its roof time: there is no kernel gap
        share = max(0.0, values[name] / wall_ms)
        bar = Text("█" * round(24 * min(1.0, share)), style=colour)
        table.add_row(
            label, _right(time_text(values[name])), _right(f"{100 * share:.0f}%"), bar, Text(meaning, style="dim")
        )
    return table


def _advice(report: ReportContents) -> Table:
    table = Table(box=None, padding=(0, 1), title="\nopportunities, by predicted gain", title_justify="left")
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("what")
    table.add_column("evidence", style="dim")
    for item in report.advice[:5]:
        said = Text(item.evidence)
        if item.command:
            said.append(f"\n{item.command}", style="bold")
        table.add_row(_gain(item), item.title, said)
    return table


def _gain(item: Advice) -> str:
    """The gain, with its interval if the rounded ends of the interval differ."""
    gain, low, high = (time_text(ms) if ms is not None else "" for ms in (item.gain_ms, item.low_ms, item.high_ms))
    return gain if not low or not high or low == high else f"{gain}\n{low} to\n{high}"


def _compilation(compilation: Compilation) -> Text:
    lines = [
        "\ncompiled: "
        f"{counted(compilation.graphs, 'graph')} of {counted(compilation.kernels, 'kernel')} in "
        f"{compilation.seconds:.1f} s, {counted(len(compilation.graph_breaks), 'graph break')}, "
        f"{counted(len(compilation.recompilations), 'recompilation')}"
    ]
    lines += [
        f"  break at {b.line}: {short_reason(b.reason)} ({b.seconds:.1f} s to compile what follows)"
        for b in compilation.graph_breaks
    ]
    lines += [
        f"  {r.function} ({r.line}) compiled again: {short_reason(r.reason)} ({r.seconds:.1f} s)"
        for r in compilation.recompilations
    ]
    return Text("\n".join(lines))


def ranks_table(ranks: Ranks) -> Table:
    """The ranks as a table for the terminal."""
    table = Table(box=None, padding=(0, 1), title="\nranks, a step of each", title_justify="left")
    for name in ("rank", "device"):
        table.add_column(name, no_wrap=True, justify="right" if name == "rank" else "left")
    for name in ("wall", "busy", "communication", "exposed", "waited", "own"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    table.add_column("")
    for row in ranks.rows:
        late = row.rank == ranks.straggler
        times = (row.wall_ms, row.busy_ms, row.communication_ms, row.exposed_ms, row.waited_ms, row.own_ms)
        mark = "the straggler" if late else ""
        table.add_row(str(row.rank), row.device, *map(time_text, times), mark, style="bold" if late else "")
    return table


def _operators(report: ReportContents, rows: int) -> Table:
    what = "operators by predicted time" if report.predicted else "slowest operators"
    title = f"\n{what} ({min(rows, len(report.ops))} of {len(report.ops)})"
    table = Table(box=None, padding=(0, 1), title=title, title_justify="left")
    for name in ("operator", "shapes"):  # a narrow terminal folds these columns, so that no number is lost
        table.add_column(name, overflow="fold")
    columns = [("calls", 5), ("measured", 8), ("share", 5), ("roof", 8), ("of roof", 7), ("bound", 7)]
    for name, width in columns:
        if not (report.predicted and name in ("measured", "of roof")):
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
    total_ms = sum(row.measured_ms for row in report.ops) or 1.0
    for row in report.ops[:rows]:
        measured, percent = ([], []) if report.predicted else ([time_text(row.measured_ms)], [_percent(row)])
        table.add_row(
            _operator(row, 28),
            shortened(shapes_text(row.shapes), 26),
            str(row.calls),
            *measured,
            f"{100 * row.measured_ms / total_ms:.1f}%",
            time_text(row.roof_ms),
            *percent,
            row.bound,
        )
    return table


def _operator(row: OperatorRow, width: int) -> str:
    """The operator and its phase. Long names of fused kernels are cut in the middle, because they differ at their
    ends."""
    name = row.name.removeprefix("aten::").removeprefix("inductor::")
    phase = {"backward": " (bwd)", "optimizer": " (opt)"}.get(row.phase, "")
    return shortened(name, width - len(phase), tail=(width - len(phase)) // 2) + phase


def _percent(row: OperatorRow) -> str:
    if row.percent_of_roof is None:
        return "-"
    return percent_text(row.percent_of_roof) + (" (!)" if row.flagged else "")


def _right(text: str) -> Text:
    return Text(text, justify="right")
