"""Which page is in which slot of the pool. Plain bookkeeping: no device, no threads, no files.

What must hold at all times: a page that is held has all that it needs held, and a page that is resident has all that it
needs resident. So a page is given up only if no held page needs it, and becomes resident only after what it needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.streaming.page_graph import PageGraph

ABSENT, LOADING, ARRIVED, RESIDENT, LOST = range(5)
"""Of a page: not held; being read into its slot; there, but not for kernels yet; kernels may read it; it could not be
read, and has its slot to be read again, since pages that are held may need it."""


class Slots:
    """Slots and what they hold.

    Attributes:
        graph: the pages.
        state: (pages,) uint8, as above.
        slot_of: (pages,) int32, -1 where the page is not held.
        dependents: (pages,) int32, how many held pages need this one directly.
    """

    def __init__(self, graph: PageGraph, count: int) -> None:
        self.graph, self.count = graph, count
        self.state = np.zeros(graph.count, np.uint8)
        self.slot_of = np.full(graph.count, -1, np.int32)
        self.dependents = np.zeros(graph.count, np.int32)
        self._page_in = np.full(count, -1, np.int64)
        self._free = list(range(count))[::-1]  # the lowest is taken first
        self._arrived: set[int] = set()

    @property
    def free(self) -> int:
        """How many slots hold nothing."""
        return len(self._free)

    def held(self) -> npt.NDArray[np.int64]:
        """The pages in slots, in any state."""
        return self._page_in[self._page_in >= 0]

    def lacking(self, page: int) -> list[int]:
        """What has to be read for a page: itself and what it needs, where absent or lost; coarser ones first."""
        if self.state[page] == ABSENT and (self.state[self.graph.needs.of(page)] == RESIDENT).all():
            return [page]  # nearly always: what it needs was wanted more
        seen, found, new = {page}, [], [page]
        while new:
            at = new.pop()
            if self.state[at] == RESIDENT:  # so is what it needs
                continue
            if self.state[at] in (ABSENT, LOST):
                found.append(at)
            needed = [each for each in self.graph.needs.of(at).tolist() if each not in seen]
            seen.update(needed)
            new += needed
        return sorted(found)

    def take(self, page: int) -> int:
        """A free slot for an absent page, all of whose needs are held; the slot that a lost page has."""
        needs = self.graph.needs.of(page)
        assert self.state[page] in (ABSENT, LOST)
        assert (self.state[needs] != ABSENT).all()
        if self.state[page] == ABSENT:
            slot = self._free.pop()
            self.slot_of[page], self._page_in[slot] = slot, page
            self.dependents[needs] += 1
        self.state[page] = LOADING
        return int(self.slot_of[page])

    def arrive(self, page: int) -> None:
        """A page that was loading is in its slot."""
        assert self.state[page] == LOADING
        self.state[page] = ARRIVED
        self._arrived.add(page)

    def publish(self) -> list[int]:
        """Pages that have arrived, and all of whose needs are resident, become resident; their numbers."""
        published = []
        for page in sorted(self._arrived):  # a page comes after what it needs
            if (self.state[self.graph.needs.of(page)] == RESIDENT).all():
                self.state[page] = RESIDENT
                published.append(page)
        self._arrived.difference_update(published)
        return published

    def lose(self, page: int) -> None:
        """A page that was loading could not be read."""
        assert self.state[page] == LOADING
        self.state[page] = LOST

    def give_up(self, page: int) -> None:
        """The slot of a page that no held page needs, and that is not loading, holds nothing any more."""
        assert self.state[page] not in (ABSENT, LOADING)
        assert not self.dependents[page]
        slot = int(self.slot_of[page])
        self.state[page], self.slot_of[page], self._page_in[slot] = ABSENT, -1, -1
        self._arrived.discard(page)
        self._free.append(slot)
        self.dependents[self.graph.needs.of(page)] -= 1

    def candidates(self) -> npt.NDArray[np.int64]:
        """Pages that may be given up now: no held page needs them, they are no roots and not loading."""
        pages = self.held()
        fits = (self.state[pages] != LOADING) & (self.dependents[pages] == 0) & ~self.graph.roots[pages]
        return pages[fits]
