"""`rooftop predict-video`: the frames that follow a clip, beside the real ones."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.trained_model_options import device_option, dtype_option, seed_option
from rooftop.cli.commands.video_options import SizeType
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop predict-video walk.mp4 --weights next_frame.keras
  rooftop predict-video walk.mp4 --weights mine.pth --after 2.5 --frames 20 -o walk20.mp4
  rooftop predict-video walk.mp4 --random-weights 0 --colour --size 32x32 --json -
"""

USUAL_CONTEXT = 10  # frames, as of the videos of Keras's example, of which it shows the first ten

USUAL_SIDE = 64  # pixels of the shorter side: the size on which Keras's example is trained

VIDEOS = (".mp4", ".mkv", ".mov")  # what H.264 goes into


@click.command(epilog=EXAMPLES)
@click.argument("clip", type=click.Path(path_type=Path))
@click.option("--weights", type=click.Path(path_type=Path), metavar="FILE", help="Of Keras, torch.save or safetensors.")
@seed_option
@click.option("--frames", type=click.IntRange(min=1), default=10, show_default=True, help="How many to predict.")
@click.option(
    "--after",
    type=float,
    metavar="SECONDS",
    help="Predict from here on.  [default: before the last --frames frames of the clip]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Frames before that the network is shown.  [default: {USUAL_CONTEXT}, or all that there are]",
)
@click.option(
    "--size",
    type=SizeType(),
    metavar="WxH",
    help=f"Resize frames to this.  [default: the shorter side to {USUAL_SIDE}, if it is longer]",
)
@click.option("--colour/--grey", default=None, help="Of the untrained network (grey if not given); weights tell it.")
@device_option
@dtype_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"The video: {', '.join(VIDEOS)}.  [default: CLIP-predicted.mp4, here]",
)
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE", help="A .png.  [default: named as the video]"
)
@json_option("the figures")
@done_by("rooftop.cli.predict_video:run")
def command() -> None:
    """Predict how a clip goes on, by a ConvLSTM network, each frame from all before it.

    Writes a video, the real frames on the left and the predicted ones on the right, and a picture, the real ones above;
    where the clip has ended, the real ones are black. Says how far the prediction is from the real frames, beside the
    last frame before them repeated. Files that are there are replaced.
    """
