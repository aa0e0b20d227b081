"""Loops for the CPU, compiled by Numba at run time, and their division among threads.

Numba is no dependency of Rooftop: `pip install "rooftop[mat]"` brings it. Whoever imports it, or a module of
`kept_loop`s, asks `numba_works` before and has a slower way where it does not.
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
    """Without importing it, which takes some tenths of a second."""
    return find_spec("numba") is not None


@functools.cache
def numba_works() -> bool:
    """Whether it is installed and can be imported; said once, if it cannot."""
    if not numba_is_installed():
        return False
    try:
        from numba.core.compiler_lock import global_compiler_lock as lock
    except Exception as error:  # as of a NumPy that it does not know
        warnings.warn(
            f"Numba is installed, but cannot be imported ({error}): without it operations on the CPU take longer. "
            "Update or uninstall it",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    # A process that forks while a thread compiles would leave the child a lock that nobody opens.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return True


def worth_a_loop(elements: int) -> bool:
    """Whether Numba is there, and starting a compiled loop takes less than working on so many elements without."""
    return elements >= LEAST_ELEMENTS and numba_is_installed()


def compiled_loop(source: str, name: str, constants: Mapping[str, Any]) -> Callable[..., None]:
    """The function of that name in a text, compiled when it is called first.

    Floating point is IEEE 754's, division included, and no product is fused with a sum. It runs without Python's lock.

    Args:
        source: Python that Numba understands.
        constants: what its global names mean.
    """
    import numba

    scope: dict[str, Any] = dict(constants)
    exec(source, scope)
    return numba.njit(nogil=True, error_model="numpy")(scope[name])  # type: ignore[no-any-return]


def kept_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a loop that is compiled once and kept on disk for other processes, where there is a place for it."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither beside its file nor in the user's folder
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]


def memory_of(x: Tensor) -> np.ndarray:
    """The memory of a CPU's tensor from its first to its last element, of one dimension: strides stay outside of
    loops, whose compiler could not use the processor's vectors otherwise."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)).numpy()


def run_part(loop: Callable[..., None], given: Sequence[Any]) -> Callable[[int, int], None]:
    """loop(first, last, *given) as the work of `in_threads`."""

    def work(first: int, last: int) -> None:
        loop(first, last, *given)

    return work


def in_threads(work: Callable[[int, int], None], count: int, most: int) -> None:
    """work(first, last) for consecutive parts of range(count), one for each of as many threads as torch would use.

    Args:
        most: threads at most.

    Raises:
        BaseException: the first that a thread has raised, once all have ended.
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
        errors.clear()  # they hold this frame, and it would hold them
