"""Copies under a mask on a GPU: one kernel, which reads the mask and what is chosen, and writes that alone.

Bound by memory where the mask has areas, as most do. At their edges, and all over where neighbours differ at random,
numbers are stored one by one: of bytes that takes several times as long.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from rooftop.kernels.tiles import LINE_BYTES, from_line
from rooftop.launch.triton_launch import launch, require_triton

_TILE_BYTES = 2048  # of a program: 16 for each thread of four warps
_LEAST_TILE = 1024  # numbers, of wide ones
_WARPS = 4
Line = tuple[int, int, int]  # steps of target, mask and source


def copy_by_kernel(source: Tensor, target: Tensor, mask: Tensor) -> None:
    """Copies the elements whose mask is not 0.

    Args:
        source: as the target, or one element (channels,).
        target: (..., channels), the channels side by side; of integers that carry bits.
        mask: uint8 or bool, (..., 1) for whole elements or (..., channels).
    """
    if not target.numel():
        return
    require_triton()
    from rooftop.mat.masked_copy_kernels import masked_copy

    channels, marks = target.shape[-1], mask.shape[-1]
    is_value = source.dim() == 1
    per = channels // marks  # numbers for each of the mask
    dims, columns = _dims(target, mask, None if is_value else source)
    unit = math.gcd(LINE_BYTES // target.element_size(), columns)
    begins = [from_line(target), (source, 0) if is_value else from_line(source)]
    for _, lead in begins:
        unit = math.gcd(unit, lead)
    for _, (of_target, _, of_source) in dims:
        unit = math.gcd(unit, of_target, of_source)
    while len(dims) < 2:
        dims.insert(0, (1, (0, 0, 0)))
    *outer, (over, across), (inner_rows, down) = dims
    rows = over * inner_rows
    tile = max(_TILE_BYTES // target.element_size(), _LEAST_TILE)
    width = min(tile, 1 << (columns - 1).bit_length())
    height = min(tile // width, 1 << (rows - 1).bit_length())
    steps = [each[n] // divisor for n, divisor in ((2, unit), (0, unit), (1, 1)) for each in (across, down)]
    spans = [columns + sum((size - 1) * each[n] for size, each in dims) for n in range(3)]
    constants = {
        "CHANNELS": channels if is_value else 0,
        "PER": per, "UNIT": unit, "WIDE": max(*spans, rows * columns) >= 2**31, "ROWS": height, "COLUMNS": width,
        "num_warps": _WARPS,
    }  # fmt: skip
    grid = (-(-rows // height) * -(-columns // width),)
    marked = mask.view(torch.uint8)
    for index in product(*(range(size) for size, _ in outer)):
        more = [sum(n * each[k] for n, (_, each) in zip(index, outer, strict=True)) for k in range(3)]
        (into, target_lead), (some, source_lead) = begins
        leads = [(source_lead + more[2]) // unit, (target_lead + more[0]) // unit]
        at = marked.as_strided((1,), (1,), marked.storage_offset() + more[1]) if more[1] else marked
        launch(
            masked_copy, grid, target.device, some, into, at, *leads, rows, inner_rows, columns // unit, *steps,
            **constants,
        )  # fmt: skip


def _dims(target: Tensor, mask: Tensor, source: Tensor | None) -> tuple[list[tuple[int, Line]], int]:
    """The dimensions of elements, outermost first, with the steps of target, mask and source, those merged that all
    walk through as if they were one; and how many numbers lie side by side in the last one, which is left out."""
    dims: list[tuple[int, Line]] = []
    for d, size in enumerate(target.shape[:-1]):
        steps = (target.stride(d), mask.stride(d), 0 if source is None else source.stride(d))
        if size == 1:
            continue
        if dims and all(before == size * step for before, step in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, steps)
        else:
            dims.append((size, steps))
    channels = target.shape[-1]
    beside = (channels, mask.shape[-1], 0 if source is None else channels)
    if dims and dims[-1][1] == beside:
        return dims[:-1], dims[-1][0] * channels
    return dims, channels
