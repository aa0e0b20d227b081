"""Decide which pages to load next and which to evict for them, from a frame's requests. No device, threads or files are
involved.

A frame *wants* a page if it would draw a group in the page. The page's `pixels` are the error in pixels of the coarser
geometry that the frame draws in place of the page. A page's *age* is the number of frames since a frame last wanted it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.streaming import page_reader
from rooftop.scene.streaming.slots import ABSENT, LOADING, LOST, NO_PAGES, RESIDENT, Slots

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

# a wanted page is evicted only for a page with more than this many times its `pixels`, so that two pages do not
# alternate
MARGIN = 1.25


@dataclass(frozen=True)
class Use:
    """How much the most recent frame wanted each page, and how long ago a frame wanted it.

    Attributes:
        pixels: (pages,) the error in pixels that each page's absence causes in that frame; 0 if the frame did not want
            the page.
        ages: (pages,) number of frames since a frame last wanted each page.
    """

    pixels: Floats
    ages: npt.NDArray[np.int32]


NO_USE = Use(np.zeros(0, np.float32), np.zeros(0, np.int32))  # for plans that evict nothing


@dataclass(frozen=True)
class Plan:
    """The pages to load and to evict. `Slots` already records these changes.

    Attributes:
        given_up: pages to evict.
        pages, slots: pages to read, and their slots.
        orders: for each of `pages`, its position in the order of reading. Pages with equal positions are read in
            ascending order of their numbers.
    """

    given_up: Ints
    pages: Ints
    slots: Ints
    orders: npt.NDArray[np.float64]


class Planner:
    """Decides which pages to load into which slots, and which to evict. The plans are made in C++ if the C++ module is
    compiled, else in Python, with the same results."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._books: Any = None

    def plan_some(self, pages: Ints, pixels: Floats, most: int, use: Callable[[], Use], urgent: bool) -> Plan:
        """Plan to read the most wanted pages, each with the pages that it needs.

        Args:
            pages, pixels: wanted pages and their `pixels`, the most wanted first.
            most: maximum number of pages to read, including the pages that the wanted pages need.
            use: returns how pages were used; it is called only if a slot must be freed.
            urgent: whether the plan may evict pages that the frame wants, but wants less than the new pages.
        """
        slots, books = self.slots, self._in_cpp()
        if books is None:
            return plan_in_python(slots, pages, pixels, most, use, urgent)
        plan = Plan(*books.plan_some(pages, pixels, most, use, urgent, MARGIN))
        if len(plan.given_up):
            slots.forget_absent()
        return plan

    def publish(self, arriving: Ints) -> Ints:
        """Record that the pages `arriving` are in their slots. Then make each page that has arrived, now or earlier,
        resident if all pages that it needs are resident. Return the pages that became resident."""
        slots, books = self.slots, self._in_cpp()
        if books is None:
            slots.arrive(arriving)
            return slots.publish()
        published, slots.arrived = books.publish(arriving, slots.arrived)
        return published  # type: ignore[no-any-return]

    def write_rows(self, pages: Ints, rows: Ints) -> None:
        """Write a row of `rows` for each of these pages: its number, its position in the pool or -1, and its limits.
        The remaining rows are marked as unused."""
        books = self._in_cpp()
        if books is None:
            rows_in_python(self.slots, pages, rows)
        else:
            books.write_rows(pages, self.slots.graph.limits, rows, layouts.PAGE_BYTES // 4)

    def _in_cpp(self) -> Any:
        """The C++ object that works on the arrays of `slots` in place; None while the C++ module is not compiled."""
        module = page_reader.compiled()
        if module is None:
            return None
        if self._books is None:
            slots, needs = self.slots, self.slots.graph.needs
            self._books = module.Books(
                *(needs.starts, needs.pages, slots.graph.roots, slots.state, slots.slot_of, slots.dependents),
                *(slots.page_in, slots.free_slots, slots.free_count),
            )
        return self._books


def plan_in_python(slots: Slots, pages: Ints, pixels: Floats, most: int, use: Callable[[], Use], urgent: bool) -> Plan:
    """Plan to read the most wanted pages, as `Planner.plan_some`. `plan_some` in `page_reader.cpp` makes the same
    plan."""
    given_up, loads, taken, victims = [NO_PAGES], [NO_PAGES], [NO_PAGES], None
    orders: list[float] = []
    for page, wanted in zip(pages.tolist(), pixels.tolist(), strict=True):
        chain = slots.lacking(page)
        if len(chain) > most - len(orders):
            break
        missing = sum(slots.slot_of[each] < 0 for each in chain) - slots.free
        if missing > 0:
            victims = victims or _Victims(slots, use(), 2 * most)
            keep = set(chain).union(*(slots.graph.needs.of(each).tolist() for each in chain))
            found = victims.take(missing, wanted if urgent else 0.0, keep)
            if found is None:
                break
            given_up.append(found)
        if chain:
            loads.append(np.array(chain))
            taken.append(slots.take(loads[-1]))
            orders += [-wanted] * len(chain)
    evicted, pages, slots_of_pages = (np.concatenate(each) for each in (given_up, loads, taken))
    return Plan(evicted, pages, slots_of_pages, np.array(orders))


def rows_in_python(slots: Slots, pages: Ints, rows: Ints) -> None:
    """Write the same rows as `write_rows` of `page_reader.cpp`: the number of each page, its position in the pool in
    words (-1 if it is not resident), and its limits."""
    places = slots.slot_of[pages].astype(np.int64) * (layouts.PAGE_BYTES // 4)
    rows[len(pages) :, 0] = -1
    rows[: len(pages), 0] = pages
    rows[: len(pages), 1] = np.where(slots.state[pages] == RESIDENT, places, -1)
    rows[: len(pages), 2:] = slots.graph.limits[pages]


class _Victims:
    """Pages of the pool in the order of eviction: first those that were not wanted for the longest time; on a tie, the
    least wanted; on a further tie, the finest."""

    def __init__(self, slots: Slots, use: Use, most: int) -> None:
        self.slots, self.use = slots, use
        pages = slots.candidates()
        # sort only the first `most` pages, and all pages that rank equal to the last of these
        if len(pages) > most:
            pixels = np.minimum(use.pixels[pages], np.float32(2**31)).astype(np.float64)
            worth = pixels - use.ages[pages] * 2.0**32
            pages = pages[worth <= np.partition(worth, most - 1)[most - 1]]
        self.pages = pages[np.lexsort((-pages, use.pixels[pages], -use.ages[pages]))].tolist()
        self.next = 0

    def take(self, count: int, pixels: float, keep: Collection[int]) -> Ints | None:
        """Evict the next `count` pages for a page whose absence causes an error of `pixels`, and return the evicted
        pages. If fewer may be evicted for it, evict nothing and return None. Pages in `keep` stay."""
        found: list[int] = []
        at = self.next
        while len(found) < count and at < len(self.pages):
            page = self.pages[at]
            if self.use.ages[page] == 0 and self.use.pixels[page] * MARGIN >= pixels:
                break
            taken = self.slots.state[page] in (ABSENT, LOADING)  # reserved or evicted by this plan
            if page not in keep and not self.slots.dependents[page] and not taken:
                found.append(page)
            at += 1
        if len(found) < count:
            return None
        self.next = at
        self.slots.give_up(np.array(found))
        return np.array(found)


def plan_all(slots: Slots, target: Mask, use: Use) -> Plan:
    """Plan to read all pages of a target that are absent or lost (an earlier attempt to read them failed). The target
    must fit into the slots. If the plan must evict pages, no page may be loading, since a loading page cannot be
    evicted.

    Args:
        target: (pages,) mask of the pages that must be resident, including all pages that they need and all root pages.
    """
    absent, lost = (target & (slots.state == state) for state in (ABSENT, LOST))
    given_up = give_up_beside(slots, target, use, int(absent.sum()) - slots.free)
    pages = np.flatnonzero(absent | lost)
    return Plan(given_up, pages, slots.take(pages), np.zeros(len(pages)))


def give_up_beside(slots: Slots, target: Mask, use: Use, count: int) -> Ints:
    """Evict `count` pages that are not in the mask `target`, or as many as there are. First evict pages that no
    held page needs, the oldest first; then the pages that only evicted pages needed."""
    given_up = [NO_PAGES]
    while count > 0:
        pages = slots.candidates()
        pages = pages[~target[pages]]
        if not len(pages):
            break
        pages = pages[np.lexsort((-pages, use.pixels[pages], -use.ages[pages]))][:count]
        slots.give_up(pages)
        given_up.append(pages)
        count -= len(pages)
    return np.concatenate(given_up)


def best_that_fit(slots: Slots, pixels: Floats) -> Mask:
    """Choose a mask (pages,) of the pages to hold in the pool: the root pages, and the most wanted pages with the pages
    that they need, until the next page does not fit. `pixels` says how much each page is wanted."""
    graph = slots.graph
    target = graph.roots.copy()
    held = int(target.sum())
    wanted = np.flatnonzero(pixels > 0)
    for page in wanted[np.lexsort((wanted, -pixels[wanted]))].tolist():
        if target[page]:
            continue
        chain, new = {page}, [page]
        while new:
            needed = [each for each in graph.needs.of(new.pop()).tolist() if not target[each] and each not in chain]
            chain.update(needed)
            new += needed
        if held + len(chain) > slots.count:
            break
        target[list(chain)] = True
        held += len(chain)
    return target
