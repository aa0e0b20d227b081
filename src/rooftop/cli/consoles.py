"""The console to which the verbs print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

from rooftop.analysis.text import WIDTH


def output_console(*, highlight: bool = True) -> Console:
    """Return a console for standard output: as wide as the terminal, or `WIDTH` columns in a file or a pipe.

    Args:
        highlight: whether numbers and names get colours.
    """
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=highlight)
