"""View strided tensors as rows, and count their sizes in groups of elements, for launches."""

from __future__ import annotations

import math

from torch import Tensor


def unit(*sizes: int) -> int:
    """The largest of 1, 2, 4 and 8 elements (8 elements of half precision are 16 bytes) that divides all sizes. 1 if a
    size exceeds 32 bits: kernels multiply sizes in units by the unit, and a product of 32-bit integers would overflow.
    """
    return math.gcd(8, *sizes) if max(sizes) < 1 << 31 else 1


LINE_BYTES = 16
"""The largest size of a load, in bytes."""


def from_line(x: Tensor) -> tuple[Tensor, int]:
    """Return (view, offset). The view begins at the last address that is a multiple of 16 bytes and is not after x, and
    x begins `offset` elements after the view's beginning. If the storage of x begins after that address, return (x, 0).
    A kernel that gets the view and the offset can load 16 bytes at once: Triton's compiler knows only whether a pointer
    is a multiple of 16 bytes.
    """
    size = x.element_size()
    beyond = x.data_ptr() % LINE_BYTES
    lead = beyond // size
    if not lead or beyond % size or lead > x.storage_offset():
        return x, 0
    return x.as_strided((1,), (1,), x.storage_offset() - lead), lead


def rows_of(x: Tensor) -> Tensor:
    """x (..., N) as (M, N) with unit column stride; a view if the strides allow one, else a copy."""
    table = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return table if table.stride(1) == 1 else table.contiguous()


def unit_columns(x: Tensor) -> Tensor:
    """x (M, N), copied if the elements of a row are not contiguous; rows may have any stride."""
    return x if x.stride(1) == 1 else x.contiguous()
