"""Compile and load repeated_calls.cpp, which repeats earlier calls without Python, and observe the calls that it will
repeat.

The C++ code is compiled in the background, at the latest when a call of an operator of `declare(..., known=...)` first
repeats on a GPU, and stored in Rooftop's cache.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftop.launch import counters, known_calls, triton_launch
from rooftop.launch.compiled_kernels import is_watched
from rooftop.launch.cpp_extensions import Extension, asked
from rooftop.launch.lessons import ITSELF, NONE, Lesson, lesson_of

module: Any = None
"""The compiled C++ module; None until it is loaded."""
starting = Lock()
after_start: list[Callable[[], None]] = []
"""Functions to call when the C++ module is loaded. The caller holds the lock `starting`."""
reasons: dict[str, str] = {}
"""Names of functions whose last observed call could not be planned, each with the reason."""
_extension = Extension("repeated_calls", Path(__file__).with_name("repeated_calls.cpp"))
has_asked = False

# ---- the compiled part ----------------------------------------------------------------------------------------------


def ask() -> None:
    """Load the C++ module if the cache contains it, else compile it in the background. Later calls of this function do
    nothing.
    """
    global has_asked
    if not has_asked and asked() != "0":
        has_asked = True
        _extension.ask(_start, "Python makes all calls")


def build() -> None:
    """Compile the C++ module, unless the cache contains it, and load the module.

    Raises:
        RuntimeError: there is no C++ compiler, the compiler failed, or the cache cannot be written.
    """
    _start(_extension.build())


def wait(seconds: float) -> bool:
    """Wait at most this long for the compilation in the background. Return True if the compilation has ended or never
    began.
    """
    return _extension.wait(seconds)


def state() -> tuple[bool, str]:
    """Return whether repeated calls run without Python, now or later, and the reason, for `rooftop doctor`."""
    return _extension.state()


def calls_made() -> int:
    """The number of calls in this process that ran without Python. Calls of backward are included."""
    return 0 if module is None else int(module.calls_made())


if not triton_launch.INTERPRETED:
    known_calls.after_known.append(ask)


def _start(loaded: Any) -> None:
    global module
    with starting:
        if module is not None:
            return
        with_cuda = hasattr(torch._C, "_cuda_getDevice")
        loaded.start(
            {
                "parameter": torch.nn.Parameter,
                "counts": triton_launch._counters,
                "is_watched": is_watched,
                "profiles": torch._C._autograd._profiler_enabled,
                "forward_mode": forward_ad,
                "counters": counters.counters_now,
                "device": torch._C._cuda_getDevice if with_cuda else None,
                "stream": torch._C._cuda_getCurrentRawStream if with_cuda else None,
                "captures": torch._C._cuda_isCurrentStreamCapturing if with_cuda else None,
            }
        )
        with ThreadPoolExecutor(1) as thread:  # a new thread has no PyTorch modes, but this thread may have some
            thread.submit(loaded.note_keys, False).result()
            thread.submit(torch.inference_mode()(partial(loaded.note_keys, True))).result()
        module = loaded
        for each in after_start:
            each()


# ---- observing calls ------------------------------------------------------------------------------------------------


def _forked() -> None:
    if module is not None:
        module.set_teaching(False)


os.register_at_fork(after_in_child=_forked)


HOPELESS = 1 << 62
"""The count, in `is_due`, of calls that are never observed again, because they cannot be planned."""


def is_due(seen: Counter[bytes], facts: bytes, at: int, varies: bool = False) -> bool:
    """Whether to observe this call, for which C++ has no valid plan.

    Only call number `at` of those with the same facts (shapes, dtypes and so on) is observed, because all of them have
    the same plan, or none has a plan. If sizes vary, later calls are observed too, because their sizes may need another
    plan, until one of the calls cannot be planned.
    """
    if len(seen) >= known_calls.MOST_KNOWN:
        seen.clear()
    seen[facts] += 1
    return at <= seen[facts] < HOPELESS if varies else seen[facts] == at


@contextmanager
def teaching(
    given: Sequence[Tensor | int], owned: frozenset[int] = frozenset(), varying: Sequence[int] = ()
) -> Iterator[Lesson | None]:
    """Observe this thread while Python makes the call within the `with` block. Yield None if another thread is being
    observed.

    Args:
        given: the call's tensors, and its numbers that vary.
        owned: indices of the tensors that the call may change.
        varying: for each of `given`, which of its sizes varies: FIRST, LAST or NONE; ITSELF for a number that varies.
            An empty list means that no size varies.
    """
    with lesson_of(given, owned, varying) as lesson:
        if lesson is None:
            yield None
            return
        module.set_teaching(True)
        try:
            yield lesson
        finally:
            module.set_teaching(False)


def given_of(values: Sequence[Any], varying: Sequence[int]) -> tuple[list[Tensor | int], list[int]]:
    """Return the call's tensors and varying numbers, and for each of them the index of the size that varies."""
    if not varying:
        return list(tensors_in(values)), []
    given: list[Tensor | int] = []
    which: list[int] = []
    for place, each in enumerate(values):
        mine = varying[place] if place < len(varying) else NONE
        found = [each] if mine == ITSELF else tensors_in([each])
        given += found
        which += [mine] * len(found)
    return given, which


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """All tensors, including those in lists and tuples, in the order in which the C++ code finds the tensors."""
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors_in(each)
    return found
