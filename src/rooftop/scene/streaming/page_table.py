"""Send the positions of pages to the device: one launch for all pages that changed. The kernel reads the host's
memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import warp as wp

from rooftop.launch.warp_launch import Launches
from rooftop.scene.rendering.host_rows import HostRows
from rooftop.scene.streaming import admission
from rooftop.scene.streaming.page_graph import Ints

MOST_ROWS = 1024  # most rows of one launch
COUNTS = (16, 128, MOST_ROWS)  # a launch has one of these numbers of rows, because `Launches` keeps one launch for each
ROWS_OF_A_FRAME = 64  # rows of the launch that begins a frame, with which a graph replays it
NO_PAGE = -1

Write = Callable[[Ints, Ints], None]
"""Fills rows for pages, as `Planner.write_rows`."""


class PageTable:
    """The positions of a pool's pages, in device memory.

    There are two ways to send positions. `tell` makes a launch. `stage` only writes host memory, for the next frame:
    its first launch, `admit`, reads it. That launch is part of the frame's CUDA graph, so the host does not make it.

    Attributes:
        page_at: (pages,) int64, the start of each page, or -1.
        refused: (1,) int32, number of an invalid page plus one, or 0.
    """

    def __init__(self, pages: int, words: torch.Tensor) -> None:
        device = words.device
        self.page_at = torch.full((pages,), -1, dtype=torch.int64, device=device)
        self.refused = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows, self._staged = (
            HostRows((count, admission.COLUMNS), torch.int64, device) for count in (MOST_ROWS, ROWS_OF_A_FRAME)
        )
        self._votes = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self._words, tensors = wp.from_torch(words), (self._votes, self.page_at, self.refused)
        self._tensors = tuple(map(wp.from_torch, tensors))
        self._launches = Launches(device)
        self._staged.rows[:, int(admission.PAGE)] = NO_PAGE

    def tell(self, pages: Ints, write: Write) -> None:
        """Set the positions of pages. An invalid page stays absent. Earlier frames must have ended.

        Args:
            pages: may contain a page twice.
        """
        for first in range(0, len(pages), MOST_ROWS):
            some = pages[first : first + MOST_ROWS]
            count = next(each for each in COUNTS if each >= len(some))
            self._rows.wait()
            write(some, self._rows.rows[:count])
            self._launch(count, self._rows)
            self._rows.launched()

    def stage(self, pages: Ints, write: Write) -> None:
        """Set the positions of at most ROWS_OF_A_FRAME pages at the next `admit`. No launch may read earlier rows any
        more."""
        write(pages, self._staged.rows)

    def unstage(self) -> None:
        """Empty the staged rows, which no launch may read any more."""
        self._staged.rows[:, int(admission.PAGE)] = NO_PAGE

    def admit(self) -> None:
        """Launch the kernel that sets the positions of the staged pages."""
        self._launch(ROWS_OF_A_FRAME, self._staged)

    def _launch(self, rows: int, source: HostRows) -> None:
        self._launches(admission.admit_pages, rows * admission.LANES, self._words, source.there, *self._tensors)
