"""`rooftop detect`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.commands.trained_model_options import (
    batch_size_option,
    device_option,
    dtype_option,
    photographs_argument,
    seed_option,
    skip_option,
)
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop detect street.jpg --weights detr-r50-e632da11.pth
  rooftop detect holiday/ --weights model.safetensors --threshold 0.5 -o found/
  rooftop detect street.jpg --random-weights 0 --threshold 0 --size 320
"""


@click.command(epilog=EXAMPLES)
@photographs_argument
@click.option(
    "--model",
    type=click.Choice(names.DETECTORS),
    help="Name of the detector.  [default: the detector that --weights were trained for, or detr_resnet50]",
)
@click.option(
    "--weights",
    metavar="FILE",
    help="A .pth or .safetensors file from rooftop train, facebookresearch/detr, Hugging Face or MMDetection.",
)
@seed_option
@click.option(
    "--threshold",
    type=NumberRange(0, 1),
    default=0.7,
    show_default=True,
    help="Show only objects with at least this score.",
)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("detected"),
    show_default=True,
    metavar="FOLDER",
    help="Folder for the photographs with boxes drawn, as PNG.",
)
@click.option(
    "--size",
    type=click.IntRange(min=32),
    help="Resize the shorter side to this many pixels.  [default: the size that --weights were trained for, or 800]",
)
@device_option
@dtype_option
@batch_size_option(4)
@skip_option
@json_option("the detected objects")
@done_by("rooftop.cli.detect:run")
def command() -> None:
    """Detect objects on photographs with a DETR: print a table, and draw their boxes.

    PATH is a photograph or a folder of photographs. Weights of `rooftop train` contain the names of their classes.
    Other weights with 91 or 80 classes get COCO's names. For all other weights, class numbers are shown.
    """
