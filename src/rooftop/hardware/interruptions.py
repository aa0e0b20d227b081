"""Pass on exceptions from a program's signal handlers that are raised while Rooftop's code runs for the program.

Rooftop's code that observes a program must not end the program, so it catches all errors. A signal handler (a time
limit by SIGALRM, a request to stop) may raise at any line, even in Rooftop's code. The handler's exception is meant for
the program.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


def pass_on(error: BaseException) -> None:
    """Raise an error again if a signal handler of the program raised it. Ignore any other error."""
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
    """The code object of a signal handler; None for handlers of the system and of Python itself."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if function is None and callable(handler):
        function = type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
