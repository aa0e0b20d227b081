"""The words of the command line. Every verb can read these words from `click.Context.obj`."""

from __future__ import annotations

from collections.abc import Iterable


class Words(list[str]):
    """The words typed after `rooftop`.

    Attributes:
        ends_process: whether the process ends with this call: true on the command line, false in a program that calls
            `rooftop.cli.main.main(words)`.
    """

    def __init__(self, words: Iterable[str], ends_process: bool) -> None:
        super().__init__(words)
        self.ends_process = ends_process
