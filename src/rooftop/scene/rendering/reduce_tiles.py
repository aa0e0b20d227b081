"""Hierarchical z in CUDA C++: `reduce_tiles.cu`, in two launches where `hzb.py` takes one for every second level."""

from __future__ import annotations

from functools import cache

from rooftop.scene.rendering.cuda_sources import compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory

TILE = 64  # pixels, on each side
TILE_LEVELS = 7  # level 0 is the pixels
THREADS = 256


@cache
def source() -> str:
    """The CUDA C++."""
    return with_pieces(__file__)


def reduce_depths(memory: FrameMemory) -> None:
    """All levels of `hzb`, from `pixels`."""
    of = memory.tensors
    _, views, width, height, _ = memory.sizes
    sizes = (of["hzb"], of["hzb_at"], len(of["hzb_at"]), of["hzb"].shape[1], width, height)
    if len(of["hzb_at"]) > 1:
        tiles = compiled(source(), "reduce_tiles", memory.device)
        across = -(-width // TILE)
        tiles.launch((across * views, -(-height // TILE)), THREADS, of["pixels"], *sizes, across)
    if len(of["hzb_at"]) > TILE_LEVELS:
        rest = compiled(source(), "reduce_rest", memory.device)
        rest.launch(views, THREADS, *sizes)
