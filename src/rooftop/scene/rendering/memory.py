"""The memory of a frame: lists with a fixed capacity, pictures, and the depths of the previous frame."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
import warp as wp
from torch import Tensor

from rooftop.launch.warp_launch import Launches
from rooftop.scene import layouts
from rooftop.scene.rendering import buffers, records
from rooftop.scene.rendering.canvases import MOST_THREADS, Canvas

LAST = torch.iinfo(torch.int64).max  # this value is larger than every entry, so it sorts last
EMPTY = -1  # marks an element of the queue that has no entry yet
# Initial capacities of the lists. A frame that needs a larger list is drawn again; the list's new capacity is twice the
# number of entries that the frame needs, rounded up to a power of two.
ROOM = {
    "nodes": 1 << 12,
    "groups": 1 << 12,
    "visible": 1 << 13,
    "hidden_children": 1 << 12,
    "hidden_clusters": 1 << 12,
    "large": 1 << 12,
    "pieces": 1 << 12,
    "tiles": 1 << 14,
}
# number of threads for each entry of a list; it limits the list's length, since a launch has at most MOST_THREADS
THREADS_OF_AN_ENTRY = {"nodes": 8, "groups": 32, "visible": 128, "pieces": 64, "tiles": 32}
# For each list, the indices of its counters among all counters of a frame. The capacity must suffice for each counter.
COUNTERS_OF = {
    "groups": (buffers.GROUPS, buffers.PASS + buffers.GROUPS),
    "visible": (buffers.VISIBLE, buffers.PASS + buffers.VISIBLE),
    "hidden_children": (buffers.HIDDEN_CHILDREN,),
    "hidden_clusters": (buffers.HIDDEN_CLUSTERS,),
    "large": (buffers.LARGE, buffers.PASS + buffers.LARGE),
    "pieces": (buffers.PIECES, buffers.PASS + buffers.PIECES),
    "tiles": (buffers.TILES, buffers.PASS + buffers.TILES),
    "nodes": tuple(
        which * buffers.PASS + buffers.LEVEL + level for which in range(2) for level in range(layouts.MAX_DEPTH)
    ),
}
OF_LISTS = {name: itemgetter(places[0], *places) for name, places in COUNTERS_OF.items()}
"""For each list, a function that returns the list's counters, given all counters. The first counter is repeated,
because an `itemgetter` of a single item returns no tuple."""

Captured = tuple[torch.cuda.CUDAGraph, tuple[tuple[str, Any, Any], ...]]
"""The CUDA graph of a frame, and for each stage its name and the events at its beginning and end."""


class FrameMemory:
    """Tensors of a frame, by the names of `buffers.Frame`.

    Args:
        places: capacity for instances.
        canvas: the sizes of all views' pictures.
        fragments: whether the triangles drawn at each pixel are counted.
        room: capacities of the lists.
        depths: (canvas.hzb_texels,) float32, hierarchical z of the cameras in the previous frame; other `FrameMemory`
            objects may share this tensor.
        pictures: whether there is a visibility buffer; a frame that only culls needs none.
    """

    def __init__(
        self,
        places: int,
        canvas: Canvas,
        fragments: bool,
        room: Mapping[str, int],
        depths: Tensor,
        pictures: bool = True,
    ) -> None:
        pairs, device = places * len(canvas.sizes), depths.device
        texels = canvas.texels if pictures else 0
        self.places, self.canvas, self.fragments, self.pairs = places, canvas, fragments, pairs
        self.room, self.device, self._pictures = dict(room), device, pictures

        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # Tensors that are cleared together are contiguous, so that one launch clears them.
        counted = canvas.camera_texels if fragments else 0
        sizes = (buffers.PASS, texels, (counted + 1) // 2)  # sizes in 64-bit words
        self._zeros = of(torch.int64, sum(sizes))
        counters, pixels, fragment_words = self._zeros.split(sizes)

        self.tensors = {
            "to_view": of(torch.float32, pairs, 12),
            "before": of(torch.float32, pairs, 12),
            "counters": counters.view(torch.int32),
            "nodes": of(torch.int64, 2, room["nodes"]),
            "groups": of(torch.int64, room["groups"]),
            "found": of(torch.int64, room["visible"]),
            "visible": of(torch.int64, 2, room["visible"]),
            "hidden_instances": of(torch.int64, pairs),
            "hidden_children": of(torch.int64, room["hidden_children"]),
            "hidden_clusters": of(torch.int64, room["hidden_clusters"]),
            "drawn": of(torch.int64, 2 * room["visible"]),
            "records": of(torch.int32, 2 * room["visible"], records.WORDS),
            "ranks": of(torch.int32, 2, room["visible"]),
            "pixels": pixels,
            "fragments": fragment_words.view(torch.int32)[:counted],
            "large": of(torch.int64, room["large"]),
            "pieces": of(torch.int64, room["pieces"], 8),
            "piece_depths": of(torch.float32, room["pieces"], 3),
            "tiles": of(torch.int64, room["tiles"]),
            "hzb": torch.empty_like(depths),
            "hzb_before": depths,
            "hzb_at": torch.from_numpy(canvas.hzb_at).to(device),
        }
        self.tensors["found"].fill_(LAST)
        # Graphs by a frame's arguments; None if a frame was drawn only once with these arguments.
        self.graphs: dict[tuple[object, ...], Captured | None] = {}
        self.launches = Launches(device)
        self.frame: Any = buffers.Frame()
        self.frame.instances, self.frame.cameras = places, canvas.cameras
        for name, tensor in self.tensors.items():
            setattr(self.frame, name, wp.from_torch(tensor))

    def clear(self) -> None:
        """Set the frame's counters, the visibility buffer, and the triangle counts of the pixels to 0, before a frame
        is drawn."""
        self._zeros.zero_()

    def clear_queue(self) -> None:
        """Fill the queue of nodes with EMPTY before a pass, so that the warps of `persistent_cull` see which entries
        are not written yet."""
        self.tensors["nodes"][0].fill_(EMPTY)

    def sort_found(self, second: int) -> None:
        """Sort the visible clusters of a pass with torch's sort. The list is sorted up to its capacity, because the
        host does not know how many clusters were found. `clear_found` must have run before the pass."""
        found, visible = self.tensors["found"], self.tensors["visible"][second]
        if self.device.type == "cpu":
            count = min(int(self.tensors["counters"][second * buffers.PASS + buffers.VISIBLE]), len(found))
            found, visible = found[:count], visible[:count]
        visible.copy_(found.sort().values)

    def clear_found(self) -> None:
        """Fill the list `found` with LAST before a pass whose results torch sorts, so that unused elements sort
        last."""
        self.tensors["found"].fill_(LAST)

    def turn_over(self) -> None:
        """Make the depths of this frame the previous frame's depths."""
        self.tensors["hzb_before"].copy_(self.tensors["hzb"])

    def with_room(self, room: Mapping[str, int]) -> FrameMemory:
        """Make new working memory for the same frame, whose lists have the capacities `room`. It keeps the allowed
        error and the depths of the previous frame, but neither the contents of lists nor captured graphs."""
        depths = self.tensors["hzb_before"]
        memory = FrameMemory(self.places, self.canvas, self.fragments, room, depths, self._pictures)
        memory.frame.pixel_error = self.frame.pixel_error
        # If the size of the list changes, torch may sort with a kernel that is not loaded yet. So the next frame is not
        # captured.
        if room["visible"] == self.room["visible"]:
            memory.graphs = dict.fromkeys(self.graphs)  # the frame was drawn before, so the next time it is captured
        return memory

    def wanted_room(self, counters: list[int]) -> dict[str, int]:
        """Capacities for drawing the frame again; unchanged if all lists had enough room.

        Raises:
            ValueError: a list would exceed the greatest possible length.
        """
        room = dict(self.room)
        for name, of_list in OF_LISTS.items():
            needed, most = max(of_list(counters)), MOST_THREADS // THREADS_OF_AN_ENTRY.get(name, 1)
            if needed > most:
                raise ValueError(
                    f"a frame needs more than {most:,} entries in its list {name!r}: render fewer views at a time, or "
                    "allow a larger pixel_error"
                )
            if needed > room[name]:
                room[name] = min(1 << (2 * needed - 1).bit_length(), most)
        return room
