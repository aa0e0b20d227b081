"""Triton kernels that resize many photographs as Pillow does; `pillow_resize.py` launches them and makes the tables."""

from __future__ import annotations

import triton
import triton.language as tl

HALF, ONE_BITS = tl.constexpr(1 << 21), tl.constexpr(22)  # weights are integers, and 2**22 stands for 1

# Columns of the table of photographs.
START, STRIDE = tl.constexpr(0), tl.constexpr(1)  # index of the first value that is read; values of a stored row
ROWS, WIDTH = tl.constexpr(2), tl.constexpr(3)  # number of rows that are resized, and of pixels in a resized row
# the weights that resize rows: index of the first one in `tables`, and their number per result pixel
COLUMN_TABLE, COLUMN_TAPS = tl.constexpr(4), tl.constexpr(5)
HEIGHT = tl.constexpr(6)  # rows of the result
ROW_TABLE, ROW_TAPS = tl.constexpr(7), tl.constexpr(8)  # the same for the weights that resize columns
# index of the photograph's first value in the output of `resize_across`, and of `resize_down`
BETWEEN, OUT = tl.constexpr(9), tl.constexpr(10)
ENTRIES = tl.constexpr(11)


@triton.jit
def rounded(total):
    """Convert a weighted sum, which is a fixed-point number, to uint8."""
    return tl.minimum(tl.maximum((total + HALF) >> ONE_BITS, 0), 255).to(tl.uint8)


@triton.jit
def resize_across(
    pixels,  # (bytes,) uint8: the photographs, (height, width, 3) each
    photographs,  # (N, ENTRIES) int64
    tables,  # int32: the weights of all axes
    out,  # (bytes,) uint8: the resized rows, (ROWS, WIDTH, 3) for each photograph
    BLOCK: tl.constexpr,
):
    """Resize a photograph horizontally. Each program computes BLOCK pixels of the result."""
    entry = photographs + tl.program_id(1) * ENTRIES
    width = tl.load(entry + WIDTH).to(tl.int32)
    count = tl.load(entry + ROWS).to(tl.int32) * width
    if tl.program_id(0) * BLOCK < count:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = place < count
        row, column = place // width, place % width
        taps = tl.load(entry + COLUMN_TAPS).to(tl.int32)
        weights = tables + tl.load(entry + COLUMN_TABLE) + column * (taps + 1)
        first = tl.load(weights, mask=there, other=0)
        source = pixels + tl.load(entry + START) + row * tl.load(entry + STRIDE).to(tl.int32) + 3 * first
        red = tl.zeros((BLOCK,), tl.int32)
        green = tl.zeros((BLOCK,), tl.int32)
        blue = tl.zeros((BLOCK,), tl.int32)
        for tap in range(taps):
            weight = tl.load(weights + 1 + tap, mask=there, other=0)
            used = there & (weight != 0)  # beyond the photograph's edge, weights are 0
            red += weight * tl.load(source + 3 * tap, mask=used, other=0).to(tl.int32)
            green += weight * tl.load(source + 3 * tap + 1, mask=used, other=0).to(tl.int32)
            blue += weight * tl.load(source + 3 * tap + 2, mask=used, other=0).to(tl.int32)
        to = out + tl.load(entry + BETWEEN) + 3 * place
        tl.store(to, rounded(red), mask=there)
        tl.store(to + 1, rounded(green), mask=there)
        tl.store(to + 2, rounded(blue), mask=there)


@triton.jit
def resize_down(
    rows,  # (bytes,) uint8: the result of `resize_across`
    photographs, tables,  # as in `resize_across`
    out,  # (bytes,) uint8: the results, (HEIGHT, WIDTH, 3) for each photograph
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Resize a photograph vertically. Each program computes BLOCK values of one row of the result."""
    entry = photographs + tl.program_id(2) * ENTRIES
    width = 3 * tl.load(entry + WIDTH).to(tl.int32)
    row = tl.program_id(1)
    if (row < tl.load(entry + HEIGHT).to(tl.int32)) & (tl.program_id(0) * BLOCK < width):
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        taps = tl.load(entry + ROW_TAPS).to(tl.int32)
        weights = tables + tl.load(entry + ROW_TABLE) + row * (taps + 1)
        source = rows + tl.load(entry + BETWEEN) + tl.load(weights) * width + column
        total = tl.zeros((BLOCK,), tl.int32)
        for tap in range(taps):
            weight = tl.load(weights + 1 + tap)
            used = (column < width) & (weight != 0)
            total += weight * tl.load(source + tap * width, mask=used, other=0).to(tl.int32)
        tl.store(out + tl.load(entry + OUT) + row * width + column, rounded(total), mask=column < width)
