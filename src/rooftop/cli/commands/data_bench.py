"""`rooftop data bench`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop data bench photographs/train                       the loader alone
  rooftop data bench photographs/train --model resnet50      beside the model's training step
  rooftop data bench 'shards/train-{000..146}.tar' --set augment.rand_augment=2 --set run.batch=256

\b
How to read the table:
  Each row shows the samples per second of one stage alone. The inputs of all stages but disk
  are already in memory.
  loader  all stages of a sample together, as in training. Its rate must be above the rate of model.
  The last line below the table, "... bounds", names the stage to improve first.

\b
What to do if a stage is the slowest:
  disk     put the data on a local disk, or into tar shards, which replace thousands of small files. A second
           run reads from memory, so it does not measure the disk.
  decode   add CPUs, or store smaller photographs: with a shorter side of 1.15 times --size, little quality is lost.
  augment  fewer operations of RandAugment; smaller images.
  collate  smaller batches for each rank; smaller images.
  copy     its rate should be far above that of model. If not, see `rooftop ceilings`.
  model    the data are loaded fast enough: speed up the model. See `rooftop analyze`.
"""


@click.command("bench", epilog=EXAMPLES)
@click.argument("data", type=click.Path())
@click.option(
    "--model",
    "model_name",
    metavar="TARGET",
    help="Also time the training step of this image classifier: a built-in model (resnet50) or "
    "package.module:callable, as for `rooftop analyze`.",
)
@click.option(
    "--size", type=click.IntRange(min=1), default=224, show_default=True, help="Side of the images, in pixels."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Recipe of `rooftop train` to read the data with.",
)
@click.option(
    "--set",
    "values",
    multiple=True,
    metavar="SECTION.NAME=VALUE",
    help="Change one value of the recipe. run.*, augment.* and loading.* affect the measurement.",
)
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N.  [default: the GPU if there is one]")
@click.option(
    "--seconds",
    type=NumberRange(min=0.05, max=600),
    default=1.0,
    show_default=True,
    help="Duration of the measurement of each stage.",
)
@json_option("the rates")
@done_by("rooftop.cli.data_bench:run_bench")
def bench_command() -> None:
    """Measure each stage between disk and model, and find the slowest one.

    DATA is a folder with one subfolder of photographs per class, or tar files in webdataset's layout.
    """
