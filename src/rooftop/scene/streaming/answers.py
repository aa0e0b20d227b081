"""Device memory of the culling kernels' page requests, and the answer that the host copies after each frame: the
frame's counters and its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import warp as wp

from rooftop.launch.warp_launch import launch_warp
from rooftop.scene.rendering.host_rows import HostCopy
from rooftop.scene.streaming.page_graph import Mask, PageGraph
from rooftop.scene.streaming.plans import Use
from rooftop.scene.streaming.requests import COUNTERS, LIST, LISTED, MISSING, OLDEST, REFUSED, WANTED, Requests, collect


@dataclass(frozen=True)
class Answer:
    """The answer of a frame: its counters, and the pages that it requested.

    Attributes:
        counters: the counters of the frame's kernels, such as the lengths of their lists.
        wanted: number of pages that the frame wanted, absent or not.
        missing: the wanted pages that are absent, the most wanted first.
        pixels: for each missing page, the error in pixels that its absence causes in the picture.
        refused: a page that the device refused because its contents are invalid (see `admission.py`), or None. If there
            is such a page, the frame must not be used.
    """

    counters: list[int]
    wanted: int
    missing: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.float32]
    refused: int | None


class RequestBuffers:
    """The device memory of the culling kernels' page requests, and the copy that the host reads.

    Attributes:
        tensors: by name, one tensor for each field of `Requests`; and "wanted_first", the copy that `keep_first` makes.
        values: the Warp struct `Requests`, whose fields are the tensors other than "wanted_first".
    """

    def __init__(self, graph: PageGraph, page_at: torch.Tensor, refused: torch.Tensor) -> None:
        self.device, self.page_at = page_at.device, page_at
        self._places = wp.from_torch(page_at)

        def of(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(self.device)

        self._use = of(np.stack([np.zeros(graph.count), np.full(graph.count, OLDEST)]))  # one copy transfers both
        self.tensors = {
            "group_page": of(graph.group_page),
            "first_group": of(graph.first_group),
            "wanted": self._use[0],
            "ages": self._use[1],
            "refused": refused,
            "answer": of(np.zeros(LIST + 2 * LISTED)),
        }
        self.values: Any = Requests()
        for name, tensor in self.tensors.items():
            setattr(self.values, name, wp.from_torch(tensor))
        self.tensors["wanted_first"] = torch.zeros_like(self.tensors["wanted"])  # only the host uses it
        self._answer = HostCopy(len(self.tensors["answer"]), self.device)

    def keep_first(self) -> None:
        """Copy the page requests of a frame's first pass, so that `use` can return them later. These requests do not
        depend on what the frame draws."""
        self.tensors["wanted_first"].copy_(self.tensors["wanted"])

    def clear(self) -> None:
        """Clear all page requests, before the culling kernels of a frame write new ones."""
        self.tensors["wanted"].zero_()

    def collect(self, counters: torch.Tensor, threads: int, aging: bool = True) -> None:
        """Compute the answer of a frame from `counters` and the page requests of the frame's culling kernels.

        Args:
            counters: (COUNTERS,) the frame's counters.
            threads: number of threads of the kernel `collect`.
            aging: whether pages that the frame did not want become older.
        """
        answer = self.tensors["answer"]
        answer[COUNTERS:LIST].zero_()
        answer[:COUNTERS].copy_(counters)
        launch_warp(collect, (threads,), self.values, self._places, int(aging), threads, device=self.device)

    def send(self) -> None:
        """Start to copy the answer to the host. The copy runs after the work that the current stream has queued so
        far."""
        self._answer.send(self.tensors["answer"])

    def read(self, resident: Mask | None = None) -> Answer:
        """Return the most recently sent answer. This method waits only for the copy of the answer, not for work queued
        later.

        Args:
            resident: (pages,) whether each page was resident for that frame; by default, whether it is resident now.
        """
        words = self._answer.read()
        count = int(words[MISSING])
        if count <= LISTED:
            pairs = words[LIST : LIST + 2 * count].reshape(-1, 2)
            missing, pixels = pairs[:, 0].astype(np.int64), pairs[:, 1].copy().view(np.float32)
        else:
            wanted = self.tensors["wanted"].cpu().numpy()
            absent = self.page_at.cpu().numpy() < 0 if resident is None else ~resident
            missing = np.flatnonzero((wanted != 0) & absent)
            pixels = wanted[missing].view(np.float32)
        order = np.lexsort((missing, -pixels)) if count else slice(0)
        refused = int(words[REFUSED]) - 1 if words[REFUSED] else None
        return Answer(words[:COUNTERS].tolist(), int(words[WANTED]), missing[order], pixels[order], refused)

    def use(self, first: bool = False) -> Use:
        """Return how much the most recent frame wanted each page, and how long ago a frame wanted it. With `first`,
        `Use.pixels` contains only the requests of the frame's first pass."""
        wanted, ages = self._use.to("cpu", copy=True).numpy()
        if first:
            wanted = self.tensors["wanted_first"].to("cpu", copy=True).numpy()
        return Use(wanted.view(np.float32), ages)
