"""Triton kernels of the layer norm; `norms.py` has the operator.

Rows of up to 16384 elements are read from memory once: forward takes a few rows a program; backward lets persistent
programs walk over the rows while the next rows are already on their way to shared memory (`STAGES`), and keeps the sums
for the gradients of weight and bias in registers until the end. Longer rows are read twice, and backward splits in two:
sums along rows first, then tiles of columns that know them.

Statistics are float32, of squared deviations from the mean and not of squares: rows with a large common offset keep
theirs. A sum is multiplied by 1 / N, not divided by N: the fast division is not exact even for N = 1.

`units` and the strides count groups of UNIT elements, so that the compiler knows by what N is divisible and loads
several elements at a time; EVEN says that N fills the tile. All offsets of rows are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- forward -----------------------------------------------------------------------------------------------------


@triton.jit
def layer_norm_forward(
    x, weight, bias, y, mean, rstd,  # (M, N), (N,), (N,), (M, N), (M,), (M,)
    rows, units, x_stride, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)  # (ROWS,)
    column = tl.arange(0, COLUMNS)
    inside = _inside(row, rows, column, columns, EVEN)  # (ROWS, COLUMNS) or (ROWS, 1)
    values = tl.load(x + row[:, None] * (x_stride * UNIT) + column[None, :], mask=inside, other=0.0).to(tl.float32)
    average = tl.sum(values, axis=1) * (1.0 / columns)
    centred = values - average[:, None]
    if not EVEN:
        centred = tl.where(inside, centred, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) * (1.0 / columns) + eps)
    result = centred * scale[:, None]
    if HAS_WEIGHT:
        result *= _parameters(weight, column, columns, EVEN)[None, :]
    if HAS_BIAS:
        result += _parameters(bias, column, columns, EVEN)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def layer_norm_forward_long(
    x, weight, bias, y, mean, rstd,  # as above
    units, x_stride, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a row. Each lane keeps its own mean and squared deviations (Welford 1962), merged at the end."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * (x_stride * UNIT), y + row * columns
    lane = tl.arange(0, COLUMNS)
    lane_mean = tl.zeros((COLUMNS,), tl.float32)
    lane_squares = tl.zeros((COLUMNS,), tl.float32)
    count = 0.0
    for start in range(0, columns, COLUMNS):
        inside = start + lane < columns
        values = tl.load(source + start + lane, mask=inside, other=0.0).to(tl.float32)
        count += 1.0
        step = tl.where(inside, values - lane_mean, 0.0)
        lane_mean += step * (1.0 / count)
        lane_squares += tl.where(inside, step * (values - lane_mean), 0.0)
    lane_count = ((columns - lane + COLUMNS - 1) // COLUMNS).to(tl.float32)
    average = tl.sum(lane_mean * lane_count, axis=0) * (1.0 / columns)
    apart = lane_mean - average
    scale = 1.0 / tl.sqrt(tl.sum(lane_squares + lane_count * apart * apart, axis=0) * (1.0 / columns) + eps)
    for start in range(0, columns, COLUMNS):
        column = start + lane
        inside = column < columns
        result = (tl.load(source + column, mask=inside, other=0.0).to(tl.float32) - average) * scale
        if HAS_WEIGHT:
            result *= _parameters(weight, column, columns, False)
        if HAS_BIAS:
            result += _parameters(bias, column, columns, False)
        tl.store(target + column, result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, average)
    tl.store(rstd + row, scale)


# ---- backward ----------------------------------------------------------------------------------------------------


@triton.jit
def layer_norm_backward(
    dy, x, weight, mean, rstd, dx,  # (M, N), (M, N), (N,), (M,), (M,), (M, N)
    partial,  # (2, programs, N) float32: each program's sums over its rows, for weight and for bias
    rows, units, dy_stride, x_stride,
    HAS_WEIGHT: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """AGAIN: rows so long that they do not stay in registers beside their sums are loaded again for the second half."""
    columns = units * UNIT
    column = tl.arange(0, COLUMNS)
    weight_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    # A program takes every (number of programs)-th tile of rows, always the same ones: sums are deterministic.
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = _inside(row, rows, column, columns, EVEN)
        dy_tile = dy + row[:, None] * (dy_stride * UNIT) + column[None, :]  # (ROWS, COLUMNS)
        x_tile = x + row[:, None] * (x_stride * UNIT) + column[None, :]
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        gradient = tl.load(dy_tile, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(x_tile, mask=inside, other=0.0).to(tl.float32) - average) * scale
        weighted = gradient
        if HAS_WEIGHT:
            factors = _parameters(weight, column, columns, EVEN)[None, :]
            weighted = gradient * factors
        along, across = tl.reduce((weighted, weighted * normal), 1, _add_pairs)
        if AGAIN:
            gradient = tl.load(dy_tile, mask=inside, other=0.0, volatile=True).to(tl.float32)
            normal = (tl.load(x_tile, mask=inside, other=0.0, volatile=True).to(tl.float32) - average) * scale
            weighted = gradient
            if HAS_WEIGHT:
                weighted = gradient * factors
        if SUM_WEIGHT:
            weight_sum += gradient * normal
        if SUM_BIAS:
            bias_sum += gradient
        result = (weighted - (along * (1.0 / columns))[:, None] - normal * (across * (1.0 / columns))[:, None]) * scale
        tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if SUM_WEIGHT:
        tl.store(partial + program * columns + column, tl.sum(weight_sum, axis=0), mask=column < columns)
    if SUM_BIAS:
        tl.store(partial + (programs + program) * columns + column, tl.sum(bias_sum, axis=0), mask=column < columns)


@triton.jit
def layer_norm_row_sums(
    dy, x, weight, mean, rstd, sums,  # (M, N), (M, N), (N,), (M,), (M,), (2, M) float32
    rows, units, dy_stride, x_stride,
    HAS_WEIGHT: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The means along long rows that dx needs: of dy * weight, and of that times the normalized x."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLUMNS)
    average, scale = tl.load(mean + row), tl.load(rstd + row)
    along = tl.zeros((COLUMNS,), tl.float32)
    across = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + lane
        inside = column < columns
        weighted = tl.load(dy + row * (dy_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * (x_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weighted *= _parameters(weight, column, columns, False)
        along += weighted
        across += weighted * ((values - average) * scale)
    tl.store(sums + row, tl.sum(along, axis=0) * (1.0 / columns))
    tl.store(sums + rows + row, tl.sum(across, axis=0) * (1.0 / columns))


@triton.jit
def layer_norm_backward_long(
    dy, x, weight, mean, rstd, sums, dx, partial,  # as above; partial: (2, chunks, N)
    rows, units, dy_stride, x_stride,
    HAS_WEIGHT: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a block of columns in every (number of chunks)-th tile of rows, and the sums over these rows."""
    columns = units * UNIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    weight_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(chunk, tl.cdiv(rows, ROWS), chunks, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = _inside(row, rows, column, columns, False)
        dy_tile = dy + row[:, None] * (dy_stride * UNIT) + column[None, :]  # (ROWS, COLUMNS)
        x_tile = x + row[:, None] * (x_stride * UNIT) + column[None, :]
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        along = tl.load(sums + row, mask=row < rows, other=0.0)[:, None]
        across = tl.load(sums + rows + row, mask=row < rows, other=0.0)[:, None]
        gradient = tl.load(dy_tile, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(x_tile, mask=inside, other=0.0).to(tl.float32) - average) * scale
        if SUM_WEIGHT:
            weight_sum += gradient * normal
        if SUM_BIAS:
            bias_sum += gradient
        if HAS_WEIGHT:
            gradient *= _parameters(weight, column, columns, False)[None, :]
        result = (gradient - along - normal * across) * scale
        tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
    if SUM_WEIGHT:
        target = partial + chunk.to(tl.int64) * columns + column
        tl.store(target, tl.sum(weight_sum, axis=0), mask=column < columns)
    if SUM_BIAS:
        target = partial + (chunks + chunk).to(tl.int64) * columns + column
        tl.store(target, tl.sum(bias_sum, axis=0), mask=column < columns)


@triton.jit
def add_partial_sums(
    partial, dweight, dbias,  # (2, programs, N) float32, (N,), (N,)
    programs, columns,
    SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias: partial sums added in their order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if SUM_WEIGHT:
        total = _sum_of_rows(partial, 0, programs, column, columns, ROWS, COLUMNS)
        tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask=column < columns)
    if SUM_BIAS:
        total = _sum_of_rows(partial, programs, programs, column, columns, ROWS, COLUMNS)
        tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask=column < columns)


# ---- pieces ------------------------------------------------------------------------------------------------------


@triton.jit
def _inside(row, rows, column, columns, EVEN: tl.constexpr):
    """Which elements of a tile exist: (ROWS, 1) where all columns do, else (ROWS, COLUMNS)."""
    inside = (row < rows)[:, None]
    if not EVEN:
        inside = inside & (column < columns)[None, :]
    return inside


@triton.jit
def _parameters(pointer, column, columns, EVEN: tl.constexpr):
    """One parameter a column, float32, and 0 past the end."""
    if EVEN:
        return tl.load(pointer + column).to(tl.float32)
    else:  # noqa: RET505 (Triton compiles what stands here only if it is taken)
        return tl.load(pointer + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_of_rows(partial, first, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of `rows` rows from `first` on."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + (first + row)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    return tl.sum(total, axis=0)
