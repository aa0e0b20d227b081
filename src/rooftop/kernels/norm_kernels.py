"""Triton kernels of the layer norm; `norms.py` has the operator.

A row of up to `LARGEST_TILE` elements is read once and held in registers, several short rows to a program. A longer
row is read three times (mean, variance, result), of which L2 serves the second and third.

Statistics are float32 and of two passes, mean then squared deviations: rows with a large common offset keep theirs.
A sum is multiplied by 1 / N, not divided by N: the fast division is not exact even for N = 1.
All offsets of rows are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_norm_forward(
    x, weight, bias, y, mean, rstd,  # (M, N), (N,), (N,), (M, N), (M,), (M,)
    rows, columns, row_stride, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    average = tl.sum(values, axis=1) * (1.0 / columns)  # (ROWS,)
    centred = tl.where(inside, values - average[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) * (1.0 / columns) + eps)
    result = centred * scale[:, None]
    if HAS_WEIGHT:
        result *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def layer_norm_forward_long(
    x, weight, bias, y, mean, rstd,  # as above
    rows, columns, row_stride, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * row_stride, y + row * columns
    at = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        total += tl.load(source + start + at, mask=start + at < columns, other=0.0).to(tl.float32)
    average = tl.sum(total, axis=0) * (1.0 / columns)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        values = tl.load(source + start + at, mask=start + at < columns, other=0.0).to(tl.float32)
        centred = tl.where(start + at < columns, values - average, 0.0)
        squares += centred * centred
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) * (1.0 / columns) + eps)
    for start in range(0, columns, COLUMNS):
        inside = start + at < columns
        result = (tl.load(source + start + at, mask=inside, other=0.0).to(tl.float32) - average) * scale
        if HAS_WEIGHT:
            result *= tl.load(weight + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            result += tl.load(bias + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + start + at, result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, average)
    tl.store(rstd + row, scale)


@triton.jit
def layer_norm_backward(
    dy, x, weight, mean, rstd, dx,  # (M, N), (M, N), (N,), (M,), (M,), (M, N)
    partial_weight, partial_bias,  # (programs, N) float32: each program's sum over its rows
    rows, columns, dy_stride, x_stride,
    HAS_WEIGHT: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    # A program takes every (number of programs)-th tile of rows, always the same ones: sums are deterministic.
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < rows, other=0.0)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normal = tl.where(inside, (values - average[:, None]) * scale[:, None], 0.0)  # (ROWS, COLUMNS)
        if SUM_WEIGHT:
            weight_sum += tl.sum(gradient * normal, axis=0)
        if SUM_BIAS:
            bias_sum += tl.sum(gradient, axis=0)
        if HAS_WEIGHT:
            gradient *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        mean_gradient = tl.sum(gradient, axis=1) * (1.0 / columns)
        mean_product = tl.sum(gradient * normal, axis=1) * (1.0 / columns)
        result = (gradient - mean_gradient[:, None] - normal * mean_product[:, None]) * scale[:, None]
        tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
    offset = program.to(tl.int64) * columns + column
    if SUM_WEIGHT:
        tl.store(partial_weight + offset, weight_sum, mask=column < columns)
    if SUM_BIAS:
        tl.store(partial_bias + offset, bias_sum, mask=column < columns)


@triton.jit
def layer_norm_backward_long(
    dy, x, weight, mean, rstd, dx,  # as above
    rows, columns, dy_stride, x_stride,
    HAS_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    average, scale = tl.load(mean + row), tl.load(rstd + row)
    gradients = tl.zeros((COLUMNS,), tl.float32)
    products = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = start + at < columns
        gradient = tl.load(dy + row * dy_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            gradient *= tl.load(weight + start + at, mask=inside, other=0.0).to(tl.float32)
        gradients += gradient
        products += tl.where(inside, gradient * ((values - average) * scale), 0.0)
    mean_gradient = tl.sum(gradients, axis=0) * (1.0 / columns)
    mean_product = tl.sum(products, axis=0) * (1.0 / columns)
    for start in range(0, columns, COLUMNS):
        inside = start + at < columns
        gradient = tl.load(dy + row * dy_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            gradient *= tl.load(weight + start + at, mask=inside, other=0.0).to(tl.float32)
        result = (gradient - mean_gradient - (values - average) * scale * mean_product) * scale
        tl.store(dx + row * columns + start + at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_column_sums(
    dy, x, mean, rstd, partial_weight, partial_bias,  # (M, N), (M, N), (M,), (M,), (chunks, N), (chunks, N)
    rows, columns, dy_stride, x_stride, chunk,
    SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over one chunk of rows for one block of columns: the gradients of weight and bias for long rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, rows)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < last)[:, None] & (column < columns)[None, :]
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < last, other=0.0)
        scale = tl.load(rstd + row, mask=row < last, other=0.0)
        normal = tl.where(inside, (values - average[:, None]) * scale[:, None], 0.0)
        weight_sum += tl.sum(gradient * normal, axis=0)
        bias_sum += tl.sum(gradient, axis=0)
    offset = tl.program_id(1).to(tl.int64) * columns + column
    if SUM_WEIGHT:
        tl.store(partial_weight + offset, weight_sum, mask=column < columns)
    if SUM_BIAS:
        tl.store(partial_bias + offset, bias_sum, mask=column < columns)
