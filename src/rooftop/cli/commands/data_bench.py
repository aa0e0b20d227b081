"""`rooftop data bench`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop data bench photographs/train                       the loader alone
  rooftop data bench photographs/train --model resnet50      beside the model's training step
  rooftop data bench 'shards/train-{000..146}.tar' --set augment.rand_augment=2 --set run.batch=256

\b
How to read the table:
  Each row is one stage alone, with its input in memory: samples per second if nothing else had to be done.
  loader  all stages of a sample together, as in training. It must be above model.
  bounds  the stage to improve first.

\b
What helps where:
  disk     put the data on a local disk, or into tar shards: one file is read in place of thousands. A second run reads
           from memory: its figure is not that of the disk.
  decode   store smaller photographs: a side of 1.15 times --size loses little; or add CPUs.
  augment  fewer operations of RandAugment; smaller images.
  collate  smaller batches for each rank; smaller images.
  copy     should be far above model. If not, see `rooftop ceilings`.
  model    the data keep up. See `rooftop analyze` for the model.
"""


@click.command("bench", epilog=EXAMPLES)
@click.argument("data", type=click.Path())
@click.option("--model", "model_name", metavar="TARGET", help="Also time the training step of a model that classifies.")
@click.option("--size", type=click.IntRange(min=1), default=224, show_default=True, help="Side of the images.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A recipe, as of rooftop train."
)
@click.option(
    "--set",
    "values",
    multiple=True,
    metavar="SECTION.NAME=VALUE",
    help="A value of the recipe: run.batch, run.precision, augment.*, loading.*.",
)
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N. Default: the GPU if there is one.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.05, max=600),
    default=1.0,
    show_default=True,
    help="Time for each stage.",
)
@json_option("the rates")
@done_by("rooftop.cli.data_bench:run_bench")
def bench_command() -> None:
    """Measure each stage between disk and model, and find the one that bounds training.

    DATA is a folder with a folder of photographs for each class, or tar files in webdataset's layout.
    """
