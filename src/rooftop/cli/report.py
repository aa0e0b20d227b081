"""`rooftop report`: convert a JSON report to HTML, on any machine."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.analysis import Report
from rooftop.cli.outputs import check_writable
from rooftop.errors import InputError


def run(json_path: Path, output: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.report:command` describes."""
    output = output or json_path.with_suffix(".html")
    if output.resolve() == json_path.resolve():
        raise click.BadParameter(
            f"{output} is the JSON report itself: give the HTML page another name", param_hint="--output"
        )
    check_writable(output, kind="HTML")
    try:
        report = Report.from_json(json_path)
    except ValueError as error:
        raise InputError(str(error)) from error
    report.to_html(output)
    click.echo(f"report: {output}")
