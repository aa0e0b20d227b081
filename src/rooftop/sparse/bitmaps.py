"""Build the rulebook by bitmaps on a GPU: one bit for each cell of the grid says whether the cell has a site.

A cell's index is its key, so the set bits are the sites in sorted order. A second array stores, for each word, the
number of set bits up to the end of this word. So one word and its count determine whether a cell has a site, and the
site's rank among all sites. Keys are neither searched nor sorted. The rank of a cell is:

    rank(cell) = set bits of all words up to the cell's word - set bits of the cell's word from the cell's bit on

A submanifold convolution marks its sites, counts them, stores the row of each rank, and reads the cells around each
site. Other convolutions mark the cells that their sites reach. The rank of a marked cell is the output's row. In
addition to the tables, the kernels read or write the words and the second array a few times. The words take 1 bit per
cell, and so does the second array. A thin surface of 1 M sites in 81 M cells has 81 cells per site. Up to
CELLS_PER_SITE cells per site, bitmaps are predicted to be faster than hash tables (`hash_tables.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch.row_counts import allocate, size
from rooftop.launch.triton_launch import INTERPRETED, launch, require_triton
from rooftop.sparse.geometries import MAX_DIMS, Geometry
from rooftop.sparse.hash_tables import Tables, no_faults
from rooftop.sparse.sites import check_sites

MAX_CELLS = 2**31 - 64  # cell indices are int32, and a read may be one word past the end
MAX_STEP = 2**29  # maximum shift of a coordinate, so that sums of coordinates fit in int32
MAX_STRIDE = 2**31 - 1  # since coordinates are int32
# maximum number of offsets: CUDA limits a grid's second dimension, along which each program processes 32 offsets
MAX_VOLUME = 32 * 65535
CELLS_PER_SITE = 4096  # with more cells per site, clearing and counting words is predicted to take longer than hashing
# up to this many cells, the number of sites does not matter: 512 K words are cleared and counted in microseconds
FEW_CELLS = 2**24
SITES, WORDS, PAIRS = 256, 1024, 1024  # numbers of sites, words and (site, offset) pairs per program
WARPS = 4


class Bitmap(NamedTuple):
    """The cells of a grid that have a site, as one bit per cell.

    Attributes:
        words: (W,) int32, 32 cells per word.
        counts: (W,) int32, for each word the number of set bits in all words up to and including this word.
    """

    words: Tensor
    counts: Tensor


def fit_bitmaps(indices: Tensor, shape: Geometry) -> bool:
    """Whether to build the rulebook by bitmaps instead of hash tables: on a GPU (or in Triton's interpreter), if cells,
    cells per site, kernel volume, dilated kernel size, padding and stride are within the limits of this file."""
    if indices.device.type != "cuda" and not INTERPRETED:
        return False
    cells = max(_cells(shape, shape.in_shape), _cells(shape, shape.out_shape))
    farthest = max(*shape.padding, *(size * step for size, step in zip(shape.ksize, shape.dilation, strict=True)))
    rows = size(indices, 0)
    if rows == 0 or cells == 0 or farthest > MAX_STEP:
        return False
    if max(shape.stride) > MAX_STRIDE or shape.kernel_volume > MAX_VOLUME:
        return False
    return cells <= min(MAX_CELLS, max(FEW_CELLS, CELLS_PER_SITE * rows))


def submanifold_by_bitmap(indices: Tensor, shape: Geometry) -> Tables:
    """Build the tables of a submanifold convolution. Arguments and results are as in
    `hash_tables.submanifold_by_hash`."""
    require_triton()
    from rooftop.sparse import bitmap_kernels as kernels

    sites, faults = indices.contiguous(), no_faults(indices)
    sizes = (shape.batch_size, *_four(shape.in_shape, 1))
    bitmap = _counted(_marked(sites, sizes, faults, shape))
    count, volume, device = size(indices, 0), shape.kernel_volume, sites.device
    row_of, neighbours = allocate(faults, count), allocate(faults, count, volume)
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
    """Build the tables of a convolution that is not submanifold, like `hash_tables.regular_by_hash`."""
    cells, words, counts, faults = reach_by_bitmap(indices, shape)
    outputs = all_outputs(indices, shape, counts, faults) if bound is None else bound
    out_indices, neighbours = pair_by_bitmap(indices, cells, words, counts, faults, shape, outputs)
    return out_indices, neighbours, cells, faults


def reach_by_bitmap(indices: Tensor, shape: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the outputs of a convolution. Return four tensors: the number of the output cell to which each input
    contributes at each offset, (N, K) int32; the words and the counts of the `Bitmap` of all output cells; and the
    fault flags.
    """
    require_triton()
    from rooftop.sparse import bitmap_kernels as kernels

    sites, faults = indices.contiguous(), no_faults(indices)
    in_sizes, out_sizes = (_four(grid, 1) for grid in (shape.in_shape, shape.out_shape))
    _marked(sites, (shape.batch_size, *in_sizes), faults, shape)  # needed only for the faults
    count, volume, device = size(indices, 0), shape.kernel_volume, sites.device
    cells, words = allocate(faults, count, volume), _words(_cells(shape, shape.out_shape), device)
    steps = (*_four(shape.padding, 0), *_four(shape.dilation, 1))
    strides = {f"STRIDE_{dim}": size for dim, size in enumerate(_four(shape.stride, 1))}
    tile = _tile(volume)
    grid = _grid(count, volume, tile)
    launch(
        kernels.reach_outputs, grid, device, sites, words, cells, count, shape.batch_size, *in_sizes, *out_sizes,
        *steps, **strides, **_ksize(shape), DIMS=shape.dims, TRANSPOSED=shape.transpose, **tile, num_warps=WARPS,
    )  # fmt: skip
    return cells, *_counted(words), faults


def pair_by_bitmap(
    indices: Tensor, cells: Tensor, words: Tensor, counts: Tensor, faults: Tensor, shape: Geometry, outputs: int
) -> tuple[Tensor, Tensor]:
    """Return the indices (batch and coordinates) of the outputs, and a table with the rows of each output's input
    sites. Each cell number in `cells` is replaced by the row of the output at that cell."""
    from rooftop.sparse import bitmap_kernels as kernels

    count, volume, device = size(cells, 0), shape.kernel_volume, cells.device
    tile = _tile(volume)
    neighbours, out_cells = allocate(cells, outputs, volume).fill_(-1), allocate(cells, outputs).fill_(-1)
    out_indices = allocate(indices, outputs, 1 + shape.dims)
    launch(
        kernels.pair_outputs, _grid(count, volume, tile), device, cells, words, counts, neighbours, out_cells, faults,
        count, len(words), outputs, VOLUME=volume, **tile, num_warps=WARPS,
    )  # fmt: skip
    launch(
        kernels.name_outputs, (-(-outputs // SITES),), device, out_cells, out_indices, outputs,
        *_four(shape.out_shape, 1), DIMS=shape.dims, ROWS=SITES, num_warps=WARPS,
    )  # fmt: skip
    return out_indices, neighbours


# ---- parts -----------------------------------------------------------------------------------------------------


def _marked(sites: Tensor, sizes: tuple[int, ...], faults: Tensor, shape: Geometry) -> Tensor:
    """Return the words of the bitmap of `sites`, on a grid with the given sizes (the batch size first). Set a flag in
    `faults` if a site is off the grid or repeated."""
    from rooftop.sparse.bitmap_kernels import mark_sites

    words = _words(math.prod(sizes), sites.device)
    rows = size(sites, 0)
    launch(
        mark_sites, (-(-rows // SITES),), sites.device, sites, words, faults, rows, *sizes,
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


def all_outputs(indices: Tensor, shape: Geometry, counts: Tensor, faults: Tensor) -> int:
    """Return the number of outputs, or raise an error for invalid sites. The host waits for the device."""
    repeated, outside, _, outputs = torch.cat([faults, counts[-1:]]).tolist()
    if repeated or outside:
        check_sites(indices, shape.batch_size, shape.in_shape)
    return int(outputs)


def _words(cells: int, device: torch.device) -> Tensor:
    return torch.zeros(-(-cells // 32), dtype=torch.int32, device=device)


def _cells(shape: Geometry, grid: tuple[int, ...]) -> int:
    return shape.batch_size * math.prod(grid)


def _four(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Extend a tuple with one value per dimension of the grid to four values. Leading dimensions that the grid lacks
    get the value `missing`."""
    return (missing,) * (MAX_DIMS - len(values)) + values


def _ksize(shape: Geometry) -> dict[str, int]:
    return {f"KSIZE_{dim}": size for dim, size in enumerate(_four(shape.ksize, 1))}


def _tile(volume: int) -> dict[str, int]:
    """The number of offsets and the number of sites that one Triton program processes. `volume` is the number of
    offsets of the convolution's kernel."""
    taps = min(32, 1 << (volume - 1).bit_length())
    return {"TAPS": taps, "ROWS": PAIRS // taps}


def _grid(count: int, volume: int, tile: dict[str, int]) -> tuple[int, int]:
    return -(-count // tile["ROWS"]), -(-volume // tile["TAPS"])
