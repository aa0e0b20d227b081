"""Convert sites (batch, coordinates) of a grid to and from int64 keys, and check their range.

The key of a site is ((batch * Z + z) * Y + y) * X + x.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from rooftop.sparse.geometries import INT32_SIZE, MAX_ROWS

# ---- keys ------------------------------------------------------------------------------------------------------


def keys_of(sites: Tensor, shape: Sequence[int]) -> Tensor:
    """Convert sites (..., 1 + dims) int64, whose first column is the batch index, to int64 keys (...). A key is the
    number of the site's cell in row-major order.
    """
    keys = sites[..., 0]
    for dim, size in enumerate(shape):
        keys = keys * size + sites[..., 1 + dim]
    return keys


def sites_of(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Convert keys (...) back to sites (..., 1 + dims) int64, with the batch index first: the reverse of `keys_of`."""
    columns = []
    for size in reversed(shape):
        columns.append(keys % size)
        keys = keys.div(size, rounding_mode="floor")
    return torch.stack([keys, *reversed(columns)], -1)


# ---- checks ----------------------------------------------------------------------------------------------------


def check_sites(indices: Tensor, batch_size: int, shape: Sequence[int]) -> None:
    """Raise `ValueError` for the first row out of range or, if there is none, for the first row that repeats a site.

    Rows of -1 are not sites and are skipped. The host waits for the device.
    """
    check_range(indices, batch_size, shape)
    sites = indices.long()
    rows = (sites[:, 0] >= 0).nonzero().squeeze(1)
    keys, order = keys_of(sites[rows], shape).sort(stable=True)
    repeats = order[1:][keys[1:] == keys[:-1]]
    if len(repeats):
        row = int(rows[repeats.min()])
        first = int((sites == sites[row]).all(1).nonzero()[0])
        raise ValueError(
            f"rows {first} and {row} of indices are the same site {indices[row].tolist()}: each site may occur only "
            "once; SparseConvTensor.coalesce() merges duplicates"
        )


def check_range(indices: Tensor, batch_size: int, shape: Sequence[int]) -> None:
    """Raise `ValueError` for the first row that is out of range. Rows of -1 are skipped."""
    sites = indices.long()
    outside = (sites != -1).any(1) & ~in_range(sites, batch_size, shape)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"row {row} of indices is {indices[row].tolist()}: (batch, coordinates) must be at least 0 and below "
            f"{(batch_size, *shape)}"
        )


def in_range(sites: Tensor, batch_size: int, shape: Sequence[int]) -> Tensor:
    """Return which rows of sites (N, 1 + dims) int64 are in range, (N,) bool."""
    inside = (sites[:, 0] >= 0) & (sites[:, 0] < batch_size)
    for dim, size in enumerate(shape):
        inside &= (sites[:, 1 + dim] >= 0) & (sites[:, 1 + dim] < size)
    return inside


def checks_values(indices: Tensor) -> bool:
    """Whether invalid indices raise an error immediately: on the CPU, and on a GPU with ROOFTOP_CHECK=1 unless a CUDA
    graph is being captured."""
    if indices.device.type == "cpu":
        return True
    return os.environ.get("ROOFTOP_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()


def check_indices(indices: Tensor, dims: int) -> None:
    """Raise an error unless indices are (N, 1 + dims) int32 or int64."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices must be a tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be torch.int32 or torch.int64, got {indices.dtype}: convert with indices.int()")
    if indices.dim() != 2 or indices.shape[1] != 1 + dims:
        raise ValueError(
            f"indices must be (N, {1 + dims}), (batch, then {dims} coordinates), as spatial_shape has {dims} "
            f"dimensions; got {tuple(indices.shape)}"
        )
    if indices.shape[0] > MAX_ROWS:
        raise ValueError(f"{indices.shape[0]} rows of indices exceed the range of int32: split the batch")


def check_int32(what: str, sizes: Sequence[int], remedy: str) -> None:
    """Raise `ValueError` if int32 indices cannot store all coordinates of a grid with these sizes."""
    if any(size > INT32_SIZE for size in sizes):
        raise ValueError(f"{what} {tuple(sizes)} exceeds 2^31, the range of int32 indices: {remedy}")
