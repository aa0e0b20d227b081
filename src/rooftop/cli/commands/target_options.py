"""Options of the verbs that run a target: `rooftop analyze` and `rooftop optimize`."""

from __future__ import annotations

import click

from rooftop.cli.commands import names

input_option = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE[:DTYPE[:HIGH]]|PHOTOS",
    help="An input of the model: photographs, or a shape, filled with random data (integers below HIGH, which is 2 by "
    "default). Repeat the option for several inputs.",
)
device_option = click.option(
    "--device", default=None, metavar="cpu|cuda[:N]", help="Device to run on.  [default: the GPU if there is one]"
)
dtype_option = click.option(
    "--dtype", type=click.Choice(names.FLOATS), metavar="bf16|fp16|fp32|fp64", help="Cast the model to this dtype."
)
