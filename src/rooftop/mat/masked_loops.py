"""Copy under a mask on the CPU, in loops that Numba compiles: one pass over memory, without a branch at each element.

A row is processed in blocks. A block whose mask is all 0 is skipped. A block whose mask has no 0 is copied. For other
blocks, each mask byte is expanded over the channels as 0 or all ones, and SIMD instructions compute
`target ^ ((source ^ target) & mask)`. The loops are compiled once for each width of numbers and cached next to this
file, so that later processes load them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.launch.numba_loops import in_threads, kept_loop, memory_of, run_part

_LEAST_PER_THREAD = 1 << 18
_BLOCK = 2048  # numbers of a row per block; their expanded mask stays in the L1 cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_by_loops(source: Tensor, target: Tensor, mask: Tensor) -> bool:
    """Copy the elements whose mask is not 0. Return False, and copy nothing, if these loops do not support the layout.

    Args:
        source: (..., channels) as the target, or one element (channels,).
        target: (..., channels), of two dimensions or more; overlaps neither `source` nor `mask`.
        mask: uint8 or bool, (..., 1) for whole elements or (..., channels).
    """
    is_value, by_number = source.dim() == 1, mask.shape[-1] > 1
    views = [target, mask.view(torch.uint8), *([] if is_value else [source])]
    if (by_number and is_value) or not all(map(_has_rows, views)):
        return False
    width = target.element_size() * (1 if by_number else target.shape[-1])  # number of bytes that a mask byte selects
    if width in _BITS and all(_is_of(x, width) for x in [target, source]):
        bits, channels = _BITS[width], 1
    else:
        bits, channels = _BITS[target.element_size()], target.shape[-1]
    block = max(_BLOCK // channels, 1)
    views = [views[0].view(bits), views[1], *(x.view(bits) for x in views[2:])]
    rows = [x.flatten(-2) for x in views]  # (..., columns * channels); the mask is (..., columns)
    if all(x.is_contiguous() for x in rows):
        rows = [x.reshape(1, -1) for x in rows]
    columns = rows[1].shape[-1]
    repeated = [np.tile(source.view(bits).numpy(), block)] if is_value else []
    parts = -(-columns // block)
    for index in product(*map(range, rows[0].shape[:-2])):
        planes = [x[index] if index else x for x in rows]
        given: list[Any] = []
        for x in planes:
            given += [memory_of(x), x.stride(0) if x.dim() > 1 else 0]
        given += [*repeated, 0] if is_value else []
        count = parts * (planes[0].shape[0] if planes[0].dim() > 1 else 1)
        given += [is_value, columns, channels, block]
        in_threads(run_part(_copy, given), count, target.numel() // _LEAST_PER_THREAD)
    return True


def _has_rows(x: Tensor) -> bool:
    """Whether each row, the last two dimensions (columns, channels), is contiguous."""
    return x[(0,) * (x.dim() - 2)].is_contiguous()


def _is_of(x: Tensor, width: int) -> bool:
    """Whether x (..., channels) can be viewed as numbers of `width` bytes. It can if its numbers have this size. It
    also can if an element with all channels has this size, and the offset and all steps are multiples of this size.
    """
    own = x.element_size()
    steps = [x.storage_offset(), *x.stride()[:-1]]
    return width == own or (x.shape[-1] * own == width and all(step * own % width == 0 for step in steps))


@kept_loop
def _copy(
    first: int, last: int, target: np.ndarray, target_step: int, mask: np.ndarray, mask_step: int,
    source: np.ndarray, source_step: int, is_value: bool, columns: int, channels: int, block: int,
) -> None:  # fmt: skip
    """Copy the blocks `first` to `last` - 1 of the target under the mask. A block is a part of one row; blocks are
    numbered along the first row, then along the second, and so on."""
    parts = (columns + block - 1) // block
    room = np.empty(block * channels, target.dtype)
    zero, ones = room.dtype.type(0), ~room.dtype.type(0)
    for n in range(first, last):
        i, j = n // parts, n % parts * block
        width = min(block, columns - j)
        chosen = mask[i * mask_step + j : i * mask_step + j + width]
        least, most = np.uint8(255), np.uint8(0)
        for k in range(width):
            least, most = min(least, chosen[k]), max(most, chosen[k])
        if most == 0:
            continue
        numbers = width * channels
        begin = i * target_step + j * channels
        into = target[begin : begin + numbers]
        begin = 0 if is_value else i * source_step + j * channels
        some = source[begin : begin + numbers]
        if least > 0:
            for k in range(numbers):
                into[k] = some[k]
            continue
        spread = room[:numbers]
        if channels == 1:
            for k in range(width):
                spread[k] = ones if chosen[k] != 0 else zero
        elif channels == 3:
            for k in range(width):
                one = ones if chosen[k] != 0 else zero
                spread[3 * k] = one
                spread[3 * k + 1] = one
                spread[3 * k + 2] = one
        else:
            for k in range(width):
                one = ones if chosen[k] != 0 else zero
                for c in range(channels):
                    spread[channels * k + c] = one
        for k in range(numbers):
            into[k] = into[k] ^ ((some[k] ^ into[k]) & spread[k])
