"""`rooftop ladder`: the same work, rung by rung, from a first kernel to the roof."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by

EXAMPLES = """\b
Examples:
  rooftop ladder vector
  rooftop ladder reduction --size 268435456
  rooftop ladder matmul --out matmul.json --chart matmul.html

\b
Ladders:
""" + "\n".join(f"  {name:10} {summary}; --size: {what}" for name, (summary, what) in names.LADDERS.items())


@click.command(epilog=EXAMPLES)
@click.argument("name", type=click.Choice(list(names.LADDERS)), metavar="|".join(names.LADDERS))
@click.option("--size", type=int, metavar="N", help="Of the work.  [default: large on a GPU, small without]")
@click.option("--device", metavar="cpu|cuda[:N]", help="Which device.  [default: the GPU if there is one]")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the figures (JSON).")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE", help="Also draw a chart (HTML).")
@click.pass_context
@done_by("rooftop.cli.ladder:run")
def command() -> None:
    """Climb a ladder: the same work in CUDA C++ and Triton, each rung checked, measured, and set against the roof.

    Without a GPU nothing is measured: Triton's kernels run through its interpreter on small sizes and are checked,
    those in CUDA C++ are compiled. docs/ladder.md explains each rung.
    """
