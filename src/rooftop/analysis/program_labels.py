"""Handle a watched program's profiler labels that are open when Rooftop's profilers begin or end.

A label (`torch.profiler.record_function`) that begins under one profiler and ends under the next writes to freed memory
of the first profiler (segmentation faults with PyTorch 2.11 to 2.14). A program may have labels open at the end of a
step: around a call of the model, around the step, around the whole loop. So Rooftop ends these labels before one of its
profilers begins or ends, and begins them again afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from rooftop.hardware.traces import Trace


class ProgramLabels:
    """While active (`with`), track the open labels of this thread, the only thread that Rooftop's profilers watch."""

    def __init__(self) -> None:
        self._thread = 0
        self._open: list[record_function] = []
        self._around = ExitStack()

    def __enter__(self) -> ProgramLabels:
        self._thread = threading.get_ident()
        # another `ProgramLabels` is active and tracks the same labels
        if Trace.switching is not nullcontext:
            return self
        self._enter, self._exit = record_function.__enter__, record_function.__exit__
        self._around.enter_context(patch.object(Trace, "switching", self._interrupted))
        self._around.enter_context(patch.object(record_function, "__enter__", self._entering()))
        self._around.enter_context(patch.object(record_function, "__exit__", self._leaving()))
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()
        self._open.clear()

    def _entering(self) -> Any:
        @wraps(self._enter)
        def __enter__(label: record_function) -> Any:
            entered = self._enter(label)
            if threading.get_ident() == self._thread:
                self._open.append(label)
            return entered

        return __enter__

    def _leaving(self) -> Any:
        @wraps(self._exit)
        def __exit__(label: record_function, *error: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._open = [other for other in self._open if other is not label]
            return self._exit(label, *error)

        return __exit__

    @contextmanager
    def _interrupted(self) -> Iterator[None]:
        """End all open labels before the block and begin them again after it."""
        labels = list(self._open) if threading.get_ident() == self._thread else []
        # beginning and ending a label call operators, which the program's dispatch modes must not intercept
        with _disable_current_modes():
            for label in reversed(labels):
                self._exit(label, None, None, None)
        try:
            yield
        finally:
            with _disable_current_modes():
                for label in labels:
                    self._enter(label)
