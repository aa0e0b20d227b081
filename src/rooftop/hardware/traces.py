"""What PyTorch's profiler sees: its raw events, and nothing that it would make of them.

At the end of its `with` block PyTorch's profiler turns its events into a tree of Python objects. Nobody here reads it,
and of 15,000 operators it takes 3 s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

# The profiler's native part announces itself on stderr at each start unless told not to before it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Trace:
    """The profiler around a `with` block; `events` afterwards.

    Args:
        host: operators, labels and calls of the CUDA runtime, too. device: what runs on a GPU, if it is one.
        options: of `torch.profiler.profile` (`profile_memory`, `record_shapes`).
    """

    def __init__(self, device: torch.device, *, host: bool = True, **options: Any) -> None:
        self._device = device
        activities = [
            *([ProfilerActivity.CPU] if host else []),
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profiler = profile(activities=activities, acc_events=True, **options)

    def __enter__(self) -> Trace:
        self._profiler.__enter__()
        inner: Any = self._profiler.profiler
        inner._parse_kineto_results = lambda *results, **options: EventList([])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.__exit__(kind, error, tb)

    @property
    def results(self) -> Any:
        """What the profiler's native part returned."""
        inner: Any = self._profiler.profiler
        return inner.kineto_results

    @property
    def events(self) -> Sequence[Any]:
        """All events, of host and device, in no order."""
        found: Sequence[Any] = self.results.events()
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them in Chrome's format, which Perfetto opens."""
        self._profiler.export_chrome_trace(os.fspath(path))
