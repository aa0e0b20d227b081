"""`rooftop compare`: differences between two reports."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from rooftop.analysis import Report
from rooftop.analysis.comparison import Change, Comparison, compare_reports
from rooftop.analysis.formats import quantity_text, time_text
from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.errors import InputError

TITLES = {
    "wall_ms": "wall",
    "busy_ms": "busy",
    "op_roof_ms": "roof, operator by operator",
    "fused_roof_ms": "roof, fused",
    "percent_of_roof": "percent of roof",
    "kernel_gap_ms": "kernel gap",
    "fusion_headroom_ms": "fusion headroom",
    "launch_gap_ms": "launch gap",
    "flops": "flops",
    "bytes": "bytes",
    "kernels": "kernels",
    "peak_bytes": "peak memory, bytes",
    "coverage": "coverage",
}


def run(
    before_path: Path, after_path: Path, rows: int, fail_above: float | None = None, json_path: Path | None = None
) -> None:
    """Run the command that `rooftop.cli.commands.compare:command` describes.

    Raises:
        click.ClickException: the step takes longer than before, by more than the fraction `fail_above` (0.05: 5%), and
            by more than the noise.
    """
    comparison = compare_reports(_report(before_path), _report(after_path))
    if not write_json(json_path, comparison.to_dict()):
        _show(comparison, rows)
    if fail_above is not None and comparison.significant and comparison.slowdown > fail_above:
        raise click.ClickException(
            f"the step takes {comparison.slowdown:.1%} longer than before: more than --fail-above {100 * fail_above:g}%"
        )


def _show(comparison: Comparison, rows: int) -> None:
    console = output_console()
    console.print(_verdict(comparison))
    for difference in comparison.differences:
        console.print(f"  {difference}", style="dim", markup=False)
    console.print(_table("\nthe step", comparison.figures))
    console.print(_table("\noperators, largest change first", _changed(comparison.operators)[:rows]))
    console.print(_table("\nmodules, largest change first", _changed(comparison.modules)[:rows]))


def _report(path: Path) -> Report:
    try:
        return Report.from_json(path)
    except ValueError as error:
        raise InputError(str(error)) from error


def _verdict(comparison: Comparison) -> str:
    if not comparison.significant:
        return f"[bold]no change[/bold]: the wall times differ by less than the noise of {100 * comparison.noise:.1f}%"
    factor = comparison.speedup if comparison.speedup > 1 else 1 / comparison.speedup
    return f"[bold]{factor:.2f}x as {'fast' if comparison.speedup > 1 else 'slow'}[/bold]"


def _changed(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.difference or change.calls_before != change.calls_after)


def _table(title: str, changes: tuple[Change, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    calls = any(change.calls_before or change.calls_after for change in changes)
    for name in ("before", "after", "change", *(("calls",) if calls else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for change in changes:
        cells = [_value(change.name, value) for value in (change.before, change.after)]
        count = f"{change.calls_before}" + (
            f" -> {change.calls_after}" if change.calls_after != change.calls_before else ""
        )
        label = TITLES.get(change.name, change.name).replace("[", r"\[")
        table.add_row(label, *cells, _difference(change), *((count,) if calls else ()))
    return table


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "percent_of_roof":
        return f"{value:.1f}%"
    if name == "coverage":
        return f"{100 * value:.1f}%"
    if name in TITLES and not name.endswith("_ms"):
        return quantity_text(value).strip()
    return time_text(value)


def _difference(change: Change) -> str:
    if change.name in ("percent_of_roof", "coverage"):
        return f"{(1 if change.name == 'percent_of_roof' else 100) * change.difference:+.1f} points"
    if change.before is None:
        return "new"
    if change.after is None:
        return "gone"
    return f"{100 * change.difference / change.before:+.1f}%" if change.before else "-"
