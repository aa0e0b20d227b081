"""`rooftop predict-video`: arguments, options and help."""

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

USUAL_CONTEXT = 10  # default number of context frames, as in Keras's example

USUAL_SIDE = 64  # default maximum of the shorter side in pixels, the size at which Keras's example trains

VIDEOS = (".mp4", ".mkv", ".mov")  # containers that support H.264


@click.command(epilog=EXAMPLES)
@click.argument("clip", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Weights of a ConvLSTM: a file of Keras, torch.save or safetensors.",
)
@seed_option
@click.option(
    "--frames", type=click.IntRange(min=1), default=10, show_default=True, help="Number of frames to predict."
)
@click.option(
    "--after",
    type=float,
    metavar="SECONDS",
    help="Time of the first predicted frame.  [default: the last --frames frames of the clip are predicted]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of frames that the network reads: the last ones before --after, without the frame at --after.  "
    f"[default: {USUAL_CONTEXT}, or all if fewer]",
)
@click.option(
    "--size",
    type=SizeType(),
    metavar="WxH",
    help=f"Resize the frames.  [default: shorter side at most {USUAL_SIDE}]",
)
@click.option(
    "--colour/--grey",
    default=None,
    help="Channels of an untrained network (default: grey). With --weights, the weights determine the channels.",
)
@device_option
@dtype_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Video to write: {', '.join(VIDEOS)}.  [default: CLIP-predicted.mp4 in the current folder]",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Picture to write (.png).  [default: the name of the video]",
)
@json_option("the settings and the error of each frame")
@done_by("rooftop.cli.predict_video:run")
def command() -> None:
    """Predict the next frames of a clip with a ConvLSTM, each from the context frames and the frames predicted so far.

    Writes a video (real frames on the left, predicted frames on the right) and a picture (real frames above the
    predicted frames). Predictions beyond the end of the clip are shown beside black frames. Prints the mean absolute
    error of the predicted frames, and, for comparison, the error if the last known frame is repeated instead. Existing
    files are replaced.
    """
