"""Send the positions of pages to the device: one launch for all pages that changed. The kernel reads the
changed rows from host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import warp as wp

from rooftop.launch.warp_launch import Launches
from rooftop.scene.rendering.host_rows import HostRows
from rooftop.scene.streaming import admission
from rooftop.scene.streaming.page_graph import Ints

MOST_ROWS = 1024  # maximum number of rows (changed pages) of one launch
COUNTS = (16, 128, MOST_ROWS)  # possible row counts of a launch: few, because `Launches` caches a launch for each count


class PageTable:
    """The positions of a pool's pages, in device memory.

    Attributes:
        page_at: (pages,) int64, the index of each page's first word in `Pool.words`; -1 if the page is not resident.
        refused: (1,) int32, the highest index of an invalid page, plus one; 0 if no page was invalid.
    """

    def __init__(self, pages: int, words: torch.Tensor) -> None:
        device = words.device
        self.page_at = torch.full((pages,), -1, dtype=torch.int64, device=device)
        self.refused = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows = HostRows((MOST_ROWS, admission.COLUMNS), torch.int64, device)
        self._votes = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        tensors = (self._votes, self.page_at, self.refused)
        self._arrays = (wp.from_torch(words), self._rows.there, *map(wp.from_torch, tensors))
        self._launches = Launches(device)

    def tell(self, pages: Ints, write: Callable[[Ints, Ints], None]) -> None:
        """Set the positions of pages. A page with invalid contents stays absent. The kernels run on the current stream,
        after the frames queued there, which still use the old positions.

        Args:
            pages: may contain a page twice.
            write: fills rows for these pages, as `Planner.write_rows`.
        """
        for first in range(0, len(pages), MOST_ROWS):
            some = pages[first : first + MOST_ROWS]
            count = next(each for each in COUNTS if each >= len(some))
            self._rows.wait()
            write(some, self._rows.rows[:count])
            self._launches(admission.admit_pages, count * admission.LANES, *self._arrays)
            self._rows.launched()
