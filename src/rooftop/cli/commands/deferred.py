"""Commands that import the code for their work only when they run. So help texts and wrong arguments need no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any


def done_by(place: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator that replaces a command's body with a call of the function at `place`, "module:name". The
    command keeps its name and docstring."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, **options: Any) -> Any:
            module, _, name = place.partition(":")
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        return run

    return decorate
