"""What a GPU is at, seen from the host without waiting for it: also while a CUDA graph replays what nobody launches.

    progress = Progress(["awaiting the forward of micro-batch 0 at stage 0 of rank 0", "computing ..."], device)
    progress.mark(0)                       # in the stream, before what the words name
    progress.mark(progress.DONE)
    progress.words                         # where the GPU is now

A mark is a copy of four bytes into memory of the host, which a graph holds like any other launch. Python is far ahead
of a GPU, so what it launched last is not what a rank waits for. Once communication is aborted the GPU runs on through
what is left, so `rooftop.parallel.join` asks all of them before it aborts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Progress:
    """Places in what a GPU does.

    Args:
        places: in words, that complete "this rank was ...".
        device: a GPU.
    """

    DONE = -1

    def __init__(self, places: Iterable[str], device: torch.device) -> None:
        self._places = tuple(places)
        self._numbers = torch.arange(-1, len(self._places), dtype=torch.int32, device=device)
        self._at = torch.full((1,), self.DONE, dtype=torch.int32, pin_memory=True)
        _all.add(self)

    def mark(self, place: int) -> None:
        """The stream has come to a place, or with `DONE` past the last one."""
        self._at.copy_(self._numbers[place + 1 : place + 2], non_blocking=True)

    @property
    def words(self) -> str | None:
        """Where it is now; None: past the last place."""
        place = int(self._at)
        return None if place == self.DONE else self._places[place]


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def all_places() -> list[str]:
    """Where all GPUs of this process are that are within something, in sentences."""
    found = (progress.words for progress in list(_all))
    return [f"this rank was {words}" for words in found if words is not None]
