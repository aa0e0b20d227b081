"""Triton kernels that run before or after PyTorch's attention: merging of partial results, and preparation of the
gradient of the log-sum-exp.

`../states.py` and `../attentions.py` have the operators. Tensors (B, H, S, D) have contiguous features; all other
strides are arbitrary. The rows of a tensor are numbered in the order (b, h, s), like the log-sum-exps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_forward(
    out_a, lse_a, out_b, lse_b, out, lse,  # out*: (B, H, S, D); lse*: (B, H, S), contiguous
    rows, heads, positions,
    a_batch, a_head, a_position, b_batch, b_head, b_position, out_batch, out_head, out_position,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute (e^lse_a out_a + e^lse_b out_b) / e^lse for ROWS rows, with lse = log(e^lse_a + e^lse_b)."""
    row, column, real, inside = _tile(rows, WIDTH, BLOCK, ROWS)
    first = tl.load(lse_a + row, mask=real, other=0.0)
    second = tl.load(lse_b + row, mask=real, other=0.0)
    weight_a, weight_b, total = _weights(first, second)
    place_a = _place(row, heads, positions, a_batch, a_head, a_position)[:, None] + column[None, :]
    place_b = _place(row, heads, positions, b_batch, b_head, b_position)[:, None] + column[None, :]
    a = tl.load(out_a + place_a, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(out_b + place_b, mask=inside, other=0.0).to(tl.float32)
    result = _weighted(weight_a, a) + _weighted(weight_b, b)
    place = _place(row, heads, positions, out_batch, out_head, out_position)[:, None] + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, total, mask=real)


@triton.jit
def merge_backward(
    dout, dlse, out_a, lse_a, out_b, lse_b, dout_a, dlse_a, dout_b, dlse_b,  # dout*, out*: (B, H, S, D)
    rows, heads, positions,
    d_batch, d_head, d_position, a_batch, a_head, a_position, b_batch, b_head, b_position,
    da_batch, da_head, da_position, db_batch, db_head, db_position,
    HAS_DLSE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dout_a = w_a dout and dlse_a = w_a dlse + w_a w_b (dout . out_a - dout . out_b), and for part b the same
    with a and b exchanged. The weights have the sum w_a + w_b = 1.
    """
    row, column, real, inside = _tile(rows, WIDTH, BLOCK, ROWS)
    first = tl.load(lse_a + row, mask=real, other=0.0)
    second = tl.load(lse_b + row, mask=real, other=0.0)
    weight_a, weight_b, _ = _weights(first, second)
    place = _place(row, heads, positions, d_batch, d_head, d_position)[:, None] + column[None, :]
    gradient = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place_a = _place(row, heads, positions, a_batch, a_head, a_position)[:, None] + column[None, :]
    place_b = _place(row, heads, positions, b_batch, b_head, b_position)[:, None] + column[None, :]
    a = tl.load(out_a + place_a, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(out_b + place_b, mask=inside, other=0.0).to(tl.float32)
    both = weight_a * weight_b
    apart = tl.where(both > 0, both * tl.sum(gradient * (a - b), axis=1), 0.0)
    to_lse = tl.zeros((ROWS,), tl.float32)
    if HAS_DLSE:
        to_lse = tl.load(dlse + row, mask=real, other=0.0)
    tl.store(dlse_a + row, _weighted_number(weight_a, to_lse) + apart, mask=real)
    tl.store(dlse_b + row, _weighted_number(weight_b, to_lse) - apart, mask=real)
    place_a = _place(row, heads, positions, da_batch, da_head, da_position)[:, None] + column[None, :]
    place_b = _place(row, heads, positions, db_batch, db_head, db_position)[:, None] + column[None, :]
    tl.store(dout_a + place_a, _weighted(weight_a, gradient).to(dout_a.dtype.element_ty), mask=inside)
    tl.store(dout_b + place_b, _weighted(weight_b, gradient).to(dout_b.dtype.element_ty), mask=inside)


@triton.jit
def fold_lse_gradient(
    dout, dlse, out, new_dout, new_out,  # shapes: (B, H, S, D), (B, H, S) contiguous, (B, H, S, D)
    rows, heads, positions, limit,
    d_batch, d_head, d_position, o_batch, o_head, o_position,
    nd_batch, nd_head, nd_position, no_batch, no_head, no_position,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write new_dout and new_out with new_dout . new_out = dout . out - dlse (see `attentions.py`)."""
    row, column, real, inside = _tile(rows, WIDTH, BLOCK, ROWS)
    extra = tl.load(dlse + row, mask=real, other=0.0)
    place = _place(row, heads, positions, d_batch, d_head, d_position)[:, None] + column[None, :]
    gradient = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = _place(row, heads, positions, o_batch, o_head, o_position)[:, None] + column[None, :]
    value = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(gradient), axis=1)
    ample = largest * limit >= tl.abs(extra)  # False: `gradient` is negligible next to dlse
    unit = gradient / tl.where(ample & (largest > 0), largest, 1.0)[:, None]
    factor = extra / tl.where(ample & (largest > 0), largest * tl.sum(unit * unit, axis=1), 1.0)
    only = (column == 0)[None, :] & ~ample[:, None]
    value = tl.where(ample[:, None], value - factor[:, None] * unit, tl.where(only, -limit, value))
    gradient = tl.where(only, (extra / limit)[:, None], gradient)
    place = _place(row, heads, positions, nd_batch, nd_head, nd_position)[:, None] + column[None, :]
    tl.store(new_dout + place, gradient.to(new_dout.dtype.element_ty), mask=inside)
    place = _place(row, heads, positions, no_batch, no_head, no_position)[:, None] + column[None, :]
    tl.store(new_out + place, value.to(new_out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return (rows (ROWS,), columns (BLOCK,), mask of the rows, mask of the elements) of a program's tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    real = row < rows
    return row, column, real, real[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _place(row, heads, positions, batch_stride, head_stride, position_stride):
    """The offsets of rows in a tensor (B, H, S, D), if rows are numbered in the order (b, h, s)."""
    outer = row // positions
    return outer // heads * batch_stride + outer % heads * head_stride + row % positions * position_stride


@triton.jit
def _weights(first, second):
    """Compute (w_a, w_b, lse) from the log-sum-exps of two parts, or (0, 0, -inf) if both log-sum-exps are -inf."""
    largest = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    a, b = tl.exp(first - shift), tl.exp(second - shift)
    total = a + b
    divisor = tl.where(total == 0, 1.0, total)
    return tl.div_rn(a, divisor), tl.div_rn(b, divisor), shift + tl.log(total)


@triton.jit
def _weighted(weight, values):
    """weight * values; 0 where the weight is 0, even if the value is infinite or NaN."""
    return tl.where((weight == 0)[:, None], 0.0, weight[:, None] * values)


@triton.jit
def _weighted_number(weight, value):
    return tl.where(weight == 0, 0.0, weight * value)
