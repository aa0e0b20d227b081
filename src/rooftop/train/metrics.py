"""The file of what was seen of each step: a line of JSON for each, also of a training that ended and goes on.

What goes on makes the steps after its checkpoint again. So the lines of those that were made before are taken out, and
so is the part of a line that a process had written when it was killed: a file has each step once, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rooftop.errors import InputError
from rooftop.hardware.ceilings import write_whole
from rooftop.train.running import StepReport


def kept_lines(path: Path, step: int) -> list[str]:
    """Of a file, the lines of steps 1 to `step`, each once: the last one, where a step was made twice.

    Raises:
        InputError: it has other lines, which are not for us to take out.
    """
    if not path.is_file():
        return []
    *whole, last = path.read_bytes().split(b"\n")
    found = {}
    for number, line in enumerate([*whole, last], 1):
        made = _step_of(line)
        if made is None and line.strip() and number <= len(whole):
            raise InputError(
                f"{path} is not as --metrics writes it, line {number} has no step: move it away, or give another name"
            )
        if made is not None and made <= step:
            found[made] = line.decode("utf-8")
    return [found[made] for made in sorted(found)]


@contextmanager
def metrics_file(path: Path, after: int | None = None) -> Iterator[TextIO]:
    """A file to which lines are added as they come.

    Args:
        path: of the file; also a pipe or a device, which is written to as it is.
        after: the step that is loaded: what the file has of later ones is taken out. None: it begins empty.

    Raises:
        InputError: that of `kept_lines`; the file is as it was.
        OSError: it cannot be written.
    """
    if after is not None and path.is_file():
        text = "".join(f"{line}\n" for line in kept_lines(path, after))
        if text.encode() != path.read_bytes():
            write_whole(path, text)
    with path.open("w" if after is None else "a", encoding="utf-8") as file:
        yield file


def add_lines(file: TextIO, reports: Iterable[StepReport]) -> None:
    """Write what was seen, so that it is there when the next checkpoint is."""
    file.writelines(json.dumps(asdict(report)) + "\n" for report in reports)
    file.flush()


def _step_of(line: bytes) -> int | None:
    """Of a whole line."""
    try:
        found = json.loads(line)
    except ValueError:  # no JSON, or no text at all
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None
