"""Compile and load the C++ code in `cpp/`, which repeats earlier calls without Python, and observe the calls that C++
will repeat.

The C++ code is compiled in the background, and stored in Rooftop's cache. The compilation starts at the latest at the
second call of an operator of `declare(..., known=...)` with the same facts (shapes, dtypes and so on) on a GPU.
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
"""Names of functions for whose last observed call no plan could be made, each with the reason."""
_extension = Extension("repeated_calls", Path(__file__).parent / "cpp" / "module.cpp")
has_asked = False

# ---- the compiled part ----------------------------------------------------------------------------------------------


def ask() -> None:
    """Start to provide the C++ module that repeats calls: load it from Rooftop's cache, or else compile it in the
    background. Later calls of this function do nothing.
    """
    global has_asked
    if not has_asked and asked() != "0":
        has_asked = True
        _extension.ask(_start, "Python makes all calls")


def build() -> None:
    """Compile the C++ module, unless Rooftop's cache contains it, and load the module.

    Raises:
        RuntimeError: there is no C++ compiler, the compiler failed, or the cache cannot be written.
    """
    _start(_extension.build())


def wait(seconds: float) -> bool:
    """Wait at most `seconds` for the compilation of the C++ module in the background. Return True if the compilation
    has ended or never began.
    """
    return _extension.wait(seconds)


def state() -> tuple[bool, str]:
    """Return the state of the C++ module for `rooftop doctor`: whether C++ can repeat calls, and the reason as one
    line.

    The first value is also True if the C++ module will only be compiled when it is first needed.
    """
    return _extension.state()


def calls_made() -> int:
    """The number of calls of Rooftop's functions in this process that C++ repeated, without Python. Backward passes
    count as calls too.
    """
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
"""The value in `seen` (see `is_due`) that marks facts whose calls are never observed again, because no plan can be made
for these calls.
"""


def is_due(seen: Counter[bytes], facts: bytes, at: int, varies: bool = False) -> bool:
    """Whether to observe this call of a function, for which C++ has no valid plan.

    Only call number `at` of the calls with the same facts (shapes, dtypes and so on) is observed. One plan fits all of
    these calls, or no plan can be made for any of them. If sizes vary, later calls are observed too, because their
    sizes may need another plan. This ends when no plan can be made for one of the calls.

    Args:
        seen: the number of calls so far, by their facts. This function adds the present call.
        facts: the facts of this call, as bytes.
        at: number of the call to observe, counted from 1.
        varies: whether sizes of the function's arguments vary from call to call.
    """
    if len(seen) >= known_calls.MOST_KNOWN:
        seen.clear()
    seen[facts] += 1
    return at <= seen[facts] < HOPELESS if varies else seen[facts] == at


@contextmanager
def teaching(
    given: Sequence[Tensor | int], owned: frozenset[int] = frozenset(), varying: Sequence[int] = ()
) -> Iterator[Lesson | None]:
    """Observe this thread while Python runs one call of a function within the `with` block. Yield the `Lesson`, or None
    if another thread is being observed.

    Args:
        given: the tensors among the call's arguments, and the numbers among them that vary from call to call.
        owned: indices of the tensors in `given` that the call may change.
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
    """Return a call's tensor arguments and varying number arguments, and for each of them what varies.

    Args:
        values: the call's arguments.
        varying: for each argument, FIRST, LAST, ITSELF or NONE, as in `teaching`. The result has the same codes.
    """
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
    """All tensors among a call's arguments, including tensors in lists and tuples. The C++ code finds them in the same
    order.
    """
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors_in(each)
    return found
