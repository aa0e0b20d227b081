"""Set up a script's environment while it runs: arguments, module path, current folder, output, stack size.

After the script's last line, Rooftop restores the folder and the output from before the script and makes the report.
Then Rooftop restores the script's environment, because the script's threads and exit functions may still run.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import UnsupportedOperation
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


@dataclass(frozen=True)
class _State:
    """`sys.argv`, `sys.path`, `sys.stdout`, `sys.modules["__main__"]` and the current folder ("" if it is gone)."""

    argv: list[str]
    path: list[str]
    stdout: Any
    main: ModuleType | None
    folder: str

    @classmethod
    def now(cls) -> _State:
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = ""
        return cls(sys.argv, list(sys.path), sys.stdout, sys.modules.get("__main__"), folder)

    def put(self) -> None:
        sys.argv, sys.path[:], sys.stdout = self.argv, self.path, self.stdout
        if self.main is not None:
            sys.modules["__main__"] = self.main
        with suppress(FileNotFoundError):
            os.chdir(self.folder)


class Surroundings:
    """Set the script's environment within the `with` block. At the end of the block, restore the environment from
    before the block. A later call of `again` sets the environment that the script left at the end of the block.

    If the script has closed the `sys.stdout` from before the block, the script's last `sys.stdout` is used after the
    block. If that is closed too, stderr is used.
    """

    def __init__(self, script: Path, arguments: Sequence[str]) -> None:
        self._script, self._arguments = script, arguments
        self._before = self._after = _State.now()

    def __enter__(self) -> None:
        self._before = _State.now()
        sys.argv = [str(self._script), *self._arguments]
        sys.path[:] = [str(self._script.resolve().parent), *(sys.path[1:] if _started_by_rooftop() else sys.path)]

    def __exit__(self, *error: object) -> None:
        self._after = _State.now()
        self._before.put()
        sys.stdout = next((each for each in (sys.stdout, self._after.stdout) if _is_open(each)), sys.stderr)

    def again(self) -> None:
        self._after.put()


def _started_by_rooftop() -> bool:
    """Whether this process is the command `rooftop`, whose folder Python has put first into `sys.path`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec is not None else Path(getattr(main, "__file__", None) or "").stem
    return str(name).partition(".")[0] == "rooftop" and bool(sys.path)


def _is_open(stream: Any) -> bool:
    """Whether a stream is still writable. It is not if the script closed it, detached it, or closed its file."""
    try:
        stream.flush()
        return not stream.closed and os.fstat(stream.fileno()) is not None
    except UnsupportedOperation:  # the stream has no file
        return True
    except (ValueError, OSError, AttributeError):
        return False


@contextmanager
def room_below() -> Iterator[None]:
    """Raise the recursion limit by the number of stack frames that Rooftop uses, so that the script can use as many
    frames as without Rooftop.
    """
    limit, depth = sys.getrecursionlimit(), len(inspect.stack(0))
    sys.setrecursionlimit(limit + depth)
    try:
        yield
    finally:
        if sys.getrecursionlimit() == limit + depth:
            sys.setrecursionlimit(limit)


def end_of_child(main: ModuleType, status: int) -> NoReturn:
    """End the process as Python does: wait for threads, run exit functions, flush open files."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        main.__dict__.clear()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
