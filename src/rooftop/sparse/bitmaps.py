"""The rulebook by bitmaps, on a GPU: a bit for each cell of the grid says where a site is.

A cell's number is its key, so the bits are the sites in sorted order. With the number of bits up to each word, one look
at a word tells whether a cell has a site and, from the bits below, its rank among all. No key is searched for, and no
sort is needed for sorted outputs:

    rank(cell) = bits of all words up to the cell's - bits of its word from the cell's on

A submanifold convolution marks its sites, counts, notes the row of each rank, and looks at the cells around each site.
Others mark what their sites reach; the rank of a marked cell is the row of the output. What it moves beside the tables
is 2 bits for each cell a few times. A thin surface of 1 M sites in 81 M cells has 81 cells for each site; up to some
thousand that should be less than what hash tables (`hash_tables.py`) take, which is predicted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED, launch, require_triton
from rooftop.sparse.geometries import MAX_DIMS, Geometry
from rooftop.sparse.hash_tables import Tables, no_faults
from rooftop.sparse.sites import check_sites

MAX_CELLS = 2**31 - 64  # cells are numbered as int32, and a look may go one word beyond
MAX_STEP = 2**29  # from a site to another, for sums of coordinates that int32 holds
MAX_STRIDE = 2**31 - 1  # as sites are int32
MAX_VOLUME = 32 * 65535  # a grid of CUDA has so many programs in its second dimension, of 32 offsets each
CELLS_PER_SITE = 4096  # above, to clear and count the words takes longer than to hash (predicted)
FEW_CELLS = 2**24  # 512 K words, which are cleared and counted in microseconds
SITES, WORDS, PAIRS = 256, 1024, 1024  # of a program: sites, words, and pairs of a site and an offset
WARPS = 4


class Bitmap(NamedTuple):
    """Which cells have a site.

    Attributes:
        words: (W,) int32, a bit for each cell.
        counts: (W,) int32, set bits of all words up to and with each.
    """

    words: Tensor
    counts: Tensor


def fit_bitmaps(indices: Tensor, shape: Geometry) -> bool:
    """Whether bitmaps serve better than hash tables: on a GPU (or interpreted), on grids that are not too empty."""
    if indices.device.type != "cuda" and not INTERPRETED:
        return False
    cells = max(_cells(shape, shape.in_shape), _cells(shape, shape.out_shape))
    farthest = max(*shape.padding, *(size * step for size, step in zip(shape.ksize, shape.dilation, strict=True)))
    if indices.shape[0] == 0 or cells == 0 or farthest > MAX_STEP:
        return False
    if max(shape.stride) > MAX_STRIDE or shape.kernel_volume > MAX_VOLUME:
        return False
    return cells <= min(MAX_CELLS, max(FEW_CELLS, CELLS_PER_SITE * indices.shape[0]))


def submanifold_by_bitmap(indices: Tensor, shape: Geometry) -> Tables:
    """Arguments and results as of `hash_tables.submanifold_by_hash`."""
    require_triton()
    from rooftop.sparse import bitmap_kernels as kernels

    sites, faults = indices.contiguous(), no_faults(indices)
    sizes = (shape.batch_size, *_four(shape.in_shape, 1))
    bitmap = _counted(_marked(sites, sizes, faults, shape))
    count, volume, device = len(sites), shape.kernel_volume, sites.device
    row_of, neighbours = faults.new_empty(count), faults.new_empty(count, volume)
    constants: dict[str, Any] = {"DIMS": shape.dims, "num_warps": WARPS}
    launch(
        kernels.place_sites, (-(-count // SITES),), device, sites, *bitmap, row_of, count, *sizes, ROWS=SITES,
        **constants,
    )  # fmt: skip
    tile = _tile(volume)
    launch(
        kernels.pair_neighbours, _grid(count, volume, tile), device, sites, *bitmap, row_of, neighbours, count, *sizes,
        *_four(shape.dilation, 1), **_ksize(shape), **tile, **constants,
    )  # fmt: skip
    return indices.new_empty(0, 1 + shape.dims), neighbours, neighbours.new_empty(0, volume), faults


def regular_by_bitmap(indices: Tensor, shape: Geometry, bound: int | None) -> Tables:
    """Arguments and results as of `hash_tables.regular_by_hash`."""
    require_triton()
    from rooftop.sparse import bitmap_kernels as kernels

    sites, faults = indices.contiguous(), no_faults(indices)
    in_sizes, out_sizes = (_four(grid, 1) for grid in (shape.in_shape, shape.out_shape))
    _marked(sites, (shape.batch_size, *in_sizes), faults, shape)  # for the faults alone
    count, volume, device = len(sites), shape.kernel_volume, sites.device
    cells, words = faults.new_empty(count, volume), _words(_cells(shape, shape.out_shape), device)
    steps = (*_four(shape.padding, 0), *_four(shape.dilation, 1))
    strides = {f"STRIDE_{dim}": size for dim, size in enumerate(_four(shape.stride, 1))}
    tile = _tile(volume)
    grid = _grid(count, volume, tile)
    launch(
        kernels.reach_outputs, grid, device, sites, words, cells, count, shape.batch_size, *in_sizes, *out_sizes,
        *steps, **strides, **_ksize(shape), DIMS=shape.dims, TRANSPOSED=shape.transpose, **tile, num_warps=WARPS,
    )  # fmt: skip
    bitmap = _counted(words)
    outputs = _all_outputs(indices, shape, bitmap, faults) if bound is None else bound
    neighbours = torch.full((outputs, volume), -1, dtype=torch.int32, device=device)
    out_cells = torch.full((outputs,), -1, dtype=torch.int32, device=device)
    out_indices = indices.new_empty(outputs, 1 + shape.dims)
    launch(
        kernels.pair_outputs, grid, device, cells, *bitmap, neighbours, out_cells, faults, count, len(words), outputs,
        VOLUME=volume, **tile, num_warps=WARPS,
    )  # fmt: skip
    launch(
        kernels.name_outputs, (-(-outputs // SITES),), device, out_cells, out_indices, outputs, *out_sizes,
        DIMS=shape.dims, ROWS=SITES, num_warps=WARPS,
    )  # fmt: skip
    return out_indices, neighbours, cells, faults


# ---- parts -----------------------------------------------------------------------------------------------------


def _marked(sites: Tensor, sizes: tuple[int, ...], faults: Tensor, shape: Geometry) -> Tensor:
    """Words with the bits of the sites, on a grid of such sizes, the batch first; what is wrong with them to faults."""
    from rooftop.sparse.bitmap_kernels import mark_sites

    words = _words(math.prod(sizes), sites.device)
    launch(
        mark_sites, (-(-len(sites) // SITES),), sites.device, sites, words, faults, len(sites), *sizes,
        DIMS=shape.dims, ROWS=SITES, num_warps=WARPS,
    )  # fmt: skip
    return words


def _counted(words: Tensor) -> Bitmap:
    from rooftop.sparse.bitmap_kernels import count_words

    counts = torch.empty_like(words)
    launch(
        count_words, (-(-len(words) // WORDS),), words.device, words, counts, len(words), WORDS=WORDS, num_warps=WARPS
    )
    return Bitmap(words, torch.cumsum(counts, 0, dtype=torch.int32))


def _all_outputs(indices: Tensor, shape: Geometry, bitmap: Bitmap, faults: Tensor) -> int:
    """How many outputs there are. Waits for the device, and raises for what it found wrong with the sites."""
    repeated, outside, _, outputs = torch.cat([faults, bitmap.counts[-1:]]).tolist()
    if repeated or outside:
        check_sites(indices, shape.batch_size, shape.in_shape)
    return int(outputs)


def _words(cells: int, device: torch.device) -> Tensor:
    return torch.zeros(-(-cells // 32), dtype=torch.int32, device=device)


def _cells(shape: Geometry, grid: tuple[int, ...]) -> int:
    return shape.batch_size * math.prod(grid)


def _four(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Values of four dimensions: the first ones, which a grid of fewer does not have, are `missing`."""
    return (missing,) * (MAX_DIMS - len(values)) + values


def _ksize(shape: Geometry) -> dict[str, int]:
    return {f"KSIZE_{dim}": size for dim, size in enumerate(_four(shape.ksize, 1))}


def _tile(volume: int) -> dict[str, int]:
    """Offsets and sites of a program."""
    taps = min(32, 1 << (volume - 1).bit_length())
    return {"TAPS": taps, "ROWS": PAIRS // taps}


def _grid(count: int, volume: int, tile: dict[str, int]) -> tuple[int, int]:
    return -(-count // tile["ROWS"]), -(-volume // tile["TAPS"])
