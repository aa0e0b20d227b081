"""Commands that import the code for their work only when they run. So help texts and wrong arguments need no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any


def done_by(place: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command whose work the function at "module:name" does. The command keeps its name and docstring."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, **options: Any) -> Any:
            module, _, name = place.partition(":")
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        return run

    return decorate
