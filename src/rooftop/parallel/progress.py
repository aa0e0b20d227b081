"""The GPU's present position, which the host reads without waiting, even while a CUDA graph replays.

    progress = Progress(["awaiting the forward of micro-batch 0 at stage 0 of rank 0", "computing ..."], device)
    progress.mark(0)                       # in the stream, before the work that the words name
    progress.mark(progress.DONE)
    progress.words                         # where the GPU is now

A mark is a copy of four bytes into the host's memory, which a graph contains like any other launch. Python runs far
ahead of a GPU, so the last launch is rarely what a rank waits for. And after communication is aborted, the GPU runs the
rest of its queue. So `rooftop.parallel.join` queries all ranks before it aborts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Progress:
    """Named places in a GPU's work.

    Args:
        places: words that complete "this rank was ...".
        device: a GPU.
    """

    DONE = -1

    def __init__(self, places: Iterable[str], device: torch.device) -> None:
        self._places = tuple(places)
        self._numbers = torch.arange(-1, len(self._places), dtype=torch.int32, device=device)
        self._at = torch.full((1,), self.DONE, dtype=torch.int32, pin_memory=True)
        _all.add(self)

    def mark(self, place: int) -> None:
        """Record that the stream has reached a place or, with `DONE`, has passed the last one."""
        self._at.copy_(self._numbers[place + 1 : place + 2], non_blocking=True)

    @property
    def words(self) -> str | None:
        """The present place; None: past the last place."""
        place = int(self._at)
        return None if place == self.DONE else self._places[place]


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def all_places() -> list[str]:
    """The places of all GPUs of this process that have one, in sentences."""
    found = (progress.words for progress in list(_all))
    return [f"this rank was {words}" for words in found if words is not None]
