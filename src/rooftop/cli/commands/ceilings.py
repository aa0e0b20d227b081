"""`rooftop ceilings`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop ceilings                    measure once, then read the cache
  rooftop ceilings --refresh          measure again and keep the best of all measurements
  rooftop ceilings --forget           discard earlier measurements and measure again
  rooftop ceilings -o h200.json       save the ceilings, for --predict on another machine
"""


@click.command(epilog=EXAMPLES)
@click.option("--refresh", is_flag=True, help="Measure again, and keep the best of all measurements.")
@click.option("--forget", is_flag=True, help="Discard all earlier measurements, then measure again.")
@click.option("--device", metavar="cpu|cuda[:N]", help="Device to measure.  [default: the GPU if there is one]")
@json_option("the ceilings")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the ceilings to this file (JSON).")
@done_by("rooftop.cli.ceilings:run")
def command() -> None:
    """Measure the limits of this machine: bandwidth over the working set, matrix rates, launches, transfers.

    Each ceiling is the best of many patterns, shapes and short bursts, and of all measurements so far. `rooftop
    analyze` compares programs with these ceilings. The measurement takes under 30 s, and leaves clocks and settings as
    they are.
    """
