"""`rooftop report`: a JSON report as HTML, on a machine that need not be the one that was measured."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by


@click.command(epilog="Example: rooftop report report.json -o report.html")
@click.argument("json_path", metavar="REPORT.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The HTML page.  [default: REPORT.html]")
@done_by("rooftop.cli.report:run")
def command() -> None:
    """Turn the JSON that `rooftop analyze --json` wrote into the HTML report.

    Analyze on a GPU host without plotly or a browser, read the report elsewhere.
    """
