"""`rooftop media ffmpeg-check` and `ffmpeg-build`: test FFmpeg, and build it for NVIDIA's GPUs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.cli.progress import progress_bar
from rooftop.media import FFmpegBuildError, FFmpegReport, build_ffmpeg, ffmpeg_abilities

MARKS = {
    "works": ("✓", "green"),
    "fails": ("✗", "red"),
    "not built in": ("-", "dim"),
    "not tried": ("?", "yellow"),
}


def run_check(ffmpeg: Path | None, json_path: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.media_ffmpeg:check_command` describes."""
    with progress_bar() as report:
        found = ffmpeg_abilities(ffmpeg, report=report)
    if not write_json(json_path, asdict(found)):
        show(found)


def run_build(source: Path, prefix: Path, headers: Path | None, jobs: int | None, minimal: bool) -> None:
    """Run the command that `rooftop.cli.commands.media_ffmpeg:build_command` describes."""
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
    """Print the report as a table."""
    console = output_console(highlight=False)
    console.print(Text(f"{found.path}, FFmpeg {found.version}"), soft_wrap=True)
    gpus = ", ".join(found.gpus) + f" (driver {found.driver})" if found.gpus else "none with a working driver"
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
