"""`rooftop doctor`: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop doctor                      exit status 0: nothing that is needed is broken
  rooftop doctor --json               the same, to be read by a program
  rooftop doctor --install-kernel     first make this Python a Jupyter kernel
"""


@click.command(epilog=EXAMPLES)
@json_option("the findings")
@click.option("--install-kernel", is_flag=True, help="Make this Python a Jupyter kernel named rooftop.")
@click.pass_context
@done_by("rooftop.cli.doctor:run")
def command() -> None:
    """Say what works on this machine and what does not, each problem with the command that mends it.

    Tiny kernels run on each GPU. Nothing is installed or changed but by --install-kernel. What is optional and absent
    is shown with how to get it. Exit status 1 if something that is needed is broken.
    """
