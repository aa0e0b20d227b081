"""Stop a block of code after some time, as Ctrl-C would, because a compiler has no time limit of its own."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from types import TracebackType

AGAIN_S = 5.0
"""If code that is not Python is running, or a callback swallows the exception, it is raised again after this time."""

ON_ITS_WAY_S = 0.01
"""Python raises an exception of another thread within microseconds."""


class StoppedError(BaseException):
    """A `Deadline` has passed. This is not an `Exception`, so that handlers of errors do not catch it."""


class Deadline:
    """A `with` block that raises `StoppedError` in this thread after `seconds`.

    Python raises it between two bytecode instructions, so a call into C++ first runs to its end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._raised = False  # the exception is scheduled, but not raised yet
        self._lock = threading.Lock()

    def __enter__(self) -> Deadline:
        threading.Thread(target=self._watch, daemon=True, name="rooftop deadline").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is StoppedError:
            self._raised = False
        self.end()

    def end(self) -> None:
        """End the deadline, so that nothing is raised from now on.

        If the exception is already scheduled, wait for it: if it were withdrawn, CPython 3.11 would loop forever under
        a profiler.
        """
        while not self._over.is_set():
            try:
                with self._lock:
                    self._over.set()
            except StoppedError:
                self._raised = False
        if self._raised:
            with suppress(StoppedError):
                time.sleep(ON_ITS_WAY_S)
            self._raised = False

    def _watch(self) -> None:
        seconds = min(max(0.0, self._seconds), threading.TIMEOUT_MAX)
        while not self._over.wait(seconds):
            with self._lock:
                if not self._over.is_set():
                    self._raised = True
                    raised = ctypes.py_object(StoppedError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)
            seconds = AGAIN_S
