"""Build the rulebook by hash tables, on the CPU, and on a GPU for grids that are too large for one bit per cell
(`bitmaps.py`).

The keys of the sites are stored in an open-addressing table. `rulebook_kernels.py` has the Warp kernels. Outputs are
sorted by key and pairs by input row, so results do not depend on the order in which threads run.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftop.launch.warp_launch import launch_warp, start_warp
from rooftop.sparse.geometries import EMPTY, MAX_DIMS, NO_KEY, NO_ROOM, Geometry
from rooftop.sparse.sites import check_sites

Tables = tuple[Tensor, Tensor, Tensor, Tensor]  # out_indices, neighbours, reached, faults

MAX_SLOTS = 2**30  # maximum number of slots in a hash table, whose slot numbers are int32
# A table starts with room for this many outputs per input, and grows if needed. With kernel size 3, the outputs of a
# flat surface are 3 cells thick.
ROOM_PER_SITE = 4


def load_kernels() -> ModuleType:
    """Load the module with the Warp kernels.

    Raises:
        MissingExtraError: Warp is not installed.
    """
    start_warp("sparse convolutions", "sparse")
    from rooftop.sparse import rulebook_kernels

    return rulebook_kernels


@cache
def four(values: tuple[int, ...]) -> Any:
    """Pack up to four integers, one per dimension of the grid, into the vector that the Warp kernels take."""
    return load_kernels().Four(*values, *[1] * (MAX_DIMS - len(values)))


def submanifold_by_hash(indices: Tensor, shape: Geometry) -> Tables:
    """Build the tables of a submanifold convolution from the site indices (N, 1 + dims). Of the four `Tables`,
    `out_indices` and `reached` are empty, because the outputs are the inputs.
    """
    kernels, sites, faults = load_kernels(), _sites(indices), no_faults(indices)
    table, rows = _insert_sites(sites, shape, faults)
    count, volume = len(sites), shape.kernel_volume
    neighbours = torch.full((count, volume), -1, dtype=torch.int32, device=indices.device)
    sizes = (shape.dims, shape.batch_size, *map(four, (shape.in_shape, shape.ksize, shape.dilation)))
    launch_warp(kernels.pair_submanifold, (count, volume // 2 + 1), sites, *sizes, table, rows, neighbours)
    return indices.new_empty(0, 1 + shape.dims), neighbours, neighbours.new_empty(0, volume), faults


def regular_by_hash(indices: Tensor, shape: Geometry, bound: int | None) -> Tables:
    """Build the tables of a convolution that is not submanifold. `bound` is the number of output rows. If `bound` is
    None, there is one row per output, and the host waits for the number of outputs.
    """
    kernels, sites, faults = load_kernels(), _sites(indices), no_faults(indices)
    _insert_sites(sites, shape, faults)
    if bound is None:
        table, slots, outputs = _reach_all(indices, sites, shape, faults)
    else:
        table, slots = _reach(sites, shape, min(bound, _most_outputs(len(sites), shape)), faults)
        faults[NO_ROOM] |= ((table != EMPTY).sum() > bound).int()
        outputs = bound
    filled = torch.nonzero_static(table != EMPTY, size=outputs, fill_value=-1).squeeze(1)  # (O,)
    keys = table[filled].masked_fill_((filled < 0) | (faults[NO_ROOM] != 0), NO_KEY).sort().values
    rows = torch.full((len(table),), -1, dtype=torch.int32, device=sites.device)
    out_sites = sites.new_empty((outputs, 1 + shape.dims))
    neighbours = rows.new_full((outputs, shape.kernel_volume), -1)
    launch_warp(kernels.number_outputs, (outputs,), keys, shape.dims, four(shape.out_shape), table, rows, out_sites)
    launch_warp(kernels.pair_outputs, tuple(slots.shape), rows, slots, neighbours)
    return out_sites.to(indices.dtype), neighbours, slots, faults


def _reach_all(indices: Tensor, sites: Tensor, shape: Geometry, faults: Tensor) -> tuple[Tensor, Tensor, int]:
    """Run `_reach` with larger and larger tables until all outputs fit. Also returns the number of outputs. The host
    waits for the device.
    """
    room = min(_most_outputs(len(sites), shape), ROOM_PER_SITE * len(sites))
    while True:
        table, slots = _reach(sites, shape, room, faults)
        repeated, outside, no_room, outputs = torch.cat([faults, (table != EMPTY).sum().view(1)]).tolist()
        if repeated or outside:
            check_sites(indices, shape.batch_size, shape.in_shape)
        if not no_room:
            return table, slots, outputs
        faults.zero_()
        room *= ROOM_PER_SITE


def _reach(sites: Tensor, shape: Geometry, room: int, faults: Tensor) -> tuple[Tensor, Tensor]:
    """Fill a new hash table with the keys of all outputs. Also return (N, K) int32: the slot of the output that each of
    the N inputs reaches at each of the K offsets."""
    table = _table(room, sites.device)
    slots = torch.empty((len(sites), shape.kernel_volume), dtype=torch.int32, device=sites.device)
    sizes = (shape.in_shape, shape.out_shape, shape.ksize, shape.stride, shape.padding, shape.dilation)
    arguments = (sites, shape.dims, shape.batch_size, *map(four, sizes), shape.transpose, table, slots, faults)
    launch_warp(load_kernels().reach_outputs, tuple(slots.shape), *arguments)
    return table, slots


def _most_outputs(sites: int, shape: Geometry) -> int:
    """The maximum number of outputs to which `sites` input sites can contribute."""
    each = 1
    for k, s, d in zip(shape.ksize, shape.stride, shape.dilation, strict=True):
        each *= k if shape.transpose else -(-k * math.gcd(s, d) // s)
    return min(sites * each, shape.batch_size * math.prod(shape.out_shape))


def _insert_sites(sites: Tensor, shape: Geometry, faults: Tensor) -> tuple[Tensor, Tensor]:
    """Fill a new hash table with the keys of the input sites. Also return the input row of each slot's key."""
    table = _table(len(sites), sites.device)
    rows = torch.empty((len(table),), dtype=torch.int32, device=sites.device)
    sizes = (shape.dims, shape.batch_size, four(shape.in_shape))
    launch_warp(load_kernels().insert_sites, (len(sites),), sites, *sizes, table, rows, faults)
    return table, rows


def _table(keys: int, device: torch.device) -> Tensor:
    """An empty hash table that is at most half full after `keys` keys are inserted."""
    slots = 1 << (2 * max(keys, 1) - 1).bit_length()
    if slots > MAX_SLOTS:
        raise ValueError(f"a table of {keys} sites exceeds the limit of {MAX_SLOTS // 2}: split the batch")
    return torch.full((slots,), EMPTY, dtype=torch.int64, device=device)


def _sites(indices: Tensor) -> Tensor:
    return indices.long().contiguous()


def no_faults(indices: Tensor) -> Tensor:
    """Create the fault flags, none of them set: (3,) int32 zeros on the device of the indices."""
    return torch.zeros(3, dtype=torch.int32, device=indices.device)
