"""Find the pages that a page needs directly. If these pages, and the pages that they need in turn, are in memory, the
page can be drawn even if all others are absent.

A renderer switches between a group of clusters and the clusters that replace the group, so it must be able to draw
both. So the page of a group needs the pages of all clusters that replace the group. Pages contain the groups from the
coarsest level to the finest, so a page needs only earlier pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PageNeeds:
    """The pages that each page needs directly. (The needed pages may need further pages.)

    Attributes:
        starts: (pages + 1,) the start of each page's list in `pages`.
        pages: the lists of needed pages, concatenated; each list in ascending order.
    """

    starts: Ints
    pages: Ints

    def of(self, page: int) -> Ints:
        """The pages that a page needs directly."""
        return self.pages[self.starts[page] : self.starts[page + 1]]

    def of_all(self, pages: Ints) -> tuple[Ints, Ints]:
        """For each page of `pages`, the pages that it needs directly. Returns the concatenated lists, and the length of
        each list."""
        counts = self.starts[pages + 1] - self.starts[pages]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.pages[np.repeat(self.starts[pages], counts) + within], counts

    @classmethod
    def between(cls, pages: int, fine: Ints, coarse: Ints) -> PageNeeds:
        """Build the table for `pages` pages from pairs: page `fine[k]` needs page `coarse[k]`. Repeated pairs, and
        pairs of a page with itself, are ignored."""
        pairs = np.unique(np.stack([fine, coarse], 1)[fine != coarse], axis=0).reshape(-1, 2)
        return cls(np.searchsorted(pairs[:, 0], np.arange(pages + 1)), pairs[:, 1].copy())

    @classmethod
    def joined(cls, each: Iterable[PageNeeds]) -> PageNeeds:
        """Combine the tables of several files, whose pages get consecutive numbers."""
        starts, pages, first, held = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], 0, 0
        for needs in each:
            starts.append(needs.starts[1:] + held)
            pages.append(needs.pages + first)
            first, held = first + len(needs.starts) - 1, held + len(needs.pages)
        return cls(np.concatenate(starts), np.concatenate(pages))

    def wrong_at(self) -> int | None:
        """The first page whose entry is invalid, or None. An entry is invalid if its list contains anything other than
        earlier pages, or if the list has a wrong start or end in `pages`."""
        count = len(self.starts) - 1
        starts_fit = (self.starts[1:] >= self.starts[:-1]) & (self.starts[1:] <= len(self.pages))
        if self.starts[0] != 0:
            return 0
        if not starts_fit.all():
            return int(np.argmin(starts_fit))
        if self.starts[-1] != len(self.pages):
            return count - 1
        owner = np.repeat(np.arange(count), np.diff(self.starts))
        wrong = owner[(self.pages < 0) | (self.pages >= owner)]
        return int(wrong[0]) if len(wrong) else None
