"""Send the positions of pages to the device: one copy and two launches for all pages that changed."""

from __future__ import annotations

import torch
import warp as wp

from rooftop.launch.warp_launch import Launches
from rooftop.scene.streaming import admission
from rooftop.scene.streaming.page_graph import Ints

MOST_ROWS = 1024  # most rows of one copy


class PageTable:
    """The positions of a pool's pages, in device memory.

    Attributes:
        page_at: (pages,) int64, the start of each page, or -1.
        refused: (1,) int32, number of an invalid page plus one, or 0.
    """

    def __init__(self, pages: int, words: torch.Tensor, limits: Ints) -> None:
        device, on_gpu = words.device, words.device.type == "cuda"
        self.page_at = torch.full((pages,), -1, dtype=torch.int64, device=device)
        self.refused = torch.zeros(1, dtype=torch.int32, device=device)
        self._limits = limits
        shape = (MOST_ROWS, admission.COLUMNS)
        self._here = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._there = torch.empty(shape, dtype=torch.int64, device=device)
        self._wrong = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self._rows = self._here.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        tensors = (words, self._there, self._wrong, self.page_at, self.refused)
        self._arrays = tuple(wp.from_torch(each) for each in tensors)
        self._launches = Launches(device)

    def tell(self, pages: Ints, places: Ints) -> None:
        """Set the positions of pages; -1 means absent. An invalid page stays absent. Earlier frames must have ended."""
        for first in range(0, len(pages), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            self._tell_some(pages[part], places[part])

    def _tell_some(self, pages: Ints, places: Ints) -> None:
        count = 1 << (len(pages) - 1).bit_length()  # rounded to one of few values: see `Launches`
        if self._copied is not None:
            self._copied.synchronize()  # usually long ago
        rows = self._rows[:count]
        rows[len(pages) :, admission.PAGE] = -1
        rows[: len(pages), admission.PAGE], rows[: len(pages), admission.PLACE] = pages, places
        rows[: len(pages), admission.WORDS :] = self._limits[pages]
        self._there[:count].copy_(self._here[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._there.device))
        words, arriving, wrong, page_at, refused = self._arrays
        self._launches(admission.check_pages, count * admission.LANES, words, arriving, wrong)
        self._launches(admission.admit_pages, count, arriving, wrong, page_at, refused)
