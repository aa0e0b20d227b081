"""Give way to a watched program's profiler: PyTorch allows one active profiler, and the program's own has priority.

A second profiler ends the first, whose records are lost. If a profiler's native result is freed after another profiler
has begun, the process may crash (see `rooftop.hardware.traces`), and the program decides when to free its profiler's
records. So after the program's first use of a profiler, Rooftop uses none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.autograd import profiler

from rooftop.hardware.traces import Trace

PROFILERS = (  # the methods that start each profiler
    (profiler.profile, "_prepare_trace"),
    (profiler.profile, "_start_trace"),
    (profiler.emit_nvtx, "__enter__"),
    (profiler.emit_itt, "__enter__"),
)


class ProgramProfilers:
    """While active (`with`), notice when the program begins to use a profiler of its own.

    Args:
        begins: called before the program's first profiler begins.

    Attributes:
        used: whether such a profiler has begun.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self.used = False
        self._begins = begins
        self._around = ExitStack()

    def __enter__(self) -> ProgramProfilers:
        for kind, name in PROFILERS:
            self._around.enter_context(patch.object(kind, name, self._noticing(getattr(kind, name))))
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()

    def _noticing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def begin(program_profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not Trace.beginning and not self.used:
                self.used = True
                self._begins()
            return original(program_profiler, *args, **kwargs)

        return begin
