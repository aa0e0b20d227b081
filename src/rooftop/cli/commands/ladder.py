"""`rooftop ladder`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by

ALL = names.LADDERS | names.OTHER_LADDERS

EXAMPLES = """\b
Examples:
  rooftop ladder vector
  rooftop ladder reduction --size 268435456
  rooftop ladder matmul --out matmul.json --chart matmul.html
  rooftop ladder python --chart python.html
  rooftop ladder memory --chart memory.html

\b
Ladders:
""" + "\n".join(f"  {name:10} {summary}{f'; --size: {what}' if what else ''}" for name, (summary, what) in ALL.items())


@click.command(epilog=EXAMPLES)
@click.argument("name", type=click.Choice(list(ALL)), metavar="|".join(ALL))
@click.option("--size", type=int, metavar="N", help="Size of the work.  [default: large on a GPU, small on a CPU]")
@click.option("--device", metavar="cpu|cuda[:N]", help="Device to measure.  [default: the GPU if there is one]")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write all times to FILE (JSON).")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE", help="Also write a chart to FILE (HTML).")
@click.pass_context
@done_by("rooftop.cli.ladder:run")
def command() -> None:
    """Measure a series of ever faster versions (rungs) of one piece of work. Each rung is checked, timed and compared
    with the roof.

    The ladders python and memory also run on a CPU (docs/speed.md). The other ladders are kernels in CUDA C++ and
    Triton (docs/ladder.md). Without a GPU, the kernels are not timed: Triton kernels run small sizes in Triton's
    interpreter and are checked; CUDA C++ kernels are only compiled.
    """
