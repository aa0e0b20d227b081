"""`rooftop media decode`: the frames of a video as pictures, or as one array."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.video_options import device_option, end_option, resize_option, start_option

EXAMPLES = """\b
Examples:
  rooftop media decode walk.mp4 -o frames/                          # frames/000000.png, ...
  rooftop media decode walk.mp4 -o frames/ --every 25 --format jpg  # one a second, of 25
  rooftop media decode walk.mp4 -o walk.npy --start 2 --end 4 --resize 224x224
"""


@click.command("decode", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    *("-o", "--out"),
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR|FILE.npy",
    help="A folder for a file of each frame, named by its number; or one array (T, 3, H, W) of uint8.",
)
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Take each Nth.")
@start_option
@end_option
@resize_option
@device_option
@click.option(
    *("--format", "suffix"),
    type=click.Choice(["png", "jpg", "npy"]),
    help="Of the files in a folder: png (the default), jpg of quality 95, or npy, (3, H, W) of uint8.",
)
@done_by("rooftop.cli.media_decode:run_decode")
def decode_command() -> None:
    """Decode FILE into pictures, RGB and upright.

    Frames are numbered from 0 as in the video, also with --start and --every. Each file is there whole or not at all;
    if the video is damaged, those of the frames before stay in the folder, and an array is not written.
    """
