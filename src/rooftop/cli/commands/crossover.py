"""`rooftop crossover`: from which size on the GPU beats the CPU."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop crossover matmul
  rooftop crossover add --dtype bf16 -o add.html
  rooftop crossover layer_norm --json - > layer_norm.json
"""


@click.command(epilog=EXAMPLES)
@click.argument("operation", type=click.Choice(names.OPERATIONS), metavar="|".join(names.OPERATIONS))
@click.option(
    "--dtype",
    type=click.Choice(names.FLOATS),
    default="fp32",
    show_default=True,
    metavar="bf16|fp16|fp32|fp64",
    help="Of operands and result.",
)
@click.option("--device", default="cuda", show_default=True, metavar="cuda[:N]", help="Which GPU.")
@json_option("the times")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also draw a chart (HTML).")
@done_by("rooftop.cli.crossover:run")
def command() -> None:
    """Show from which size on the GPU beats the CPU, with and without the transfers between them.

    "GPU" has its operands on the device already; "GPU with transfers" fetches the inputs from pinned host memory,
    brings the result back and waits for it. Sizes are elements (add), rows and columns of square matrices (matmul),
    or rows of 1024 (linear, layer_norm). Each call allocates its result, as eager code does; above 32 MiB the CPU
    pays for fresh memory each time. Takes about ten seconds.
    """
