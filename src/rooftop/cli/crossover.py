"""`rooftop crossover`: find the size above which the GPU beats the CPU."""

from __future__ import annotations

import math
from pathlib import Path

import click
import torch
from rich.markup import escape
from rich.table import Table

from rooftop.analysis.page import ms
from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import check_outputs, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.targets import DTYPES
from rooftop.errors import MeasurementError
from rooftop.hardware.crossovers import NEEDS_GPU, BreakEven, Crossover, measure_crossover
from rooftop.ladder.chart import framed, require_plotly
from rooftop.whole_files import write_whole

CURVES = (  # attribute of a point, name, color
    ("cpu", "CPU", "#e0a130"),
    ("gpu", "GPU", "#2a9d6f"),
    ("gpu_with_transfers", "GPU with transfers", "#4c9fd6"),
)


def run(operation: str, dtype: str, device: str, json_path: Path | None, output: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.crossover:command` describes."""
    check_outputs({"HTML": [output]}, json_path)
    if output is not None:
        require_plotly("-o")
    where = _pick_gpu(device)
    with progress_bar() as progress:
        crossover = measure_crossover(operation, dtype=DTYPES[dtype], device=where, progress=progress)
    if output is not None:
        write_whole(output, _page(crossover))
    if write_json(json_path, crossover.to_dict()):
        return
    console = output_console(highlight=False)
    console.print(f"[bold]{operation}[/bold] {crossover.dtype}: {escape(_machine(crossover))}")
    console.print(_table(crossover))
    console.print()
    for sentence in _sentences(crossover):
        console.print(sentence)
    if crossover.unsteady:
        sizes = ", ".join(f"{size:,}" for size in crossover.unsteady)
        console.print(f"[yellow]unsteady[/yellow]: times at {sizes} varied by more than 10%.")
    for name, written in (("times", json_path), ("chart", output)):
        if written is not None:
            click.echo(f"{name}: {written}")


def _pick_gpu(text: str) -> torch.device:
    """Return the GPU that --device names.

    Raises:
        click.BadParameter: the name is not a CUDA device.
        MeasurementError: this machine has no GPU.
    """
    if text == "cpu":
        raise click.BadParameter(
            "the GPU is compared with the CPU: expected a GPU, cuda or cuda:N", param_hint="--device"
        )
    if text.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(NEEDS_GPU)
    return pick_device(text)


def _machine(crossover: Crossover) -> str:
    return f"{crossover.host}, {crossover.threads} threads, against {crossover.device}"


def _table(crossover: Crossover) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = (crossover.unit, "CPU", "GPU", "CPU/GPU", "GPU with transfers", "CPU/GPU")
    for name in columns:
        table.add_column(name, justify="right")
    for point in crossover.points:
        cells = [f"{point.size:,}", ms(point.cpu.median_ms)]
        for timing in (point.gpu, point.gpu_with_transfers):
            ratio = point.cpu.median_ms / timing.median_ms
            style = "green" if ratio > 1 else "yellow"
            cells += [ms(timing.median_ms), f"[{style}]{ratio:.3g}x[/{style}]"]
        table.add_row(*cells)
    return table


def _sentences(crossover: Crossover) -> list[str]:
    """Describe the break-even sizes, one sentence each."""
    variants = (("Without transfers", crossover.break_even), ("With transfers", crossover.break_even_with_transfers))
    return [f"{name}: {_sentence(found, crossover)}." for name, found in variants]


def _sentence(found: BreakEven, crossover: Crossover) -> str:
    smallest, largest = (f"{crossover.points[end].size:,}" for end in (0, -1))
    if found.size is not None:
        return f"the GPU is faster from about {_rounded(found.size)} {crossover.unit} on"
    return {
        "always": f"the GPU is always faster, from {smallest} to {largest} {crossover.unit}",
        "never": f"the GPU is never faster, from {smallest} to {largest} {crossover.unit}",
        "mixed": f"no break-even: the GPU is faster at some sizes, but not at the largest ({largest} {crossover.unit})",
    }[found.verdict]


def _rounded(size: float) -> str:
    """Round to two significant digits, the precision of an interpolated size."""
    if size < 10:
        return f"{size:.2g}"
    scale = 10 ** (math.floor(math.log10(size)) - 1)
    return f"{round(size / scale) * scale:,}"


def _page(crossover: Crossover) -> str:
    """One HTML page with the chart, including plotly's script."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    sizes = [point.size for point in crossover.points]
    for attribute, name, color in CURVES:
        times = [getattr(point, attribute).median_ms for point in crossover.points]
        figure.add_scatter(x=sizes, y=times, name=name, mode="lines+markers", line_color=color)
    breaks = (crossover.break_even, crossover.break_even_with_transfers)
    for found, (_, _, color) in zip(breaks, CURVES[1:], strict=True):
        if found.size is not None:
            figure.add_vline(found.size, line_dash="dot", line_color=color)
    figure.update_xaxes(type="log", title=crossover.unit)
    figure.update_yaxes(type="log", title="ms a call")
    figure.update_layout(template="plotly_white", height=560, legend={"orientation": "h", "y": 1.1})
    heading = f"{crossover.operation} {crossover.dtype}"
    chart = figure.to_html(full_html=False, include_plotlyjs=True, div_id="crossover")
    above = [_machine(crossover), *_sentences(crossover)]
    return framed(heading, chart, above, title=f"{heading}: CPU against GPU")
