"""Sort visible clusters in CUDA C++: `sort_clusters.cu`."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces

TILE, THREADS = 2048, 1024  # entries per tile, and threads per block
MERGING_THREADS, BLOCKS_OF_A_MULTIPROCESSOR = 256, 8
# Largest capacity of a list for which this sort is used, in the first and in the second pass. This sort searches each
# entry in every tile, so for more clusters torch's sort is faster. But torch always sorts the whole capacity, and the
# second pass seldom fills a hundredth of it.
MOST, MOST_OF_SECOND = 1 << 19, 1 << 20


@cache
def source() -> str:
    """The CUDA C++ source of this module's kernels: `pieces.cu`, then `sort_clusters.cu`."""
    return with_pieces(__file__)


def sort(items: Tensor, counters: Tensor, counter: int, out: Tensor) -> None:
    """Sort the items of a list into `out`: the first `counters[counter]` elements of `items`, or all elements if this
    number exceeds the list's capacity. The order of `items` changes.

    Args:
        items, out: (room,) int64; all items differ.
        counters: int32; `counters[counter]` is the number of items, including items for which the list had no room.
    """
    sort_tiles, merge_tiles = (compiled(source(), name, items.device) for name in ("sort_tiles", "merge_tiles"))
    blocks = blocks_on(items.device, BLOCKS_OF_A_MULTIPROCESSOR)
    sort_tiles.launch(-(-len(items) // TILE), THREADS, items, counters, counter, len(items))
    merge_tiles.launch(blocks, MERGING_THREADS, items, out, counters, counter, len(items))
