"""`rooftop doctor`: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from rooftop.hardware import Finding, diagnosis

EXAMPLES = """\b
Examples:
  rooftop doctor                      exit status 0: nothing that is needed is broken
  rooftop doctor --json               the same, to be read by a program
  rooftop doctor --install-kernel     first make this Python a Jupyter kernel
"""

MARKS = {"works": ("✓", "green"), "absent": ("-", "dim"), "broken": ("✗", "bold red")}


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--install-kernel", is_flag=True, help="Make this Python a Jupyter kernel named rooftop.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, install_kernel: bool) -> None:
    """Say what works on this machine and what does not, each problem with the command that mends it.

    Tiny kernels run on each GPU. Nothing is installed or changed but by --install-kernel. What is optional and absent
    is shown with how to get it. Exit status 1 if something that is needed is broken.
    """
    if install_kernel:
        diagnosis.install_kernel()
    findings = diagnosis.diagnose()
    broken = [finding for finding in findings if finding.status == "broken" and finding.needed]
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _show(findings, [finding.part for finding in broken])
    ctx.exit(1 if broken else 0)


def _show(findings: list[Finding], broken: list[str]) -> None:
    """A line for each part; under it what is wrong and the command. Long lines are left whole, to be copied."""
    console = Console(highlight=False)
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        mark, style = MARKS[finding.status]
        dim = "dim" if finding.status == "absent" else ""
        lines = [line for line in (finding.found, finding.problem) if line] or [""]
        console.print(
            Text(mark, style), Text(finding.part.ljust(width), dim), Text(lines[0], dim), soft_wrap=True, sep="  "
        )
        indent = " " * (width + 5)
        for line in lines[1:]:
            console.print(Text(indent + line, dim or "red"), soft_wrap=True)
        if finding.command:
            console.print(Text(f"{indent}{finding.command}", dim or "bold"), soft_wrap=True)
    last = f"broken: {', '.join(broken)}" if broken else "Nothing that is needed is broken."
    console.print(Text(last, "bold red" if broken else "bold"), soft_wrap=True)
