"""End a block of code with an exception after some time, as Ctrl-C would, because a compiler has no time limit of its
own."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

AGAIN_S = 5.0
"""The exception is raised again after this time, in case a callback swallowed it or code other than Python was
running."""

ON_ITS_WAY_S = 0.01
"""Time to wait for an exception that another thread has scheduled. Python raises the exception within microseconds."""


class StoppedError(BaseException):
    """A `Deadline` has passed. This is not an `Exception`, so that handlers of errors do not catch it."""


class Deadline:
    """A `with` block that raises `StoppedError` in this thread after `seconds`.

    Python raises `StoppedError` between two bytecode instructions, so a call into C++ first runs to its end. In the
    main thread, a signal also interrupts waits, such as a compiler's wait for its worker processes. In other threads, a
    wait first runs to its end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._raised = False  # whether the exception is scheduled and still has to be raised
        self._lock = threading.Lock()
        self._signal = 0  # 0: none

    def __enter__(self) -> Deadline:
        if threading.current_thread() is threading.main_thread():
            self._signal = _unused_signal()
        if self._signal:
            signal.signal(self._signal, self._by_signal)
        try:
            threading.Thread(target=self._watch, daemon=True, name="rooftop deadline").start()
            return self
        except BaseException:  # `__exit__` is not called after an error here
            self.end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is StoppedError:
            self._raised = False
        self.end()

    def end(self) -> None:
        """End the deadline, so that nothing is raised from now on.

        If a `StoppedError` is already scheduled, wait until it is raised, and drop it: if it were withdrawn before,
        CPython 3.11 would loop forever under a profiler.
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
        if self._signal and threading.get_ident() == self._thread:
            # For a signal that has already arrived, this first calls `_by_signal`, which does nothing any more. Later
            # signals are ignored.
            signal.signal(self._signal, signal.SIG_IGN)
            signal.signal(self._signal, signal.SIG_DFL)
            self._signal = 0

    def _watch(self) -> None:
        seconds = min(max(0.0, self._seconds), threading.TIMEOUT_MAX)
        while not self._over.wait(seconds):
            with self._lock:
                if not self._over.is_set():
                    self._raise()
            seconds = AGAIN_S

    def _raise(self) -> None:
        if self._signal:
            signal.pthread_kill(self._thread, self._signal)
            return
        self._raised = True
        raised = ctypes.py_object(StoppedError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)

    def _by_signal(self, number: int, frame: FrameType | None) -> None:
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # Ctrl-C takes precedence
        if not self._over.is_set() and not interrupted and not _is_ending(frame):
            raise StoppedError


def _is_ending(frame: FrameType | None) -> bool:
    """Whether this frame, or one of its callers, is ending a deadline. An exception there would leave the deadline
    running."""
    while frame is not None:
        if frame.f_code in (Deadline.__exit__.__code__, Deadline.end.__code__):
            return True
        frame = frame.f_back
    return False


def _unused_signal() -> int:
    """The number of a real-time signal that nothing handles, ignores or blocks. Returns 0 if there is no such signal,
    or if the system is not Linux.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn", "SigBlk")))
    masks = [int(mask, 16) for _, mask in lines]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
    free = (n for n in numbers if n not in blocked and not any(mask >> (n - 1) & 1 for mask in masks))
    return next((number for number in free if signal.getsignal(number) is signal.SIG_DFL), 0)
