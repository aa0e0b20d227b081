"""Exceptions that a program's signal handlers raise while our code runs on its behalf.

Code that must not end the program catches whatever goes wrong in itself. A handler that raises (a time limit by
SIGALRM, a request to stop) may run at any line, in such code too, and what it raised belongs to the program.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


def pass_on(error: BaseException) -> None:
    """Raise an error again that a signal handler of the program raised; do nothing with any other."""
    handlers = _handlers()
    trace = error.__traceback__
    while trace is not None and handlers:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _handlers() -> set[CodeType]:
    found = (_code(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def _code(handler: Any) -> CodeType | None:
    """What runs first when the handler is called; None for those of the system and of Python itself."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if function is None and callable(handler):
        function = type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
