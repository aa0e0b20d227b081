"""`rooftop media ffmpeg-check` and `ffmpeg-build`: what FFmpeg can do here; FFmpeg built for NVIDIA's GPUs."""

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
@click.option("--ffmpeg", type=click.Path(path_type=Path), metavar="PATH", help="The program; else the shell's ffmpeg.")
@json_option("the report")
@done_by("rooftop.cli.media_ffmpeg:run_check")
def check_command() -> None:
    """Try what FFmpeg can do on this machine: decoders, encoders and filters, on GPUs and in software.

    Whatever it lists is run, and its frames are compared with those of software: "works" means right frames. Takes
    15 s or more. Exit status 0 also where there is no GPU, 1 where there is no FFmpeg.
    """


@click.command("ffmpeg-build", epilog=BUILD_EXAMPLES)
@click.option("--source", type=click.Path(path_type=Path), required=True, metavar="DIR", help="FFmpeg's, unpacked.")
@click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Where to install it: a new folder, or one that this command made.",
)
@click.option(
    "--headers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="nv-codec-headers, unpacked or installed; else those that pkg-config finds.",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes at a time; else one for each core.")
@click.option("--minimal", is_flag=True, help="Video alone, from files and pipes: built in minutes.")
@done_by("rooftop.cli.media_ffmpeg:run_build")
def build_command() -> None:
    """Build FFmpeg with cuvid, nvdec, nvenc and filters on the GPU, then try what it can do here.

    All that is missing is named first, with the command that installs it. A build that was ended goes on where it was.
    The prefix appears when all is built, and an older one is as it was until then; PREFIX.build beside it keeps the
    objects and the log.
    """
