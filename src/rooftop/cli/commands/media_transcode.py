"""`rooftop media transcode`: a video in another codec, size or rate, with its sound as it is."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.video_options import device_option, end_option, resize_option, start_option

EXAMPLES = """\b
Examples:
  rooftop media transcode walk.mov walk.mp4
  rooftop media transcode walk.mp4 small.mp4 --resize 640x360 --crf 28
  rooftop media transcode walk.mp4 cut.webm --start 2 --end 7.5 --fps 25 --no-sound
"""


@click.command("transcode", epilog=EXAMPLES)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--codec", metavar="NAME", help="FFmpeg's encoder, or auto (NVENC where it can be had); else by the suffix."
)
@resize_option
@click.option("--fps", type=click.FloatRange(min=0, min_open=True), help="A constant rate, of the frames shown then.")
@start_option
@end_option
@click.option("--crf", type=click.IntRange(0, 63), metavar="N", help="Quality, smaller is better; 23 is usual of x264.")
@click.option("--no-sound", is_flag=True, help="Leave the sound out; else it is copied.")
@device_option
@done_by("rooftop.cli.media_transcode:run_transcode")
def transcode_command() -> None:
    """Encode IN anew as OUT, whose suffix names the format.

    Every frame keeps its time, also at a variable rate; what the file turns is turned, and 10 bits stay 10 where the
    encoder has them. Sound is copied packet for packet. OUT appears when it is whole, in the place of an older
    file of that name, and not at all on an error.
    """
