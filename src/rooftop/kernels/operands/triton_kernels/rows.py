"""Functions of kernels over rows: masks of the elements inside a tensor, and reductions over lanes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute (row, column, inside) for the elements of this program's tile. Consecutive programs have neighbouring
    tiles.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def is_inside(row, rows, column, columns, FULL: tl.constexpr):
    """Mask of the elements of a block that are inside the tensor. The mask is (ROWS, 1) if all columns are inside
    (FULL), else (ROWS, COLUMNS).
    """
    inside = (row < rows)[:, None]
    if not FULL:
        inside = inside & (column < columns)[None, :]
    return inside


@triton.jit
def fold_scores(largest, total, scores, GROUP: tl.constexpr):
    """Update each lane's maximum, and the lane's sum of exp(score - maximum), with the next GROUP neighbouring scores.

    The sum is rescaled once per group instead of once per score. A lane whose scores are all -inf has a sum of 0.
    """
    groups = tl.reshape(scores, (scores.shape[0] // GROUP, GROUP))
    higher = tl.maximum(largest, tl.max(groups, axis=1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(largest - origin) + tl.sum(tl.exp(groups - origin[:, None]), axis=1)


@triton.jit
def merge_lanes(largest, total, WIDE: tl.constexpr):
    """Compute the maximum of all lanes, and the sum of the lanes' exponentials relative to this maximum."""
    maximum = tl.max(largest, axis=0)
    return maximum, sum_of_lanes(total * tl.exp(largest - maximum), 0, WIDE)


@triton.jit
def sum_of_lanes(total, axis: tl.constexpr, WIDE: tl.constexpr):
    """Sums along an axis, in float64 if WIDE, else in float32."""
    return tl.sum(widened(total, WIDE), axis=axis)


@triton.jit
def widened(values, WIDE: tl.constexpr):
    """Convert values to float64 if WIDE, else to float32."""
    return values.to(tl.float64 if WIDE else tl.float32)
