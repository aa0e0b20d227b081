"""Describe this process's current activity. Other ranks quote the description when this process fails, or when they
wait for this process.

    report("step 12")                         # this process's latest activity
    with awaiting("the forward of rank 0"):   # a wait that the flight recorder does not record
        work.wait()
    with others_wait("measuring this machine"):
        ...                                   # long work that is not a hang
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from rooftop.hardware.source_lines import LIBRARIES
from rooftop.parallel.flight_records import Operation
from rooftop.parallel.progress import all_places

TORCH, ROOFTOP = LIBRARIES
STANDARD = f"{threading.__file__.rpartition('/')[0]}/"
INSTALLED = "/site-packages/"
WAITING = "this rank was awaiting "
"""If a GPU waits for another rank, the text that describes the GPU's place begins with this prefix."""


@dataclass(frozen=True)
class Place:
    """The current activity of a rank.

    Attributes:
        reported: the line that the rank reported last, such as "step 12"; "" if there is none.
        line: the innermost line of the main thread outside libraries, such as "train/gpt/trainer.py:231, in
            _gradients_of".
        awaited: text that says what the rank's program or GPU waits for; "" if it does not wait.
        operations: the rank's communication that is launched and has not ended.
        long: whether the rank has announced long work, for which other ranks must wait.
    """

    reported: str = ""
    line: str = ""
    awaited: str = ""
    operations: tuple[Operation, ...] = ()
    long: bool = False

    @property
    def words(self) -> str:
        """The rank's last position, such as "step 12, train/gpt/trainer.py:231, in _gradients_of"."""
        return ", ".join(each for each in (self.reported, self.line) if each)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Place:
        found: dict[str, Any] = json.loads(text)
        operations = tuple(Operation(**{**each, "ranks": tuple(each["ranks"])}) for each in found.pop("operations"))
        return cls(operations=operations, **found)


@dataclass
class _Here:
    reported: str = ""
    awaited: str = ""
    long: bool = False


_here = _Here()


def report(words: str) -> None:
    """Report this rank's activity. Other ranks quote it if this rank dies, is suspended or keeps them waiting."""
    _here.reported = words


@contextmanager
def others_wait(words: str) -> Iterator[None]:
    """Announce long work within the block, so that ranks that wait for this rank do not report a hang."""
    before = _here.reported, _here.long
    _here.reported, _here.long = words, True
    try:
        yield
    finally:
        _here.reported, _here.long = before


@contextmanager
def awaiting(words: str) -> Iterator[None]:
    """While the block runs, tell other ranks what this rank waits for. If the block raises an error, the text stays,
    since other ranks may still read it."""
    _here.awaited = words
    yield
    _here.awaited = ""


def interrupted(words: str) -> None:
    """Record what this rank waited for when the wait failed."""
    _here.awaited = words


def begin() -> None:
    """Forget earlier reports and waits at the start of a `join` block."""
    _here.reported = _here.awaited = ""


def place_here(operations: tuple[Operation, ...]) -> Place:
    """The current activity of this process. Any thread may call this."""
    on_gpu = [each for each in all_places() if each.startswith(WAITING)]
    awaited = on_gpu[0].removeprefix(WAITING) if on_gpu else _here.awaited
    return Place(_here.reported, _line(), awaited, operations, _here.long)


def _line() -> str:
    """The innermost line of the main thread outside PyTorch and Python's standard library, preferably in the user's
    code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    ours: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOFTOP):
            ours = ours or frame
        elif INSTALLED not in file and not file.startswith((TORCH, STANDARD, "<")) and not _is_start(frame):
            break
        frame = frame.f_back
    found = frame or ours
    return "" if found is None else f"{_short(found.f_code.co_filename)}:{found.f_lineno}, in {_name(found)}"


def _name(frame: FrameType) -> str:
    """The name of the function, or of the enclosing function for a lambda or comprehension, which has no name."""
    named = [part for part in frame.f_code.co_qualname.split(".") if not part.startswith("<")]
    return named[-1] if named else frame.f_code.co_name


def _is_start(frame: FrameType) -> bool:
    """Whether a frame is in the entry script of the `rooftop` command."""
    return frame.f_code.co_name == "<module>" and frame.f_code.co_filename.rpartition("/")[2] == "rooftop"


def _short(file: str) -> str:
    """Shorten a path in Rooftop to the part that begins with the package, and any other path to its last two parts."""
    return file.removeprefix(ROOFTOP) if file.startswith(ROOFTOP) else "/".join(file.split("/")[-2:])
