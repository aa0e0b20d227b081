"""`rooftop detect`: where things are on photographs."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
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
@click.option("--model", type=click.Choice(names.DETECTORS), default="detr_resnet50", show_default=True)
@click.option(
    "--weights",
    metavar="FILE",
    help="Of facebookresearch/detr, Hugging Face or MMDetection: .pth or .safetensors.",
)
@seed_option
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Show objects with at least this score.",
)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("detected"),
    show_default=True,
    metavar="FOLDER",
    help="Where photographs with their boxes are written, as PNG.",
)
@click.option("--size", type=click.IntRange(min=32), default=800, show_default=True, help="Pixels of the shorter side.")
@device_option
@dtype_option
@batch_size_option(4)
@skip_option
@json_option("the objects")
@done_by("rooftop.cli.detect:run")
def command() -> None:
    """Show where things are on photographs: the objects that a DETR finds, as a table and drawn.

    PATH is a photograph or a folder of photographs. The names are COCO's where the weights have its classes.
    """
