"""The Triton kernels that correspond to `layer.cu`."""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # operation on each sum before it is stored, numbered as in layer.cu
SIGMOID = tl.constexpr(1)
GRADIENT = tl.constexpr(2)
STEP = tl.constexpr(3)


@triton.jit
def product(
    a, b,  # (rows, depth) and (depth, columns), with any strides
    extra,  # (columns,) for SIGMOID, (rows, columns) for GRADIENT
    c,  # (rows, columns)
    rows, columns, depth, a_row, a_k, b_k, b_column, rate,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of c, in float32 without TF32."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, depth, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            a + row * a_row + k[None, :] * a_k, mask=(row < rows) & (k[None, :] < depth), other=0.0
        )  # (ROWS, DEPTH)
        right = tl.load(
            b + k[:, None] * b_k + column * b_column, mask=(k[:, None] < depth) & (column < columns), other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (row < rows) & (column < columns)
    target = c + row * columns + column
    if EPILOGUE == SIGMOID:
        total = tl.sigmoid(total + tl.load(extra + column, mask=column < columns, other=0.0))
    if EPILOGUE == GRADIENT:
        h = tl.load(extra + row * columns + column, mask=inside, other=0.0)
        total *= h * (1.0 - h)
    if EPILOGUE == STEP:
        total = tl.load(target, mask=inside, other=0.0) - rate * total
    tl.store(target, total, mask=inside)


@triton.jit
def bias_sigmoid(y, bias, count, columns, BLOCK: tl.constexpr):  # y (rows, columns), bias (columns,)
    """Apply bias and sigmoid in place, in a separate kernel."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(y + at, mask=at < count, other=0.0) + tl.load(bias + at % columns, mask=at < count, other=0.0)
    tl.store(y + at, tl.sigmoid(z), mask=at < count)


@triton.jit
def output_gradient(y, target, dz, rows, columns, BLOCK: tl.constexpr):  # y, dz (rows, columns), target (rows,)
    """dz = (y - one_hot(target)) / rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    hot = tl.load(target + at // columns, mask=inside, other=-1) == at % columns
    value = tl.load(y + at, mask=inside, other=0.0) - tl.where(hot, 1.0, 0.0)
    tl.store(dz + at, value / rows, mask=inside)


@triton.jit
def bias_step(dz, bias, rows, columns, rate, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # ROWS, COLUMNS: powers of 2
    """bias -= rate * the sum of dz over its rows."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    inside = (row < rows) & (column[None, :] < columns)
    total = tl.sum(tl.load(dz + row * columns + column[None, :], mask=inside, other=0.0), axis=0)
    before = tl.load(bias + column, mask=column < columns, other=0.0)
    tl.store(bias + column, before - rate * total, mask=column < columns)
