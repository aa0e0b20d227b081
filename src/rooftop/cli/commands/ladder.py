"""`rooftop ladder`: the same work, rung by rung, from a first kernel to the roof."""

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
@click.option("--size", type=int, metavar="N", help="Of the work.  [default: large on a GPU, small without]")
@click.option("--device", metavar="cpu|cuda[:N]", help="Which device.  [default: the GPU if there is one]")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the figures (JSON).")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE", help="Also draw a chart (HTML).")
@click.pass_context
@done_by("rooftop.cli.ladder:run")
def command() -> None:
    """Climb a ladder: the same work, rung by rung, each rung checked, measured, and set against the roof.

    python and memory are measured on a CPU, too; docs/speed.md explains them. The others are kernels in CUDA C++ and
    Triton, which docs/ladder.md explains. Without a GPU these are not measured: Triton's run through its interpreter on
    small sizes and are checked, those in CUDA C++ are compiled.
    """
