"""`rooftop crossover`: arguments, options and help."""

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
    help="Dtype of operands and result.",
)
@click.option("--device", default="cuda", show_default=True, metavar="cuda[:N]", help="GPU to measure.")
@json_option("the times")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write a chart to FILE (HTML)."
)
@done_by("rooftop.cli.crossover:run")
def command() -> None:
    """Find the size above which the GPU beats the CPU, with and without transfers between CPU and GPU.

    "GPU" starts with its operands on the device. "GPU with transfers" copies the inputs from pinned host memory, copies
    the result back and waits for it. The size counts elements (add), rows and columns of square matrices (matmul), or
    rows of 1024 (linear, layer_norm). Each call allocates its result, as in eager mode. On the CPU, a result above
    32 MiB gets fresh memory from the system each time. The command takes about ten seconds.
    """
