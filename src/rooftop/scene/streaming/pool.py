"""The pool: slots of 128 KB on the device, filled with the pages that frames request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rooftop.errors import GeometryFileError, InputError
from rooftop.launch.warp_launch import launch_warp
from rooftop.scene import layouts
from rooftop.scene.gbuffers import StreamingStats
from rooftop.scene.geometry import Geometry
from rooftop.scene.streaming import admission
from rooftop.scene.streaming.answers import Answer, RequestBuffers
from rooftop.scene.streaming.loading import SLOT_WORDS, Arrival, Loader
from rooftop.scene.streaming.page_graph import PageGraph
from rooftop.scene.streaming.plans import Plan, best_that_fit, give_up_beside, plan_all, plan_some
from rooftop.scene.streaming.slots import RESIDENT, Slots

MOST_WORDS = 2**31 - 1  # length limit of a Warp array
MOST_OF_A_FRAME = 32  # pages for one frame; planning takes the host about 40 microseconds for each
MOST_IN_FLIGHT = 128  # pages that 8 threads read in a few frames; a loading page takes a slot
AT_ONCE, AHEAD = 0.0, 1.0  # pages that a frame waits for are read before pages that are only expected

Mask = npt.NDArray[np.bool_]


class Pool:
    """The resident pages of a scene's meshes, as many as there are slots.

    A frame calls `begin`, draws, reads `answer`, and then either `ask`s for the missing pages or `load`s them.

    Attributes:
        graph: the pages; slots: which page is where; loader: the threads that read them.
        words: (slots * SLOT_WORDS + 2,) int32, as `buffers.Resident` has them.
        page_at: (pages,) int64, the start of each, or -1.
        requests: the culls' requests.
    """

    def __init__(self, meshes: Sequence[Geometry], pool_bytes: int, device: torch.device) -> None:
        self.graph = PageGraph(meshes)
        count = slots_of(self.graph, pool_bytes)
        self.slots = Slots(self.graph, count)
        # A read of two words may begin at the last word.
        self.words = torch.empty(count * SLOT_WORDS + 2, dtype=torch.int32, device=device)
        self.page_at = torch.full((self.graph.count,), -1, dtype=torch.int64, device=device)
        self._words = self.words[:MOST_WORDS]  # the part that fits a Warp array; kernels also read beyond it
        self.requests = RequestBuffers(self.graph, self.page_at)
        self.loader = Loader(self.graph, self.words)
        self._changed: set[int] = set()  # pages whose position the device does not know yet
        self._loaded = self._loaded_bytes = self._evicted = 0  # since the last statistics
        self.load(self.graph.roots)

    def begin(self) -> None:
        """Call before a frame: arrived pages become resident. This does not wait.

        Raises:
            GeometryFileError: a page could not be read, or is wrong.
        """
        self._take(self.loader.arrived())
        self._tell()

    def ask(self, answer: Answer, urgent: bool = True) -> None:
        """Begin to load the missing pages as far as there is room. `urgent`: whether a displayed frame lacked them."""
        most = min(MOST_OF_A_FRAME, min(MOST_IN_FLIGHT, self.slots.count) - self.loader.in_flight)
        # enough, because no more pages are requested at once, even if half of them are in flight
        first = 2 * MOST_IN_FLIGHT
        pages, pixels = answer.missing[:first].tolist(), answer.pixels[:first].tolist()
        plan = plan_some(self.slots, pages, pixels, most, self.requests.use, urgent)
        order = dict(zip(pages, pixels, strict=True))
        self._carry_out(plan, lambda page: (AT_ONCE if urgent else AHEAD, -order.get(page, np.inf)))

    def target(self, first: bool = False) -> Mask | None:
        """(pages,) the pages that the last frame wanted, or its first pass, with those that they need; None if they do
        not fit.
        """
        target = self.graph.roots | self.graph.with_needs(self.requests.use(first).pixels > 0)
        return target if target.sum() <= self.slots.count else None

    def has(self, target: Mask) -> bool:
        """Whether all pages of a target are resident."""
        return bool((self.slots.state[target] == RESIDENT).all())

    def best_target(self) -> Mask:
        """(pages,) as many of these pages, from the first on, as fit."""
        return best_that_fit(self.slots, self.requests.use().pixels)

    def load(self, target: Mask, alone: bool = False) -> None:
        """Load all pages of a target, and wait for them. `alone`: no other page stays.

        Raises:
            GeometryFileError: a page could not be read, or is wrong.
        """
        self._take(self.loader.wait())
        use = self.requests.use()
        others = give_up_beside(self.slots, target, use, self.slots.count) if alone else []
        plan = plan_all(self.slots, target, use)
        self._carry_out(Plan(others + plan.given_up, plan.loads), lambda page: (AT_ONCE, float(page)))
        self._take(self.loader.wait())
        self._tell()

    def stats(self, answer: Answer, pixel_error: float) -> StreamingStats:
        """Statistics of a frame, and of pages loaded and evicted since the last one."""
        resident = int((self.slots.state == RESIDENT).sum())
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

    def _carry_out(self, plan: Plan, order: Any) -> None:
        self._evicted += len(plan.given_up)
        self._changed.update(plan.given_up)
        for page, slot in plan.loads:
            self.loader.load(page, slot, order(page))

    def _take(self, arrivals: Iterable[Arrival]) -> None:
        """Record arrivals.

        Raises:
            GeometryFileError: for the first page that could not be read, after all others are recorded.
        """
        errors = []
        for arrival in arrivals:
            if arrival.error is None:
                self.slots.arrive(arrival.page)
                self._loaded, self._loaded_bytes = self._loaded + 1, self._loaded_bytes + arrival.size_bytes
            else:
                self.slots.lose(arrival.page)
                errors.append(arrival.error)
        self._changed.update(self.slots.publish())
        if errors:
            raise errors[0]

    def _tell(self) -> None:
        """Tell the device where pages are. Earlier frames must have ended."""
        if not self._changed:
            return
        pages, device = np.array(sorted(self._changed), np.int64), self.page_at.device
        there = self.slots.state[pages] == RESIDENT
        self.page_at[torch.from_numpy(pages[~there]).to(device)] = -1
        pages = pages[there]
        if len(pages):
            places = self.slots.slot_of[pages].astype(np.int64) * SLOT_WORDS
            rows = np.concatenate([np.stack([pages, places], 1), self.graph.limits[pages]], axis=1)
            arriving = torch.from_numpy(rows).to(device)
            wrong = torch.zeros(len(pages), dtype=torch.int32, device=device)
            launch_warp(admission.check_pages, (len(pages) * admission.LANES,), self._words, arriving, wrong)
            admitting = (arriving, wrong, self.page_at, self.requests.tensors["refused"])
            launch_warp(admission.admit_pages, (len(pages),), *admitting)
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
    """Number of slots in a pool of that many bytes: no more than there are pages.

    Raises:
        InputError: the root pages do not fit.
    """
    roots, count = int(graph.roots.sum()), pool_bytes // layouts.PAGE_BYTES
    if count < roots:
        raise InputError(
            f"pool_bytes={pool_bytes:,}: the root pages of the scene's meshes are always resident and need {roots:,} "
            f"slots of {layouts.PAGE_BYTES:,} bytes: give at least {roots * layouts.PAGE_BYTES:,}"
        )
    return min(count, graph.count)


def checked_pool_bytes(pool_bytes: object) -> int | None:
    """Raises:
    ValueError: the value is not a number of bytes.
    """
    if pool_bytes is None:
        return None
    if isinstance(pool_bytes, bool) or not hasattr(pool_bytes, "__index__") or pool_bytes.__index__() < 1:
        raise ValueError(f"pool_bytes={pool_bytes!r}: expected an integer number of bytes, such as 2 * 10**9, or None")
    return int(pool_bytes.__index__())
