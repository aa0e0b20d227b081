"""`rooftop report`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by


@click.command(epilog="Example: rooftop report report.json -o report.html")
@click.argument("json_path", metavar="REPORT.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="HTML page to write.  [default: REPORT.html]")
@done_by("rooftop.cli.report:run")
def command() -> None:
    """Turn a JSON report of `rooftop analyze --json` into HTML.

    Analyze on the GPU machine, which needs neither plotly nor a browser, and make and read the HTML on another machine.
    """
