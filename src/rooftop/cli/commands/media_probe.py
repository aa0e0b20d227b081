"""`rooftop media probe`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option


@click.command("probe", epilog="Example: rooftop media probe walk.mp4 --json")
@click.argument("file", type=click.Path(path_type=Path))
@json_option("the description")
@done_by("rooftop.cli.media_probe:run_probe")
def probe_command() -> None:
    """Show what is in a video (codec, size, colours, frames, times), and check that it is complete.

    The command decodes one frame and reads all packets. It marks the values that are missing in the file and that
    Rooftop assumes.
    """
