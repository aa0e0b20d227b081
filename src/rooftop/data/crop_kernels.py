"""Triton kernels that crop, resize, flip and shift photographs of different sizes; `device_crops.py` launches them.

A bilinear resize with antialiasing is separable. The first kernel resizes the rows of all crops, to float32. The second
kernel resizes the columns and rounds. The weights are the same as in PyTorch's `interpolate`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.scalars import round_half_even

# Columns of the int32 table of crops
TOP, LEFT, HEIGHT, WIDTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # of the crop
STRIDE, PLANE = tl.constexpr(4), tl.constexpr(5)  # elements between the photograph's rows and colour planes
FIRST_ROW = tl.constexpr(6)  # index of the crop's first row among the rows of all crops
OUT_TOP, OUT_LEFT = tl.constexpr(7), tl.constexpr(8)  # position of the result's top-left pixel in the resized crop
# maximum number of input pixels that contribute to an output pixel, down and across
ROW_TAPS, COLUMN_TAPS = tl.constexpr(9), tl.constexpr(10)
FLIP, DOWN, RIGHT = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)  # FLIP: 1 or 0; shift of the result, in pixels
ENTRIES = tl.constexpr(14)


@triton.jit
def weight_of(position, centre, support, there):
    """The weight of an input pixel at `position` when pixels around `centre` are averaged, before the weights are
    divided by their sum."""
    return tl.where(there, tl.maximum(1.0 - tl.abs((position.to(tl.float32) - centre + 0.5) / support), 0.0), 0.0)


@triton.jit
def resize_rows(
    pixels,  # all photographs, (3, H, W) uint8 each, one after another
    starts,  # (N,) int64: index of each photograph's first value in `pixels`
    crops,  # (N, ENTRIES) int32
    scales,  # (N, 2) float32: crop pixels per result pixel, down and across
    out,  # (rows of all crops, 3, size) float32
    size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Resize ROWS of a crop's original rows to the width of the result, `size` columns."""
    number = tl.program_id(1)
    crop = crops + number * ENTRIES
    height, width = tl.load(crop + HEIGHT), tl.load(crop + WIDTH)
    if tl.program_id(0) * ROWS < height:
        plane = tl.load(crop + PLANE)
        scale = tl.load(scales + number * 2 + 1)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        centre = ((column + tl.load(crop + OUT_LEFT)).to(tl.float32) + 0.5) * scale
        support = tl.maximum(scale, 1.0)
        first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
        last = tl.minimum((centre + support + 0.5).to(tl.int32), width)
        from_row = (tl.load(crop + TOP) + row) * tl.load(crop + STRIDE) + tl.load(crop + LEFT)
        source = pixels + tl.load(starts + number) + from_row[:, None]
        red = tl.zeros((ROWS, COLUMNS), tl.float32)
        green = tl.zeros((ROWS, COLUMNS), tl.float32)
        blue = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        for tap in range(tl.load(crop + COLUMN_TAPS)):
            position = first + tap
            there = (position < last) & (column < size)
            weight = weight_of(position, centre, support, there)
            at, mask = source + position[None, :], there[None, :] & (row < height)[:, None]
            red += weight[None, :] * tl.load(at, mask=mask, other=0).to(tl.float32)
            green += weight[None, :] * tl.load(at + plane, mask=mask, other=0).to(tl.float32)
            blue += weight[None, :] * tl.load(at + 2 * plane, mask=mask, other=0).to(tl.float32)
            total += weight
        total = tl.where(column < size, total, 1.0)[None, :]
        to_row = (tl.load(crop + FIRST_ROW) + row).to(tl.int64) * (3 * size)
        at, mask = out + to_row[:, None] + column[None, :], (row < height)[:, None] & (column < size)[None, :]
        tl.store(at, red / total, mask=mask)
        tl.store(at + size, green / total, mask=mask)
        tl.store(at + 2 * size, blue / total, mask=mask)


@triton.jit
def resize_columns(
    rows,  # (rows of all crops, 3, size) float32
    crops, scales,  # as in resize_rows
    out,  # (N, size, size, 3) uint8, all zeros
    size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Resize the columns of a crop for ROWS rows of the result, then flip and shift these rows."""
    number = tl.program_id(1)
    crop = crops + number * ENTRIES
    scale = tl.load(scales + number * 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    centre = ((row + tl.load(crop + OUT_TOP)).to(tl.float32) + 0.5) * scale
    support = tl.maximum(scale, 1.0)
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + support + 0.5).to(tl.int32), tl.load(crop + HEIGHT))
    source = rows + tl.load(crop + FIRST_ROW).to(tl.int64) * (3 * size) + column[None, :]
    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green = tl.zeros((ROWS, COLUMNS), tl.float32)
    blue = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for tap in range(tl.load(crop + ROW_TAPS)):
        position = first + tap
        there = (position < last) & (row < size)
        weight = weight_of(position, centre, support, there)
        at, mask = source + (position * (3 * size))[:, None], there[:, None] & (column < size)[None, :]
        red += weight[:, None] * tl.load(at, mask=mask, other=0.0)
        green += weight[:, None] * tl.load(at + size, mask=mask, other=0.0)
        blue += weight[:, None] * tl.load(at + 2 * size, mask=mask, other=0.0)
        total += weight
    total = tl.where(row < size, total, 1.0)[:, None]
    down = row + tl.load(crop + DOWN)
    right = tl.where(tl.load(crop + FLIP) != 0, size - 1 - column, column) + tl.load(crop + RIGHT)
    there = ((row < size) & (down >= 0) & (down < size))[:, None]
    there = there & ((column < size) & (right >= 0) & (right < size))[None, :]
    at = out + number.to(tl.int64) * (3 * size * size) + down[:, None] * (3 * size) + right[None, :] * 3
    tl.store(at, round_half_even(red / total).to(tl.uint8), mask=there)
    tl.store(at + 1, round_half_even(green / total).to(tl.uint8), mask=there)
    tl.store(at + 2, round_half_even(blue / total).to(tl.uint8), mask=there)
