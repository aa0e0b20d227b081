"""Read the raw events of PyTorch's profiler, without the profiler's own processing.

- At the end of its `with` block PyTorch's profiler turns its events into a tree of Python objects. Making the tree
  takes 3 s for 15,000 operators. This module does not make the tree.
- The native result is freed immediately. PyTorch's profiler is part of a reference cycle, so Python would free its
  result at some later collection. If another profiler has begun by then, Kineto's destructor crashes the process with
  a segmentation fault (seen with PyTorch 2.11 and 2.13).
- On a GPU, CUPTI is detached afterwards, because it would slow the program down (see `cupti`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import _disable_current_modes

from rooftop.hardware import cupti
from rooftop.user_paths import user_path

# set before the profiler's first use: without this, its native part prints to stderr at each start
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def let_profiler_say_its_word() -> None:
    """Suppress the first of the messages that PyTorch's profiler prints when the program releases a memory block that
    was not allocated under the profiler. PyTorch prints a message for the first such block, and for every thousandth.

    Call this before a watched program begins, because output to stderr during this call (0.1 ms) is lost.
    """
    block = torch.empty(1, device="cpu")
    try:
        heard = os.dup(2)
    except OSError:  # stderr is closed, so the message cannot appear
        return
    silence = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silence, 2)
        with Trace(torch.device("cpu"), profile_memory=True):
            del block
    finally:
        os.dup2(heard, 2)
        os.close(heard)
        os.close(silence)


class Label:
    """A profiler label around a `with` block, like `torch.profiler.record_function`.

    PyTorch begins and ends a label with operators. These operators are hidden from the program's dispatch modes.
    """

    def __init__(self, name: str) -> None:
        self._label = record_function(name)

    def __enter__(self) -> None:
        with _unseen():
            self._label.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _unseen():
            self._label.__exit__(kind, error, tb)


def _unseen() -> AbstractContextManager[Any]:
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


class Trace:
    """Run PyTorch's profiler around a `with` block.

    Args:
        device: if this is a GPU, its work is recorded.
        host: whether to also record operators, labels and calls of the CUDA runtime.
        save_to: a file for the events in Chrome's format, which Perfetto opens.
        read: called with the native result at the end of the block. The native result is freed when `read` returns.
        options: options of `torch.profiler.profile` (`profile_memory`, `record_shapes`).

    Attributes:
        events: all events of host and device, in no particular order. Available after the block.
        found: the result of `read`.
        beginning: whether a profiler of this class is starting now.
        switching: returns a context manager, which this class enters while its profiler starts and while it ends. Other
            modules may replace this function.
    """

    beginning: ClassVar[bool] = False
    switching: ClassVar[Callable[[], AbstractContextManager[Any]]] = nullcontext

    def __init__(
        self,
        device: torch.device,
        *,
        host: bool = True,
        save_to: str | os.PathLike[str] | None = None,
        read: Callable[[Any], Any] = lambda results: None,
        **options: Any,
    ) -> None:
        self.events: Sequence[Any] = ()
        self.found: Any = None
        self._device, self._save_to, self._read = device, save_to, read
        activities = [
            *([ProfilerActivity.CPU] if host else []),
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profiler = profile(activities=activities, acc_events=True, **options)

    def __enter__(self) -> Trace:
        Trace.beginning = True
        try:
            with Trace.switching():
                self._profiler.__enter__()
        finally:
            Trace.beginning = False
        inner: Any = self._profiler.profiler
        inner._parse_kineto_results = lambda *results, **options: EventList([])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with Trace.switching():
            self._profiler.__exit__(kind, error, tb)
        inner: Any = self._profiler.profiler
        try:
            if error is None:
                self.events = inner.kineto_results.events()
                self.found = self._read(inner.kineto_results)
                if self._save_to is not None:
                    self._profiler.export_chrome_trace(os.fspath(user_path(self._save_to)))
        finally:
            inner.kineto_results = None
            if self._device.type == "cuda":
                cupti.detach()
