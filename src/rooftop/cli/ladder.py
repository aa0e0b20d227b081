"""`rooftop ladder`: measure the rungs (versions) of one piece of work against the roof."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.markup import escape

from rooftop.cli.commands import names
from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import check_outputs, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.words import Words
from rooftop.errors import MeasurementError
from rooftop.hardware import measure_ceilings
from rooftop.ladder import Climb, build, climb
from rooftop.ladder.chart import page, require_plotly
from rooftop.ladder.rungs import checked_size
from rooftop.ladder.table import WITHOUT_GPU, heading, table
from rooftop.launch.triton_launch import INTERPRETED
from rooftop.whole_files import write_whole

if TYPE_CHECKING:
    from rooftop.ladder.python_climbing import SpeedClimb

NEEDED = ("fp32", "fp16")
"""Precisions whose ceilings the ladders compare with on a GPU."""


def run(
    context: click.Context, name: str, size: int | None, device: str | None, out: Path | None, chart: Path | None
) -> int:
    """Run the command that `rooftop.cli.commands.ladder:command` describes."""
    where = pick_device(device)
    check_outputs({"HTML": [chart], "JSON": [out]})
    if name in names.OTHER_LADDERS:
        if chart is not None:
            require_plotly()
        return _measured_here(name, size, where, out, chart)
    with _wrong_size():
        checked_size(name, size, where)
    if chart is not None:
        if where.type != "cuda":
            raise MeasurementError("a chart shows speeds, which need an NVIDIA GPU: leave --chart out")
        require_plotly()
    if where.type == "cpu" and not INTERPRETED and find_spec("triton") is not None:
        return _interpreted(context.obj)
    found = _climbed(name, size, where)
    console = output_console(highlight=False)
    console.print(heading(found))
    console.print(table(found))
    for remark in (*found.remarks, *([WITHOUT_GPU] if where.type == "cpu" else [])):
        console.print(f"\n{escape(remark)}")
    _write(found.to_dict(), out, chart, lambda: page([found]))
    _check_rungs(found)
    return 0


def _check_rungs(found: Climb | SpeedClimb) -> None:
    """Raise MeasurementError if a rung failed. The message names every failed rung."""
    if found.failures:
        raise MeasurementError(
            "; ".join(f"{rung.name} in {rung.tool} {rung.status}: {rung.note}" for rung in found.failures)
        )


def _write(figures: dict[str, Any], out: Path | None, chart: Path | None, drawn: Callable[[], str]) -> None:
    write_json(out, figures)
    if chart is not None:
        write_whole(chart, drawn())
    for what, path in (("figures", out), ("chart", chart)):
        if path is not None:
            click.echo(f"{what}: {path}")


def _measured_here(name: str, size: int | None, where: torch.device, out: Path | None, chart: Path | None) -> int:
    """Run a ladder that can also be measured on a CPU."""
    if name == "memory":
        return _memory(size, where, out, chart)
    from rooftop.ladder import python_shown as shown
    from rooftop.ladder.python_climbing import climb_python
    from rooftop.ladder.python_ladder import checked_count, python_ladder

    with _wrong_size():
        checked_count(size)
    with progress_bar() as progress, python_ladder(size, where) as ladder:
        found = climb_python(ladder, where, progress=progress)
    console = output_console(highlight=False)
    console.print(shown.heading(found))
    console.print(shown.table(found))
    console.print()
    console.print(shown.stops(found))
    for remark in (*found.remarks, *filter(None, [shown.disturbed(found)])):
        console.print(f"\n{escape(remark)}")
    _write(found.to_dict(), out, chart, lambda: shown.page(found))
    _check_rungs(found)
    return 0


def _memory(size: int | None, where: torch.device, out: Path | None, chart: Path | None) -> int:
    if size is not None:
        raise click.BadParameter("the memory ladder takes no --size: the caches set its sizes", param_hint="--size")
    from rooftop.ladder import memory_shown as shown
    from rooftop.ladder.memory_climbing import climb_memory

    with progress_bar() as progress:
        try:
            found = climb_memory(where, progress=progress)
        except torch.cuda.OutOfMemoryError as error:
            raise MeasurementError(f"the memory ladder does not fit into the free memory of {where}") from error
    console = output_console(highlight=False)
    console.print(shown.heading(found))
    console.print(shown.table(found))
    console.print()
    console.print(shown.flight_table(found))
    for remark in shown.said(found):
        console.print(f"\n{escape(remark)}")
    _write(found.to_dict(), out, chart, lambda: shown.page(found))
    return 0


def _climbed(name: str, size: int | None, where: torch.device) -> Climb:
    with progress_bar() as progress:
        ceilings = None
        if where.type == "cuda":
            ceilings = measure_ceilings(where, progress=progress, precisions=NEEDED, transfers=False, links=False)
        try:
            ladder = build(name, size, where)
        except torch.cuda.OutOfMemoryError as error:
            raise MeasurementError(f"the {name} ladder does not fit into the free memory of {where}") from error
        return climb(ladder, ceilings, progress=progress)


def _interpreted(words: Words) -> int:
    """Run this `rooftop` command again with Triton's interpreter, and return its exit status. A new program is needed
    because Triton chooses the interpreter at import. On the command line it replaces this process, so a signal that
    ends the command ends all of it.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    sys.stdout.flush()
    if words.ends_process:
        os.execve(sys.executable, sys.orig_argv, environment)
    done = subprocess.run([sys.executable, "-m", "rooftop", *words], env=environment, check=False)
    return done.returncode


@contextmanager
def _wrong_size() -> Iterator[None]:
    """Turn a ValueError into an error of the option --size."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--size") from error
