"""`rooftop media decode`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.video_options import device_option, end_option, resize_option, start_option

EXAMPLES = """\b
Examples:
  rooftop media decode walk.mp4 -o frames/                          # frames/000000.png, ...
  rooftop media decode walk.mp4 -o frames/ --every 25 --format jpg  # one per second at 25 fps
  rooftop media decode walk.mp4 -o walk.npy --start 2 --end 4 --resize 224x224
"""


@click.command("decode", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    *("-o", "--out"),
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR|FILE.npy",
    help="A folder for one file per frame, named by the frame's number; or FILE.npy for one uint8 array (T, 3, H, W).",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Keep every N-th frame, starting with the first frame at or after --start.",
)
@start_option
@end_option
@resize_option
@device_option
@click.option(
    *("--format", "suffix"),
    type=click.Choice(["png", "jpg", "npy"]),
    help="Format of the files in a folder: png (the default), jpg (quality 95), or npy (uint8, (3, H, W)).",
)
@done_by("rooftop.cli.media_decode:run_decode")
def decode_command() -> None:
    """Decode FILE into upright RGB pictures, or into one array.

    The number in a file's name counts frames from the start of the video, even with --start and --every. Each file is
    written completely or not at all. If the video is damaged, the pictures before the damage are kept, and no array is
    written.
    """
