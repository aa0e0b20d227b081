"""Write the metrics file: one line of JSON per step, also in a resumed training.

A resumed training repeats the steps after its checkpoint. So the old lines of the repeated steps are removed, as is a
partial line of a killed process. The file then has each step once, in order. A number that is not finite is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rooftop.errors import InputError
from rooftop.train.checkpoints.folders import writing_to
from rooftop.train.finite_json import finite
from rooftop.train.gpt.running import StepReport
from rooftop.whole_files import write_whole


def kept_lines(path: Path, step: int) -> list[str]:
    """Read the lines of steps 1 to `step`, one per step; if a step ran twice, the last line counts.

    Raises:
        InputError: a line (other than a partial last line) is not the metrics of a step. Such a file is not a metrics
            file, so its lines must not be removed.
    """
    if not path.is_file():
        return []
    *whole, last = path.read_bytes().split(b"\n")
    found = {}
    for number, line in enumerate([*whole, last], 1):
        made = _step_of(line)
        if made is None and line.strip() and number <= len(whole):
            raise InputError(
                f"{path} was not written by --metrics: line {number} has no step: move the file away, or give "
                "another name"
            )
        if made is not None and made <= step:
            found[made] = line.decode("utf-8")
    return [found[made] for made in sorted(found)]


@contextmanager
def metrics_file(path: Path, after: int | None = None) -> Iterator[TextIO]:
    """Open a metrics file to append lines.

    Args:
        path: path of the file, which may be a pipe or a device.
        after: the step of the loaded checkpoint; lines of later steps are removed. None: the file starts empty.

    Raises:
        InputError: see `kept_lines`; the file stays unchanged.
        InputError, OSError: the file cannot be written; see `writing_to`.
    """
    with writing_to(path):
        if after is not None and path.is_file():
            text = "".join(f"{line}\n" for line in kept_lines(path, after))
            if text.encode() != path.read_bytes():
                write_whole(path, text)
        file = path.open("w" if after is None else "a", encoding="utf-8")
    try:
        yield file
    except BaseException:
        with suppress(OSError):  # closing tries to write the buffer again, and its error would hide the first error
            file.close()
        raise
    file.close()


def add_lines(file: TextIO, reports: Iterable[StepReport]) -> None:
    """Append the reports as lines to the file. Call this before the next checkpoint is saved, so that a resumed
    training finds the lines of all steps up to its checkpoint.

    Raises:
        OSError: the lines cannot be written; the message names the file.
    """
    try:
        file.writelines(json.dumps(finite(asdict(report)), allow_nan=False) + "\n" for report in reports)
        file.flush()
    except OSError as error:
        raise OSError(f"{file.name} cannot be written ({error.strerror}): make room") from error


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is cut off or is not a step's metrics."""
    try:
        found = json.loads(line)
    except ValueError:  # the line is not JSON or not UTF-8
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None
