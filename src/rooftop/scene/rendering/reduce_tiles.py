"""Compute hierarchical z in CUDA C++ (`reduce_tiles.cu`) with two launches. (`hzb.py` needs one launch for every two
levels.)"""

from __future__ import annotations

from functools import cache

from rooftop.scene.rendering.cuda_sources import compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded

TILE = 64  # side of a tile in pixels
TILE_LEVELS = 7  # level 0 is the pixels
THREADS = 256


@cache
def source() -> str:
    """The CUDA C++ source of this module's kernels: `pieces.cu`, then `reduce_tiles.cu`."""
    return with_pieces(__file__)


def reduce_depths(now: Uploaded, memory: FrameMemory) -> None:
    """Compute all levels of `hzb` for the cameras' views from `pixels`. `now` is `buffers.Views`."""
    of, canvas = memory.tensors, memory.canvas
    where = (of["hzb"], of["hzb_at"], of["hzb_at"].shape[1], now.tensors["pictures"])
    if canvas.levels > 1:
        across, down = (-(-max(sides) // TILE) for sides in zip(*canvas.sizes[: canvas.cameras], strict=True))
        tiles = compiled(source(), "reduce_tiles", memory.device)
        tiles.launch((across * canvas.cameras, down), THREADS, of["pixels"], *where, across)
    if canvas.levels > TILE_LEVELS:
        rest = compiled(source(), "reduce_rest", memory.device)
        rest.launch(canvas.cameras, THREADS, *where)
