"""`rooftop report`: a JSON report as HTML, on a machine that need not be the one that was measured."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.analysis import Report
from rooftop.cli.analyze import check_writable
from rooftop.errors import InputError


@click.command(epilog="Example: rooftop report report.json -o report.html")
@click.argument("json_path", metavar="REPORT.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The HTML page.  [default: REPORT.html]")
def command(json_path: Path, output: Path | None) -> None:
    """Turn the JSON that `rooftop analyze --json` wrote into the HTML report.

    Analyze on a GPU host without plotly or a browser, read the report elsewhere.
    """
    output = output or json_path.with_suffix(".html")
    check_writable(output)
    if output.resolve() == json_path.resolve():
        raise click.BadParameter(f"{output} is the JSON report itself", param_hint="--output")
    try:
        report = Report.from_json(json_path)
    except ValueError as error:
        raise InputError(str(error)) from error
    report.to_html(output)
    click.echo(f"report: {output}")
