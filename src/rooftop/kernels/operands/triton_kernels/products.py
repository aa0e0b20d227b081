"""Functions for kernels that multiply matrices: order of the tiles, one step of a product, and parts of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Compute (row, column) of the tile with number `tile`, in tiles. Tiles are ordered in bands that are GROUP tiles
    high. Within a band, the tiles are ordered column by column.
    """
    band = tile // (GROUP * column_tiles)
    height = min(row_tiles - band * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return band * GROUP + within % height, within // height


@triton.jit
def product(left, right, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """left @ right in float32. WIDEN converts the operands to float32 first, as in `plus_product`."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def plus_product(left, right, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + left @ right. WIDEN converts the operands to float32 first: in a product, Triton's interpreter would read
    the bits of bfloat16 as integers.
    """
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def in_parts(values, PARTS: tl.constexpr):
    """Split (ROWS, COLUMNS) into a tuple of 1, 2 or 4 tensors, each with COLUMNS / PARTS neighbouring columns."""
    if PARTS == 1:
        return (values,)
    else:
        left, right = _halves(values)
        if PARTS == 2:
            return (left, right)
        else:
            first, second = _halves(left)
            third, fourth = _halves(right)
            return (first, second, third, fourth)


@triton.jit
def _halves(values):
    apart = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2))
    return tl.split(tl.permute(apart, (0, 2, 1)))
