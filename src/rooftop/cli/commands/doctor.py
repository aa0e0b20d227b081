"""`rooftop doctor`: options and help."""

from __future__ import annotations

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop doctor                      exit status 0: everything required works
  rooftop doctor --json               the same, for programs
  rooftop doctor --install-kernel     first register this Python as a Jupyter kernel
"""


@click.command(epilog=EXAMPLES)
@json_option("the findings")
@click.option("--install-kernel", is_flag=True, help="Register this Python as a Jupyter kernel named rooftop.")
@click.pass_context
@done_by("rooftop.cli.doctor:run")
def command() -> None:
    """Check what works on this machine, and print the command that fixes each problem.

    The command runs tiny kernels on each GPU. It installs and changes nothing, except a Jupyter kernel with
    --install-kernel. It lists missing optional packages and how to install them. The exit status is 1 if something
    required is broken.
    """
