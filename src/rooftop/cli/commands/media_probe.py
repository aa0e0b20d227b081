"""`rooftop media probe`: what is in a video."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option


@click.command("probe", epilog="Example: rooftop media probe walk.mp4 --json")
@click.argument("file", type=click.Path(path_type=Path))
@json_option("what is there")
@done_by("rooftop.cli.media_probe:run_probe")
def probe_command() -> None:
    """Show what is in a video: codec, size, colours, frames, times, and whether it is all there.

    One frame is decoded and all packets are read. What the file does not say and is assumed is marked so.
    """
