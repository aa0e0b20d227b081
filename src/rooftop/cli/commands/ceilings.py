"""`rooftop ceilings`: what this machine can do, measured."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop ceilings                    measured once, then from the cache
  rooftop ceilings --refresh          measure again; the best of all measurements counts
  rooftop ceilings --forget           measure anew, without what was measured before
  rooftop ceilings -o h200.json       keep them, to compare with on another machine
"""


@click.command(epilog=EXAMPLES)
@click.option("--refresh", is_flag=True, help="Measure again, even if this machine was measured before.")
@click.option("--forget", is_flag=True, help="Forget what was measured before and what raised it; measure anew.")
@click.option("--device", metavar="cpu|cuda[:N]", help="Which device.  [default: the GPU if there is one]")
@json_option("the ceilings")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the ceilings to this file (JSON).")
@done_by("rooftop.cli.ceilings:run")
def command() -> None:
    """Measure what this machine can do: bandwidth over the working set, matrix rates, launches, transfers.

    Every figure is an upper bound, measured here: the best of many patterns, shapes and short bursts, and of all
    measurements so far. They are what `rooftop analyze` compares with. Takes under 30 s, and leaves clocks and settings
    alone.
    """
