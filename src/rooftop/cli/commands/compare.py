"""`rooftop compare`: arguments, options and help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Example:
  rooftop analyze resnet50 --no-html --json before.json
  rooftop analyze resnet50 --no-html --channels-last --json after.json
  rooftop compare before.json after.json
  rooftop compare before.json after.json --fail-above 5%   for a CI job
"""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class PercentType(click.ParamType[float]):
    """Parse a percentage, with or without %; return the fraction."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", str(value))
        if found is None:
            self.fail(f"{value!r} is not a percentage: expected a number such as 5%", param, ctx)
        return float(found[1]) / 100


@click.command(epilog=EXAMPLES)
@click.argument("before_path", metavar="BEFORE.json", type=FILE)
@click.argument("after_path", metavar="AFTER.json", type=FILE)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of operators to list, and of modules.",
)
@click.option(
    "--fail-above",
    type=PercentType(),
    metavar="PERCENT",
    help="Exit with status 1 if the step is slower by more than PERCENT and by more than the noise.",
)
@json_option("the differences")
@done_by("rooftop.cli.compare:run")
def command() -> None:
    """Compare two reports that `rooftop analyze --json` wrote.

    Shows the changes of the whole step, then the operators and modules whose times changed by the most ms. A change of
    the wall time is called noise if it is at most 1%, or at most the larger spread of the two reports' runs.
    """
