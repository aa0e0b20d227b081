"""Commands whose work is imported when it is done: their help and wrong calls appear without loading torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any


def done_by(place: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a command, whose name and docstring it keeps; it is done by the function at "module:name"."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, **options: Any) -> Any:
            module, _, name = place.partition(":")
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        return run

    return decorate
