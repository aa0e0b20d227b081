"""Track the GPU's position in a program. The host reads the position without waiting, even while a CUDA graph replays.

    progress = Progress(["awaiting the forward of micro-batch 0 at stage 0 of rank 0", "computing ..."], device)
    progress.mark(0)                       # launched on the stream before the work that the text describes
    progress.mark(progress.DONE)
    progress.words                         # the GPU's position now

A mark copies four bytes to host memory. A CUDA graph captures this copy like any other launch. Python runs far ahead of
a GPU, so the last launch is rarely what a rank waits for. After communication is aborted, the GPU runs the rest of its
queue. So `rooftop.parallel.join` queries all ranks before it aborts communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Progress:
    """The named positions in a GPU's program.

    Args:
        places: texts that complete "this rank was ...".
        device: a GPU.
    """

    DONE = -1

    def __init__(self, places: Iterable[str], device: torch.device) -> None:
        self._places = tuple(places)
        self._numbers = torch.arange(-1, len(self._places), dtype=torch.int32, device=device)
        self._at = torch.full((1,), self.DONE, dtype=torch.int32, pin_memory=True)
        _all.add(self)

    def mark(self, place: int) -> None:
        """Record on the stream that the GPU has reached the text with the index `place` in `places`. `DONE` means that
        the GPU has passed the last text."""
        self._at.copy_(self._numbers[place + 1 : place + 2], non_blocking=True)

    @property
    def words(self) -> str | None:
        """The text of the place that the GPU has marked last; None before the first mark and after the last."""
        place = int(self._at)
        return None if place == self.DONE else self._places[place]


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def all_places() -> list[str]:
    """For each program that a GPU of this process is still running, a text ("this rank was ...") that names the GPU's
    current place."""
    found = (progress.words for progress in list(_all))
    return [f"this rank was {words}" for words in found if words is not None]
