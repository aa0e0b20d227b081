"""`rooftop device`: options and help."""

from __future__ import annotations

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option


@click.command(epilog="Example: rooftop device --json")
@json_option("the devices")
@done_by("rooftop.cli.device:run")
def command() -> None:
    """Describe the GPUs and the CPU of this machine, and its software versions.

    "-" stands for a value that the driver does not report, for example in a container or a virtual machine.
    """
