"""What the culls ask for: for each page, how much a frame wants it, and what of that is absent.

The culls write `wanted`; `collect` turns it into ages and a list of absent pages, which stands behind the frame's
counters in one tensor: the host reads both at once, when it waits for the frame anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import warp as wp

from rooftop.launch.warp_launch import launch_warp
from rooftop.scene.rendering import buffers
from rooftop.scene.streaming.page_graph import PageGraph
from rooftop.scene.streaming.plans import Use

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

COUNTERS = 2 * buffers.PASS  # of a frame; they come first in an answer
WANTED, MISSING, LIST = (wp.constant(COUNTERS + place) for place in range(3))  # behind them; the list is pairs
LISTED = 1024  # absent pages that an answer names; of more, the host reads all of `wanted`
OLDEST = wp.constant(2**30)


@wp.struct
class Requests:
    """Of a scene whose pages may be absent; read and written by the culls, and by `collect`."""

    group_page: wp.array(dtype=wp.int32)  # (groups,) of all meshes: the page, counted over all meshes
    first_group: wp.array(dtype=wp.int32)  # (meshes,) where the groups of each begin
    wanted: wp.array(dtype=wp.int32)  # (pages,) bits of a float32: pixels that a picture is off without it, or 0
    ages: wp.array(dtype=wp.int32)  # (pages,) frames since it was wanted
    answer: wp.array(dtype=wp.int32)  # (LIST + 2 * LISTED,): the frame's counters; counts; pages and their `wanted`


@wp.kernel
def collect(requests: Requests, page_at: wp.array(dtype=wp.int64), aging: wp.int32, stride: wp.int32):
    """The ages, and the answer. `aging`: whether what was not wanted becomes older."""
    for page in range(wp.tid(), requests.wanted.shape[0], stride):
        wanted = requests.wanted[page]
        if wanted != 0:
            requests.ages[page] = 0
            wp.atomic_add(requests.answer, WANTED, 1)
            if page_at[page] < wp.int64(0):
                place = LIST + 2 * wp.atomic_add(requests.answer, MISSING, 1)
                if place + 1 < requests.answer.shape[0]:
                    requests.answer[place] = page
                    requests.answer[place + 1] = wanted
        else:
            requests.ages[page] = wp.min(requests.ages[page] + aging, OLDEST)


@dataclass(frozen=True)
class Answer:
    """What a frame said.

    Attributes:
        counters: of the frame.
        wanted: how many pages it wanted; missing: the absent ones, the most wanted first; pixels: how much each is.
    """

    counters: list[int]
    wanted: int
    missing: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.float32]


class RequestBuffers:
    """The memory of requests on the device, and how the host reads it.

    Attributes:
        tensors: by the names of `Requests`; values: the same as Warp's kernels take them.
    """

    def __init__(self, graph: PageGraph, page_at: torch.Tensor) -> None:
        self.device, self.page_at = page_at.device, page_at
        self._places = wp.from_torch(page_at)

        def of(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(self.device)

        self.tensors = {
            "group_page": of(graph.group_page),
            "first_group": of(graph.first_group),
            "wanted": of(np.zeros(graph.count)),
            "ages": of(np.full(graph.count, OLDEST)),
            "answer": of(np.zeros(LIST + 2 * LISTED)),
        }
        self.values: Any = Requests()
        for name, tensor in self.tensors.items():
            setattr(self.values, name, wp.from_torch(tensor))

    def clear(self) -> None:
        """For a frame: nothing is wanted yet."""
        self.tensors["wanted"].zero_()

    def collect(self, counters: torch.Tensor, threads: int, aging: bool = True) -> None:
        """The answer of a frame with these counters, from what its culls have asked for."""
        answer = self.tensors["answer"]
        answer[COUNTERS:LIST].zero_()
        answer[:COUNTERS].copy_(counters)
        launch_warp(collect, (threads,), self.values, self._places, int(aging), threads, device=self.device)

    def read(self) -> Answer:
        """The answer; waits for the frame."""
        words = self.tensors["answer"].cpu().numpy()
        count = int(words[MISSING])
        if count <= LISTED:
            pairs = words[LIST : LIST + 2 * count].reshape(-1, 2)
            missing, pixels = pairs[:, 0].astype(np.int64), pairs[:, 1].copy().view(np.float32)
        else:
            wanted = self.tensors["wanted"].cpu().numpy()
            missing = np.flatnonzero((wanted != 0) & (self.page_at.cpu().numpy() < 0))
            pixels = wanted[missing].view(np.float32)
        order = np.lexsort([missing, -pixels])
        return Answer(words[:COUNTERS].tolist(), int(words[WANTED]), missing[order], pixels[order])

    def use(self) -> Use:
        """How pages were used; two copies from the device."""
        wanted, ages = (self.tensors[name].cpu().numpy().copy() for name in ("wanted", "ages"))
        return Use(wanted.view(np.float32), ages)
