"""Record which page is in which slot of the pool. This is bookkeeping only, without device, threads or files.

The invariant: all pages that a held page needs are held, and all pages that a resident page needs are resident. So a
page is evicted only if no held page needs it, and becomes resident only after the pages that it needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.streaming.page_graph import PageGraph

ABSENT, LOADING, ARRIVED, RESIDENT, LOST = range(5)
"""States of a page: not held; being read into its slot; read, but not visible to kernels yet; visible to kernels; could
not be read, but keeps its slot for another attempt, since held pages may need it."""


class Slots:
    """Slots and the pages in them.

    Attributes:
        graph: the pages.
        state: (pages,) uint8, as above.
        slot_of: (pages,) int32, -1 where the page is not held.
        dependents: (pages,) int32, the number of held pages that need this one directly.
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
        """The number of free slots."""
        return len(self._free)

    def held(self) -> npt.NDArray[np.int64]:
        """The pages in slots, in any state."""
        return self._page_in[self._page_in >= 0]

    def lacking(self, page: int) -> list[int]:
        """The pages to read for a page: itself and those that it needs, if absent or lost; coarser ones first."""
        if self.state[page] == ABSENT and (self.state[self.graph.needs.of(page)] == RESIDENT).all():
            return [page]  # the usual case, since the pages that it needs were wanted more
        seen, found, new = {page}, [], [page]
        while new:
            at = new.pop()
            if self.state[at] == RESIDENT:  # then the pages that it needs are resident, too
                continue
            if self.state[at] in (ABSENT, LOST):
                found.append(at)
            needed = [each for each in self.graph.needs.of(at).tolist() if each not in seen]
            seen.update(needed)
            new += needed
        return sorted(found)

    def take(self, page: int) -> int:
        """Take a free slot for an absent page; all pages that it needs must be held. A lost page keeps its own slot."""
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
        """Record that a loading page is in its slot."""
        assert self.state[page] == LOADING
        self.state[page] = ARRIVED
        self._arrived.add(page)

    def publish(self) -> list[int]:
        """Make arrived pages resident if all pages that they need are; return their numbers."""
        published = []
        for page in sorted(self._arrived):  # a page comes after the pages that it needs
            if (self.state[self.graph.needs.of(page)] == RESIDENT).all():
                self.state[page] = RESIDENT
                published.append(page)
        self._arrived.difference_update(published)
        return published

    def lose(self, page: int) -> None:
        """Record that a loading page could not be read."""
        assert self.state[page] == LOADING
        self.state[page] = LOST

    def give_up(self, page: int) -> None:
        """Free the slot of a page that no held page needs, and that is not loading."""
        assert self.state[page] not in (ABSENT, LOADING)
        assert not self.dependents[page]
        slot = int(self.slot_of[page])
        self.state[page], self.slot_of[page], self._page_in[slot] = ABSENT, -1, -1
        self._arrived.discard(page)
        self._free.append(slot)
        self.dependents[self.graph.needs.of(page)] -= 1

    def candidates(self) -> npt.NDArray[np.int64]:
        """Pages that may be evicted now: no held page needs them, and they are neither roots nor loading."""
        pages = self.held()
        fits = (self.state[pages] != LOADING) & (self.dependents[pages] == 0) & ~self.graph.roots[pages]
        return pages[fits]
