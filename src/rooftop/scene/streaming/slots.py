"""Record which page is in which slot of the pool. This module uses no device, threads or files.

A page that has a slot is *held*. The invariant: all pages that a held page needs are held, and all pages that a
resident page needs are resident. So a page is evicted only if no held page needs it, and becomes resident only after
the pages that it needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.streaming.page_graph import PageGraph

Ints = npt.NDArray[np.int64]
NO_PAGES: Ints = np.zeros(0, np.int64)

ABSENT, LOADING, ARRIVED, RESIDENT, LOST = range(5)
"""States of a page. ABSENT: not held. LOADING: being read into its slot. ARRIVED: read, but not visible to kernels yet.
RESIDENT: visible to kernels. LOST: could not be read, but keeps its slot for another attempt, since held pages may need
the page.
"""


class Slots:
    """The slots of a pool, and which page is in each slot.

    Attributes:
        graph: all pages of the scene, and the pages that each page needs.
        state: (pages,) uint8: ABSENT, LOADING, ARRIVED, RESIDENT or LOST.
        slot_of: (pages,) int32, the slot of each page; -1 if the page is not held.
        dependents: (pages,) int32, for each page, the number of held pages that need this page directly.
        page_in: (slots,) int64, the page in each slot, or -1.
        arrived: the pages in the state ARRIVED, in any order.
        free_slots: (slots,) int64; the first `free` entries are the free slots, and the last of them is taken first.
    """

    def __init__(self, graph: PageGraph, count: int) -> None:
        self.graph, self.count = graph, count
        self.state = np.zeros(graph.count, np.uint8)
        self.slot_of = np.full(graph.count, -1, np.int32)
        self.dependents = np.zeros(graph.count, np.int32)
        self.page_in = np.full(count, -1, np.int64)
        self.free_slots = np.arange(count)[::-1].copy()  # in descending order, because the last is taken first
        self.free_count = np.array([count], np.int64)  # an array, because `page_reader.cpp` changes it too
        self.arrived = np.zeros(0, np.int64)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return int(self.free_count[0])

    def held(self) -> Ints:
        """The numbers of all pages that have a slot, in any state."""
        return self.page_in[self.page_in >= 0]

    def lacking(self, page: int) -> list[int]:
        """The pages that must be read so that a page can become resident: of the page itself and the pages that it
        needs, directly or indirectly, those that are absent or lost; coarser pages first."""
        if self.state[page] == ABSENT and (self.state[self.graph.needs.of(page)] == RESIDENT).all():
            return [page]  # the usual case, since the pages that it needs were wanted more and loaded earlier
        seen, found, new = {page}, [], [page]
        while new:
            at = new.pop()
            if self.state[at] == RESIDENT:  # if a page is resident, so are all pages that it needs
                continue
            if self.state[at] in (ABSENT, LOST):
                found.append(at)
            needed = [each for each in self.graph.needs.of(at).tolist() if each not in seen]
            seen.update(needed)
            new += needed
        return sorted(found)

    def take(self, pages: Ints) -> Ints:
        """Take a free slot for each of these pages that is absent, and return the slots of all these pages. The others
        must be lost; a lost page keeps its slot. A page must come after the pages that it needs, unless these have
        slots already."""
        state = self.state[pages]
        absent = pages[state == ABSENT]
        assert len(absent) + np.count_nonzero(state == LOST) == len(pages)
        left = self.free - len(absent)
        assert left >= 0
        slots = self.free_slots[left : self.free][::-1]
        self.slot_of[absent], self.page_in[slots] = slots, absent
        self.free_count[0] = left
        needed, _ = self.graph.needs.of_all(absent)
        np.add.at(self.dependents, needed, 1)
        self.state[pages] = LOADING
        assert (self.state[needed] != ABSENT).all()
        return self.slot_of[pages].astype(np.int64)

    def arrive(self, pages: Ints) -> None:
        """Record that pages in the state LOADING have arrived in their slots."""
        assert (self.state[pages] == LOADING).all()
        self.state[pages] = ARRIVED
        self.arrived = np.concatenate([self.arrived, pages])

    def publish(self) -> Ints:
        """Make arrived pages resident if all pages that they need are resident; return the pages that became resident,
        ascending."""
        waiting, published = self.arrived, [NO_PAGES]
        while len(waiting):
            needed, counts = self.graph.needs.of_all(waiting)
            absent = np.concatenate([[0], np.cumsum(self.state[needed] != RESIDENT)])
            ends = np.cumsum(counts)
            fits = absent[ends] == absent[ends - counts]
            if not fits.any():
                break
            self.state[waiting[fits]] = RESIDENT
            published.append(waiting[fits])
            waiting = waiting[~fits]
        self.arrived = waiting
        return np.sort(np.concatenate(published))

    def lose(self, pages: Ints) -> None:
        """Record that pages in the state LOADING could not be read; their state becomes LOST."""
        assert (self.state[pages] == LOADING).all()
        self.state[pages] = LOST

    def give_up(self, pages: Ints) -> None:
        """Free the slots of pages that no held page needs, and that are not loading."""
        assert not ((self.state[pages] == ABSENT) | (self.state[pages] == LOADING) | self.dependents[pages]).any()
        slots, count = self.slot_of[pages], self.free
        self.state[pages], self.slot_of[pages], self.page_in[slots] = ABSENT, -1, -1
        self.forget_absent()
        self.free_slots[count : count + len(pages)] = slots
        self.free_count[0] = count + len(pages)
        np.subtract.at(self.dependents, self.graph.needs.of_all(pages)[0], 1)

    def forget_absent(self) -> None:
        """Drop absent pages from `arrived`. Call this method after slots were freed."""
        if len(self.arrived):
            self.arrived = self.arrived[self.state[self.arrived] == ARRIVED]

    def candidates(self) -> Ints:
        """The pages that may be evicted now: pages that no held page needs, that are not root pages and not loading."""
        pages = self.held()
        fits = (self.state[pages] != LOADING) & (self.dependents[pages] == 0) & ~self.graph.roots[pages]
        return pages[fits]
