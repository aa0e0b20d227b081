"""`rooftop media transcode`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
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
    "--codec",
    metavar="NAME",
    help="Name of an FFmpeg encoder, or auto: NVENC if available.  [default: by the suffix of OUT]",
)
@resize_option
@click.option(
    "--fps",
    type=NumberRange(min=0, min_open=True),
    help="Make the frame rate constant: show the current frame at each tick.",
)
@start_option
@end_option
@click.option(
    "--crf", type=click.IntRange(0, 63), metavar="N", help="Quality; smaller is better. x264's default is 23."
)
@click.option("--no-sound", is_flag=True, help="Drop the sound.  [default: copy it]")
@device_option
@done_by("rooftop.cli.media_transcode:run_transcode")
def transcode_command() -> None:
    """Transcode IN to OUT. The suffix of OUT sets the format.

    Every frame keeps its time, even at a variable frame rate. Rotation stored in the file is applied. 10-bit video
    stays 10-bit if the encoder supports it. Sound is copied packet for packet. OUT is created or replaced only once it
    is complete.
    """
