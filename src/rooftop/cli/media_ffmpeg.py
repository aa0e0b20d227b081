"""`rooftop media ffmpeg-check` and `ffmpeg-build`: what FFmpeg can do here; FFmpeg built for NVIDIA's GPUs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftop.analysis.text import WIDTH
from rooftop.cli.progress import progress_bar
from rooftop.media import FFmpegBuildError, FFmpegReport, build_ffmpeg, ffmpeg_abilities

MARKS = {
    "works": ("✓", "green"),
    "fails": ("✗", "red"),
    "not built in": ("-", "dim"),
    "not tried": ("?", "yellow"),
}


@click.command("ffmpeg-check", epilog="Example: rooftop media ffmpeg-check --ffmpeg /opt/ffmpeg/bin/ffmpeg")
@click.option("--ffmpeg", type=click.Path(path_type=Path), metavar="PATH", help="The program; else the shell's ffmpeg.")
@click.option(
    *("--json", "json_path"),
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Also write the report as JSON; - prints it instead of the table.",
)
def check_command(ffmpeg: Path | None, json_path: Path | None) -> None:
    """Try what FFmpeg can do on this machine: decoders, encoders and filters, on GPUs and in software.

    Whatever it lists is run, and its frames are compared with those of software: "works" means right frames. Takes
    15 s or more. Exit status 0 also where there is no GPU, 1 where there is no FFmpeg.
    """
    with progress_bar() as report:
        found = ffmpeg_abilities(ffmpeg, report=report)
    if json_path == Path("-"):
        click.echo(_json(found))
        return
    if json_path is not None:
        _write(json_path, _json(found) + "\n")
    show(found)


BUILD_EXAMPLES = """\b
Examples:
  rooftop media ffmpeg-build --source ffmpeg-7.1 --prefix ~/ffmpeg
  rooftop media ffmpeg-build --source ffmpeg-7.1 --prefix ~/ffmpeg --headers nv-codec-headers --minimal
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
def build_command(source: Path, prefix: Path, headers: Path | None, jobs: int | None, minimal: bool) -> None:
    """Build FFmpeg with cuvid, nvdec, nvenc and filters on the GPU, then try what it can do here.

    All that is missing is named first, with the command that installs it. A build that was ended goes on where it was.
    The prefix appears when all is built, and an older one is as it was until then; PREFIX.build beside it keeps the
    objects and the log.
    """
    try:
        with progress_bar() as report:
            built = build_ffmpeg(source, prefix, headers=headers, jobs=jobs, minimal=minimal, report=report)
    except FFmpegBuildError as error:
        for line in error.details:
            click.echo(line, err=True)
        raise
    for line in built.left_out:
        click.echo(f"left out: {line}", err=True)
    click.echo(
        f"{'built' if built.new else 'nothing to build:'} {built.ffmpeg}, FFmpeg {built.version}; log: {built.log}"
    )
    with progress_bar() as report:
        found = ffmpeg_abilities(built.ffmpeg, report=report)
    show(found)


def show(found: FFmpegReport) -> None:
    """The report as a table."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(Text(f"{found.path}, FFmpeg {found.version}"), soft_wrap=True)
    gpus = ", ".join(found.gpus) + f" (driver {found.driver})" if found.gpus else "none with a driver that answers"
    console.print(Text(f"GPUs: {gpus}"))
    if found.configuration:
        console.print(Text(f"configuration: {' '.join(found.configuration)}", "dim"), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    part = ""
    for each in found.abilities:
        mark, style = MARKS[each.status]
        heading = Text("" if each.part == part else each.part, "bold")
        note = Text(
            each.status + (f": {each.note}" if each.note else ""), "dim" if each.status == "not built in" else ""
        )
        table.add_row(heading, Text(mark, style), Text(each.what), Text(each.way), note)
        part = each.part
    console.print(table)


def _json(found: FFmpegReport) -> str:
    return json.dumps(asdict(found), indent=1)


def _write(path: Path, text: str) -> None:
    """Whole or not at all; a device or a pipe as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
