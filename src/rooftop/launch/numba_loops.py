"""Loops for the CPU, which Numba compiles at run time, and which run in several threads.

Numba is an optional dependency, which `pip install "rooftop[mat]"` installs. A caller calls `numba_works` before it
imports Numba or a module with a `kept_loop`. If `numba_works` returns False, the caller computes without Numba, more
slowly.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_ELEMENTS = 1 << 14


@functools.cache
def numba_is_installed() -> bool:
    """Whether Numba is installed. The function does not import Numba, because an import takes some tenths of
    a second.
    """
    return find_spec("numba") is not None


@functools.cache
def numba_works() -> bool:
    """Whether Numba is installed and can be imported. A failed import causes one warning."""
    if not numba_is_installed():
        return False
    try:
        from numba.core.compiler_lock import global_compiler_lock as lock
    except Exception as error:  # for example if Numba does not support this NumPy
        warnings.warn(
            f"Numba is installed, but cannot be imported ({error}), so operations on the CPU take longer. "
            "Update or uninstall Numba",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    # If a process forks while a thread compiles, the child would inherit a lock that no thread releases.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return True


def worth_a_loop(elements: int) -> bool:
    """Whether to use a compiled loop: there are at least `LEAST_ELEMENTS` elements, and Numba is installed."""
    return elements >= LEAST_ELEMENTS and numba_is_installed()


def compiled_loop(source: str, name: str, constants: Mapping[str, Any]) -> Callable[..., None]:
    """Return the function of this name from a source text, which is compiled at the first call.

    Floating-point arithmetic follows IEEE 754, including division, and a product is never fused with a sum. The
    function runs without the GIL.

    Args:
        source: Python code that Numba can compile.
        constants: the values of the function's global names.
    """
    import numba

    scope: dict[str, Any] = dict(constants)
    exec(source, scope)
    return numba.njit(nogil=True, error_model="numpy")(scope[name])  # type: ignore[no-any-return]


def kept_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a loop that is compiled once and, if possible, stored on disk for other processes."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither the file's folder nor the user's folder is writable
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]


def memory_of(x: Tensor) -> np.ndarray:
    """The memory of a CPU tensor from its first to its last element, as a one-dimensional array. Loops over the array
    have no strides, so the compiler can vectorize them.
    """
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)).numpy()


def run_part(loop: Callable[..., None], given: Sequence[Any]) -> Callable[[int, int], None]:
    """Return a function of (first, last) that runs the compiled loop on the indices `first` to `last` - 1, as
    loop(first, last, *given). `in_threads` calls this function.
    """

    def work(first: int, last: int) -> None:
        loop(first, last, *given)

    return work


def in_threads(work: Callable[[int, int], None], count: int, most: int) -> None:
    """Call work(first, last) for consecutive parts of range(count), in as many threads as PyTorch uses.

    Args:
        most: the maximum number of threads.

    Raises:
        BaseException: the exception that a thread raised first, raised again after all threads have ended.
    """
    threads = max(1, min(torch.get_num_threads(), most, count))
    bounds = [count * n // threads for n in range(threads + 1)]
    errors: list[BaseException] = []

    def part(n: int) -> None:
        try:
            work(bounds[n], bounds[n + 1])
        except BaseException as error:
            errors.append(error)

    others = [Thread(target=part, args=(n,)) for n in range(1, threads)]
    for thread in others:
        thread.start()
    part(0)
    for thread in others:
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # breaks a reference cycle between the exceptions and this frame
