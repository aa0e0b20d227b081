"""The words of a command line, as every verb gets them in `click.Context.obj`."""

from __future__ import annotations

from collections.abc import Iterable


class Words(list[str]):
    """What was typed after `rooftop`.

    Attributes:
        ends_process: whether the process ends with this call. It does on the command line; a program that calls
            `rooftop.cli.main.main(words)` goes on.
    """

    def __init__(self, words: Iterable[str], ends_process: bool) -> None:
        super().__init__(words)
        self.ends_process = ends_process
