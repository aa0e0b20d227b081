"""`rooftop classify`: arguments, options and help."""

from __future__ import annotations

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
  rooftop classify cat.jpg
  rooftop classify holiday/ --top 1
  rooftop classify holiday/ --model resnet18 --weights my_resnet18.pth --json classes.json
  rooftop classify holiday/ --batch-size 64 --json -
  rooftop classify cat.jpg --random-weights 0
  rooftop classify walk.mp4 --every 0.5
  rooftop classify cat.jpg --weights trained/best.safetensors

Weights are downloaded once, to torchvision's folder. To use a mirror, set ROOFTOP_WEIGHTS_URL.
"""


@click.command(epilog=EXAMPLES)
@photographs_argument
@click.option(
    "--model",
    type=click.Choice(names.CLASSIFIERS),
    metavar="NAME",
    help=f"One of {', '.join(names.CLASSIFIERS)}.  [default: the model that --weights were trained for, or resnet50]",
)
@click.option(
    "--weights",
    metavar="NAME|FILE",
    help="Name of published weights, such as IMAGENET1K_V1, or your own .pth or .safetensors file. The name DEFAULT "
    "means the newest published weights.  [default: DEFAULT]",
)
@seed_option
@click.option(
    "--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of classes shown per photograph."
)
@click.option(
    "--every",
    type=NumberRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between the classified frames of a video.",
)
@device_option
@dtype_option
@batch_size_option(16)
@skip_option
@json_option("the classes")
@done_by("rooftop.cli.classify:run")
def command() -> None:
    """Classify photographs and videos with an image model: show the most probable classes of each.

    PATH is a photograph, a folder of photographs, or a video. One frame of a video per second is classified (--every).
    A file of `rooftop train` contains the names of its classes. Other weights with 1000 classes get ImageNet's names.
    For all other weights, class numbers are shown.
    """
