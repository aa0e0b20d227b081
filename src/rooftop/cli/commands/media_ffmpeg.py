"""`rooftop media ffmpeg-check` and `ffmpeg-build`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

BUILD_EXAMPLES = """\b
Examples:
  rooftop media ffmpeg-build --source ffmpeg-7.1 --prefix ~/ffmpeg
  rooftop media ffmpeg-build --source ffmpeg-7.1 --prefix ~/ffmpeg --headers nv-codec-headers --minimal
"""


@click.command("ffmpeg-check", epilog="Example: rooftop media ffmpeg-check --ffmpeg /opt/ffmpeg/bin/ffmpeg")
@click.option(
    "--ffmpeg",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="FFmpeg program to test.  [default: ffmpeg on the PATH]",
)
@json_option("the report")
@done_by("rooftop.cli.media_ffmpeg:run_check")
def check_command() -> None:
    """Test FFmpeg's decoders, encoders and filters on this machine, on GPUs and in software.

    Runs test frames through the codecs and filters that Rooftop can check. Frames from GPU decoders and filters must
    match those of software. Frames from encoders, decoded by software, must resemble the test frames. "works" means
    correct frames. "not tried" means that there was nothing to compare with. The command takes 15 s or more. The exit
    status is 0 even without a GPU, and 1 without FFmpeg.
    """


@click.command("ffmpeg-build", epilog=BUILD_EXAMPLES)
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder of FFmpeg's unpacked source code.",
)
@click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder to install into: a new folder, or one that this command created.",
)
@click.option(
    "--headers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of nv-codec-headers, unpacked or installed.  [default: found by pkg-config]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Number of parallel processes.  [default: one per core]"
)
@click.option("--minimal", is_flag=True, help="Build only the support for video, files and pipes, in a few minutes.")
@done_by("rooftop.cli.media_ffmpeg:run_build")
def build_command() -> None:
    """Build FFmpeg with cuvid, nvdec, nvenc and GPU filters, then test it.

    First lists all missing packages, with the command that installs them. An interrupted build continues where it
    stopped. PREFIX is created or replaced only once the build is complete. The folder PREFIX.build keeps the objects
    and the log.
    """
