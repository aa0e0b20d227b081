"""`rooftop optimize`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.commands.target_options import device_option, dtype_option, input_option
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop optimize resnet50
  rooftop optimize resnet50 --dtype bf16 --input 128x3x224x224 --save plan.json -o page.html
  rooftop optimize resnet50 --plan plan.json
  rooftop optimize my_pkg.net:build --train --budget 120
  rooftop optimize my_pkg.text:build --input 8x128:int64:50257 --shape 1x128 --exact
"""


@click.command(epilog=EXAMPLES)
@click.argument("target")
@input_option
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="SHAPE",
    help="Another shape that the first input may have. Repeat the option for several shapes.",
)
@click.option("--train", is_flag=True, help="Optimize a training step: forward and backward.")
@device_option
@dtype_option
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="NAME",
    help="Try only this rule. Repeat the option for several rules.  [default: all but bf16-autocast and tf32, which "
    "lower the precision]",
)
@click.option("--exact", is_flag=True, help="Keep only changes with bit-identical results.")
@click.option(
    "--min-gain",
    type=NumberRange(0, 1, max_open=True),
    default=0.02,
    show_default=True,
    help="Minimum gain of a change, as a fraction of the step. Half of this gain is enough if a gain was predicted.",
)
@click.option(
    "--budget",
    type=NumberRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the search.",
)
@click.option(
    "--plan",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Apply the plan that --save wrote to this file, instead of searching for changes.",
)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this file.")
@json_option("the results")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write an HTML page with the times before and after, and all changes: kept, or why not.",
)
@done_by("rooftop.cli.optimize:run")
def command() -> None:
    """Make TARGET faster: try changes one by one, check and time each change, and keep those that gain time.

    TARGET is a built-in model (resnet50) or package.module:callable, as for `rooftop analyze`.

    A change is kept if the whole model gains more than the noise, and its results are as accurate as the original's,
    both compared with the model in float64. The inputs are the given inputs, similar inputs, and NaN, -0.0, constant
    and large values. Rejected changes are listed with the reason.

    In your own program, rooftop.optimize(model, x).module is the faster module.
    """
