"""The pool of slots of 128 KB on the device, filled with the pages that frames request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rooftop.errors import GeometryFileError, InputError
from rooftop.scene import layouts
from rooftop.scene.arguments import whole_number
from rooftop.scene.gbuffers import StreamingStats
from rooftop.scene.streaming.answers import Answer, RequestBuffers
from rooftop.scene.streaming.loading import SLOT_WORDS, Arrivals, Loader
from rooftop.scene.streaming.page_graph import Ints, PageGraph
from rooftop.scene.streaming.page_table import PageTable
from rooftop.scene.streaming.plans import NO_USE, Plan, Planner, Use, best_that_fit, give_up_beside, plan_all
from rooftop.scene.streaming.slots import ABSENT, NO_PAGES, RESIDENT, Slots

MOST_WORDS = 2**31 - 1  # length limit of a Warp array
MOST_OF_A_FRAME = 64  # maximum number of pages that a call of `ask` requests; 8 threads read them in about 1 ms
MOST_IN_FLIGHT = 256  # maximum number of pages in flight; 8 threads read them in a few frames, and each occupies a slot
AT_ONCE, AHEAD = 0.0, 1.0  # urgencies: pages that a frame waits for are read before pages that later frames may need

Mask = npt.NDArray[np.bool_]


class Pool:
    """The resident pages of a scene's meshes, in a fixed number of slots.

    A frame calls `begin`, draws, reads the answer, and then calls either `ask` or `load` for the missing pages.

    Attributes:
        graph: all pages of the scene's meshes, and the pages that each page needs.
        slots: which page is in which slot.
        loader: the threads that read pages.
        words: (slots * SLOT_WORDS + 2,) int32, the array of `buffers.Resident`.
        page_at: (pages,) int64, the index of each page's first word in `words`; -1 if the page is not resident.
        requests: the page requests of the culling kernels.
        is_new: whether some root pages may still be absent.
    """

    def __init__(self, graph: PageGraph, pool_bytes: int, device: torch.device) -> None:
        self.graph = graph
        count = slots_of(self.graph, pool_bytes)
        self.slots = Slots(self.graph, count)
        # Two more words, because a read of two words may begin at the last word.
        self.words = torch.empty(count * SLOT_WORDS + 2, dtype=torch.int32, device=device)
        # A Warp array has at most MOST_WORDS words; kernels also read the words beyond these.
        self._table = PageTable(self.graph.count, self.words[:MOST_WORDS])
        self.page_at = self._table.page_at
        self.requests = RequestBuffers(self.graph, self.page_at, self._table.refused)
        self.loader = Loader(self.graph, self.words)
        self.planner = Planner(self.slots)
        self._changed: list[Ints] = []  # pages whose position the device does not know yet
        # pages and bytes loaded, and pages evicted, since the last statistics
        self._loaded = self._loaded_bytes = self._evicted = 0
        self.is_new = True
        self._carry_out(plan_all(self.slots, self.graph.roots, NO_USE), AT_ONCE)

    @property
    def is_behind(self) -> bool:
        """Whether `begin` must be called before any culling: root pages may be absent, or the device does not know yet
        that pages were evicted, although their slots are being overwritten."""
        return self.is_new or bool(self._changed)

    def begin(self) -> None:
        """Begin a frame: arrived pages become resident. This method waits only for root pages.

        Raises:
            GeometryFileError: a page could not be read, or is invalid.
        """
        if self.is_new:
            self.load(self.graph.roots)
            return
        self._take(self.loader.arrived())
        self._tell()

    def ask(self, answer: Answer, urgent: bool = True) -> None:
        """Start to load missing pages, the most wanted first, until this call has requested MOST_OF_A_FRAME pages,
        MOST_IN_FLIGHT pages are in flight, or no slot can be freed. `urgent` says whether a displayed frame lacked
        these pages. If not, they are read after urgent pages, and no page that the frame wants is evicted for them."""
        most = min(MOST_OF_A_FRAME, min(MOST_IN_FLIGHT, self.slots.count) - self.loader.in_flight)
        # consider only this many pages, which suffices even if half of them are in flight
        first = slice(2 * MOST_IN_FLIGHT)
        pages, pixels = answer.missing[first], answer.pixels[first]
        failures: list[BaseException] = []

        def use() -> Use:
            """How pages were used. If reading this fails, the result says that every page is wanted. Then the planner
            evicts no more pages, and its plan so far is carried out."""
            try:
                return self.requests.use()
            except BaseException as error:
                failures.append(error)
                return Use(np.full(self.graph.count, np.inf, np.float32), np.zeros(self.graph.count, np.int32))

        plan = self.planner.plan_some(pages, pixels, most, use, urgent)
        self._carry_out(plan, AT_ONCE if urgent else AHEAD)
        if failures:
            raise failures[0]

    def target(self, first: bool = False) -> Mask | None:
        """A mask (pages,) of the root pages, the pages that the most recent frame wanted (with `first`, its first
        pass), and the pages that these need. None if the pages of this mask do not fit into the pool.
        """
        target = self.graph.roots | self.graph.with_needs(self.requests.use(first).pixels > 0)
        return target if target.sum() <= self.slots.count else None

    def resident(self) -> Mask:
        """A mask (pages,) of the pages that a frame queued now can draw."""
        return self.slots.state == RESIDENT

    def has(self, target: Mask) -> bool:
        """Whether all pages of the mask `target` (pages,) are resident."""
        return bool((self.slots.state[target] == RESIDENT).all())

    def best_target(self) -> Mask:
        """A mask (pages,) of the pages to load: the root pages, and the most wanted pages with the pages that they
        need, until the next page does not fit."""
        return best_that_fit(self.slots, self.requests.use().pixels)

    def load(self, target: Mask, alone: bool = False) -> None:
        """Load all absent pages of the mask `target` (pages,), and wait for them. With `alone`, all other pages are
        evicted.

        Raises:
            GeometryFileError: a page could not be read, or is invalid.
        """
        others = NO_PAGES
        if alone or np.count_nonzero(target & (self.slots.state == ABSENT)) > self.slots.free:
            self._take(self.loader.wait())  # a page that is being read cannot be evicted
            use = self.requests.use()
            others = give_up_beside(self.slots, target, use, self.slots.count) if alone else NO_PAGES
        else:
            use = NO_USE
        plan = plan_all(self.slots, target, use)
        self._carry_out(replace(plan, given_up=np.concatenate([others, plan.given_up])), AT_ONCE)
        self._take(self.loader.wait())
        self.is_new = False
        self._tell()

    def stats(self, answer: Answer, pixel_error: float) -> StreamingStats:
        """Statistics of a frame, and of the pages loaded and evicted since the last call of this method."""
        resident = int(np.count_nonzero(self.slots.state == RESIDENT))
        stats = StreamingStats(
            wanted=answer.wanted,
            missing=len(answer.missing),
            resident=resident,
            loaded=self._loaded,
            evicted=self._evicted,
            loaded_bytes=self._loaded_bytes,
            resident_bytes=resident * layouts.PAGE_BYTES,
            pool_bytes=self.slots.count * layouts.PAGE_BYTES,
            error_pixels=max([pixel_error, *answer.pixels[:1].tolist()]),
        )
        self._loaded = self._loaded_bytes = self._evicted = 0
        return stats

    def close(self) -> None:
        """End the threads and close the files."""
        self.loader.close()

    def _carry_out(self, plan: Plan, urgency: float) -> None:
        """Carry out a plan: record the pages that it evicts, and start to read its new pages. Plans with the smallest
        `urgency` are read first."""
        if len(plan.given_up):
            self._evicted += len(plan.given_up)
            self._changed.append(plan.given_up)
            try:
                self._wait_for_frames()  # the previous frame may still read these slots
            except BaseException:
                self.slots.lose(plan.pages)  # later plans read these pages; nobody is reading them now
                raise
        self.loader.load(plan.pages, plan.slots, urgency, plan.orders)

    def _wait_for_frames(self) -> None:
        """Wait until the device has drawn all frames that are queued. On a CPU, all frames are drawn already."""
        if self.words.device.type == "cuda":
            torch.cuda.current_stream(self.words.device).synchronize()

    def _take(self, arrivals: Arrivals) -> None:
        """Record arrivals.

        Raises:
            GeometryFileError: the first page that could not be read; raised after all arrivals are recorded.
        """
        if not len(arrivals):
            return
        pages = arrivals.pages
        if arrivals.errors:
            lost = np.isin(pages, list(arrivals.errors))
            self.slots.lose(pages[lost])
            pages = pages[~lost]
            arrivals = arrivals.chosen(~lost)
        self._loaded += len(pages)
        self._loaded_bytes += int(arrivals.size_bytes.sum())
        self._changed.append(self.planner.publish(pages))
        for error in arrivals.errors.values():
            raise error

    def _tell(self) -> None:
        """Send the positions in the pool of all pages that arrived or were evicted to the device. Only frames queued
        later use these positions."""
        if not self._changed:
            return
        self._table.tell(np.concatenate(self._changed), self.planner.write_rows)
        self._changed.clear()

    def refuse(self, page: int) -> None:
        """Raise the error of a page that the device has refused.

        Raises:
            GeometryFileError: always.
        """
        mesh, number = self.graph.place(page)
        self.graph.meshes[mesh].page(number)
        where = int(self.graph.meshes[mesh].page_offsets[number])
        raise GeometryFileError(self.graph.meshes[mesh].path, f"page {number} does not match the page table", where)


def slots_of(graph: PageGraph, pool_bytes: int) -> int:
    """Number of slots in a pool of `pool_bytes` bytes, at most the number of pages.

    Raises:
        InputError: the root pages do not fit.
    """
    roots, count = int(graph.roots.sum()), pool_bytes // layouts.PAGE_BYTES
    if count < roots:
        raise InputError(
            f"a pool of {pool_bytes:,} bytes (pool_bytes=, --pool) is too small: the root pages of the scene's meshes "
            f"are always resident and need {roots:,} slots of {layouts.PAGE_BYTES:,} bytes: give at least "
            f"{roots * layouts.PAGE_BYTES:,}"
        )
    return min(count, graph.count)


def checked_pool_bytes(pool_bytes: object) -> int | None:
    """Check and return a number of bytes, or None.

    Raises:
        ValueError: the value is not a number of bytes.
    """
    what = "an integer number of bytes such as 2 * 10**9 (or None),"
    return None if pool_bytes is None else whole_number("pool_bytes", pool_bytes, 1, 1 << 64, what)
