"""The profiler of a program that is observed: PyTorch has one, and it is the program's as soon as it wants it.

A second profiler beside a first one ends it, and what it has seen is lost. And the native result of a profiler that is
freed after another one has begun may end the process (see `rooftop.hardware.traces`); when a program frees what its
profiler saw is its own matter. So from the program's first use of a profiler on, there is none of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.autograd import profiler

from rooftop.hardware.traces import Trace

PROFILERS = (  # where each begins
    (profiler.profile, "_prepare_trace"),
    (profiler.profile, "_start_trace"),
    (profiler.emit_nvtx, "__enter__"),
    (profiler.emit_itt, "__enter__"),
)


class ProgramProfilers:
    """While active (`with`), notices when the program begins to use a profiler of its own.

    Args:
        begins: called before the first one begins, while none of the program's is there.

    Attributes:
        used: whether it has begun.
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
