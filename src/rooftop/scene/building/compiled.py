"""Compile loops over triangles, vertices and bits with Numba.

A loop is compiled for one signature when its module is imported, and cached on disk for later processes. Workers are
forked later, so they never compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftop.errors import MissingExtraError

try:
    import numba
except ImportError as error:
    raise MissingExtraError(f'building a scene needs Numba: pip install "rooftop[scene]" ({error})') from error


def array(dtype: str, dimensions: int = 1) -> Any:
    """Numba's type of an array in C order that a loop reads; the array may be read-only."""
    return numba.types.Array(getattr(numba.types, dtype), dimensions, "C", readonly=True)


def output(dtype: str, dimensions: int = 1) -> Any:
    """Numba's type of an array in C order that a loop writes."""
    return numba.types.Array(getattr(numba.types, dtype), dimensions, "C")


def loop(*arguments: Any, result: Any = numba.types.void) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that compiles a loop.

    Multiplications and additions are not fused, so results do not depend on the processor.

    Args:
        arguments: the types of the loop's arguments.
        result: the type of the loop's result.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        signature = result(*arguments)
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # neither the file's folder nor the user's folder is writable
            return numba.njit(signature, nogil=True)(function)

    return compiled


def helper(function: Callable[..., Any]) -> Any:
    """Decorator that compiles a function that only loops call."""
    return numba.njit(nogil=True)(function)


INT = numba.types.int64
