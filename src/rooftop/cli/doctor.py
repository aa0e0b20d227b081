"""`rooftop doctor`: show which components work on this machine, and the commands that fix the components that do not
work."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from rooftop.cli.outputs import write_json
from rooftop.doctor import Finding, diagnosis

MARKS = {"works": ("✓", "green"), "absent": ("-", "dim"), "broken": ("✗", "bold red")}


def run(ctx: click.Context, json_path: Path | None, install_kernel: bool) -> None:
    """Do the work of `rooftop doctor`, as described in `rooftop.cli.commands.doctor:command`."""
    if install_kernel:
        diagnosis.install_kernel()
    findings = diagnosis.diagnose()
    broken = [finding for finding in findings if finding.status == "broken" and finding.needed]
    if not write_json(json_path, {"ok": not broken, "findings": [asdict(finding) for finding in findings]}):
        _show(findings, [finding.part for finding in broken])
    ctx.exit(1 if broken else 0)


def _show(findings: list[Finding], broken: list[str]) -> None:
    """Print one line per checked part of the installation. The problem and the command that fixes it follow below the
    part's line. Long lines are not wrapped, so that users can copy them."""
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
    last = f"broken: {', '.join(broken)}" if broken else "Everything required works."
    console.print(Text(last, "bold red" if broken else "bold"), soft_wrap=True)
