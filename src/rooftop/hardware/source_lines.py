"""Find the line of the user's program that made a call: the innermost line outside torch and Rooftop."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

LIBRARIES = tuple(f"{path}/" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))


@dataclass(frozen=True)
class SourceLine:
    """A file and a line in it, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_line(frames: Iterable[tuple[str, int]]) -> SourceLine | None:
    """The first of these (file, line) pairs that is outside torch and Rooftop; None if there is none. The innermost
    frame's pair comes first.
    """
    for file, line in frames:
        if not file.startswith((*LIBRARIES, "<frozen ")) and line > 0:
            return SourceLine(file, line)
    return None


def current_user_line() -> SourceLine | None:
    """The program's line that is running now."""
    return user_line(_frames())


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0
        frame = frame.f_back  # type: ignore[assignment]
