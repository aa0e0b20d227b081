"""`rooftop classify`: what is on photographs and in videos."""

from __future__ import annotations

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
  rooftop classify cat.jpg
  rooftop classify holiday/ --top 1
  rooftop classify holiday/ --model resnet18 --weights my_resnet18.pth --json classes.json
  rooftop classify holiday/ --batch-size 64 --json -
  rooftop classify cat.jpg --random-weights 0
  rooftop classify walk.mp4 --every 0.5

Weights are downloaded once, to where torchvision keeps its own; ROOFTOP_WEIGHTS_URL names a mirror.
"""


@click.command(epilog=EXAMPLES)
@photographs_argument
@click.option(
    "--model",
    type=click.Choice(names.CLASSIFIERS),
    default="resnet50",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(names.CLASSIFIERS)}.",
)
@click.option(
    "--weights",
    metavar="NAME|FILE",
    help="Published weights (DEFAULT is the newest, or IMAGENET1K_V1, ...), or your own .pth or .safetensors file.  "
    "[default: DEFAULT]",
)
@seed_option
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Classes for each photograph.")
@click.option(
    "--every",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one frame of a video to the next.",
)
@device_option
@dtype_option
@batch_size_option(16)
@skip_option
@json_option("the classes")
@done_by("rooftop.cli.classify:run")
def command() -> None:
    """Show what is on photographs and in videos: the most probable classes of each, by an image model.

    PATH is a photograph, a folder of photographs, or a video, of which there is a frame every second (--every). The
    classes are the 1000 of ImageNet, or those of your own weights, which are shown by number.
    """
