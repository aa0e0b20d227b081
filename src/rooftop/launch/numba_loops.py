"""Loops for the CPU, compiled by Numba at run time, and their division among threads.

Numba is no dependency of Rooftop: `pip install "rooftop[mat]"` brings it. What has a slower way of its own asks
`numba_is_installed`.
"""

from __future__ import annotations

import functools
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
    return find_spec("numba") is not None


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
    if errors:
        raise errors[0]
