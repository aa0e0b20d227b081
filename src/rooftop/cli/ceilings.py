"""`rooftop ceilings`: measure the limits of this machine."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import check_writable, write_json
from rooftop.cli.progress import progress_bar
from rooftop.hardware import Ceilings, measure_ceilings
from rooftop.hardware.conditions import busy
from rooftop.hardware.figures import in_words
from rooftop.hardware.histories import History
from rooftop.hardware.measuring import ceilings_history, forget_ceilings

MOST_LOWER = 8
"""Maximum number of lines about ceilings that a refresh measured lower."""


def run(refresh: bool, forget: bool, device: str | None, json_path: Path | None, output: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.ceilings:command` describes."""
    if output is not None:
        check_writable(output, kind="JSON")
    where = pick_device(device)
    if forget:
        forget_ceilings(where)
    with progress_bar() as progress:
        ceilings = measure_ceilings(where, refresh=refresh, progress=progress)
    if output is not None:
        ceilings.save(output)
    if write_json(json_path, ceilings.to_dict()):
        return
    console = output_console()
    console.print(f"[bold]{ceilings.device}[/bold]  measured {ceilings.measured_at}, threads {ceilings.threads}")
    console.print(_memory(ceilings))
    console.print(_rates(ceilings))
    for line in _remarks(ceilings, ceilings_history(where) if refresh else None):
        console.print(line, highlight=False)


def _remarks(ceilings: Ceilings, refreshed: History | None) -> list[str]:
    """List the ceilings that a later run exceeded and so raised, the ceilings that a refresh measured lower, and
    disturbances of the measurement.
    """
    lines = [
        f"{in_words(each.figure)} raised by {each.by} on {each.at}: {_figure(each.figure, each.before)} -> "
        f"{_figure(each.figure, each.after)}"
        for each in ceilings.raises
    ]
    lower = refreshed.lower() if refreshed is not None else []
    if lower:
        lines.append(
            "[yellow]lower this time[/yellow], so the earlier value stays (to use only this measurement: rooftop "
            "ceilings --forget):"
        )
    lines += [
        f"  {in_words(each.figure)}: {_figure(each.figure, each.new)}, was {_figure(each.figure, each.kept)} on "
        f"{each.kept_at}"
        for each in lower[:MOST_LOWER]
    ]
    if len(lower) > MOST_LOWER:
        lines.append(f"  and {len(lower) - MOST_LOWER} more")
    if busy(ceilings.conditions, ceilings.kind):
        lines.append(f"[yellow]other processes used the machine[/yellow] during the measurement: {_others(ceilings)}.")
    if ceilings.disturbed:
        lines.append(
            f"[yellow]disturbed[/yellow]: {', '.join(ceilings.disturbed)} may be too low: the best value was not "
            "reproduced within 10%, or other processes used the machine. Measure again with --refresh when the "
            "machine is quiet."
        )
    return lines


def _others(ceilings: Ceilings) -> str:
    if ceilings.kind == "cpu":
        return f"{ceilings.conditions['others_cores']:.1f} of {ceilings.conditions['cores']:.0f} cores"
    return f"{ceilings.conditions['others_on_gpu_percent']:.0f}% of the GPU"


def _memory(ceilings: Ceilings) -> Table:
    table = Table(title="\nbandwidth, GB/s, by working set", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("working set", "read", "write", "copy", "triad", "cast", "in place", "bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    best = max(point.best for point in ceilings.memory)
    for point in ceilings.memory:
        size = point.working_set_bytes / (1 << 20)
        in_place = max(point.update, point.raised_in_place)
        rates = (point.read, point.write, point.copy, point.triad, point.cast, in_place)
        bound = ceilings.rate(point.working_set_bytes)
        bar = "█" * round(20 * point.best / best)
        table.add_row(f"{size:.4g} MiB", *(_gigabytes(rate) if rate else "-" for rate in (*rates, bound)), bar)
    return table


def _rates(ceilings: Ceilings) -> Table:
    table = Table(title="\nrates and launches", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for level in ceilings.levels:
        table.add_row(f"{level.name} bandwidth", f"{_gigabytes(level.rate)} GB/s")
    for precision, rate in ceilings.flops.items():
        sustained = ceilings.sustained.get(precision)
        beside = f", sustained {sustained / 1e12:,.3g}" if sustained is not None else ""
        table.add_row(f"matrix {precision}", f"{rate / 1e12:,.3g} TFLOP/s{beside}")
    for name, rate in {**ceilings.transfers, **ceilings.links}.items():
        table.add_row(name.replace("_", " "), f"{rate / 1e9:,.1f} GB/s")
    table.add_row("kernel floor", f"{1e3 * ceilings.kernel_floor_ms:.2f} us")
    table.add_row("launch, eager", f"{1e3 * ceilings.launch_eager_ms:.2f} us")
    table.add_row("launch, in a graph", f"{1e3 * ceilings.launch_graph_ms:.2f} us")
    return table


def _figure(name: str, value: float) -> str:
    """A measured ceiling, with its unit."""
    if name.endswith("_ms"):
        return f"{1e3 * value:.2f} us"
    if name.startswith(("flops", "sustained")):
        return f"{value / 1e12:,.3g} TFLOP/s"
    return f"{_gigabytes(value)} GB/s"


def _gigabytes(rate: float) -> str:
    """GB/s with three significant digits, or with all digits before the point: "4,380", "12.6", "0.41"."""
    return f"{rate / 1e9:,.0f}" if rate >= 1e11 else f"{rate / 1e9:.3g}"
