"""`rooftop ceilings`: what this machine can do, measured."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rooftop.cli.analyze import check_writable, pick_device
from rooftop.cli.progress import progress_bar
from rooftop.hardware import Ceilings, measure_ceilings

EXAMPLES = """\b
Examples:
  rooftop ceilings                    measured once, then from the cache
  rooftop ceilings --refresh          measure again
  rooftop ceilings -o h200.json       keep them, to compare with on another machine
"""


@click.command(epilog=EXAMPLES)
@click.option("--refresh", is_flag=True, help="Measure again, even if this machine was measured before.")
@click.option("--device", metavar="cpu|cuda[:N]", help="Which device.  [default: the GPU if there is one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the ceilings to this file (JSON).")
def command(refresh: bool, device: str | None, as_json: bool, output: Path | None) -> None:
    """Measure what this machine can do: bandwidth over the working set, matrix rates, launches, transfers.

    Every figure is an upper bound, measured here: the fastest of several patterns and shapes. They are what
    `rooftop analyze` compares with. Takes under 30 s, and leaves clocks and settings alone.
    """
    if output is not None:
        check_writable(output)
    with progress_bar() as progress:
        ceilings = measure_ceilings(pick_device(device), refresh=refresh, progress=progress)
    if output is not None:
        ceilings.save(output)
    if as_json:
        click.echo(json.dumps(ceilings.to_dict(), indent=1))
        return
    console = Console()
    console.print(f"[bold]{ceilings.device}[/bold]  measured {ceilings.measured_at}, threads {ceilings.threads}")
    console.print(_memory(ceilings))
    console.print(_rates(ceilings))
    if ceilings.disturbed:
        console.print(
            f"[yellow]disturbed[/yellow]: {', '.join(ceilings.disturbed)} varied by more than 10%; "
            "something else was using the machine. Measure again with --refresh."
        )


def _memory(ceilings: Ceilings) -> Table:
    table = Table(title="\nbandwidth, GB/s, by working set", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("working set", "read", "write", "copy", "triad"):
        table.add_column(name, justify="right")
    table.add_column("")
    best = max(point.best for point in ceilings.memory)
    for point in ceilings.memory:
        size = point.working_set_bytes / (1 << 20)
        rates = (point.read, point.write, point.copy, point.triad)
        bar = "█" * round(30 * point.best / best)
        table.add_row(f"{size:g} MiB", *(_gigabytes(rate) for rate in rates), bar)
    return table


def _rates(ceilings: Ceilings) -> Table:
    table = Table(title="\nrates and launches", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for level in ceilings.levels:
        table.add_row(f"{level.name} bandwidth", f"{_gigabytes(level.rate)} GB/s")
    for precision, rate in ceilings.flops.items():
        table.add_row(f"matrix {precision}", f"{rate / 1e12:,.3g} TFLOP/s")
    for name, rate in {**ceilings.transfers, **ceilings.links}.items():
        table.add_row(name.replace("_", " "), f"{rate / 1e9:,.1f} GB/s")
    table.add_row("kernel floor", f"{1e3 * ceilings.kernel_floor_ms:.2f} us")
    table.add_row("launch, eager", f"{1e3 * ceilings.launch_eager_ms:.2f} us")
    table.add_row("launch, in a graph", f"{1e3 * ceilings.launch_graph_ms:.2f} us")
    return table


def _gigabytes(rate: float) -> str:
    """GB/s with three digits or all of its integer ones: "4,380", "12.6", "0.41"."""
    return f"{rate / 1e9:,.0f}" if rate >= 1e11 else f"{rate / 1e9:.3g}"
