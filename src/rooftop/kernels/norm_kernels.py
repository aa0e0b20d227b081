"""Triton kernels of the layer norm; `norms.py` has the operator.

Rows that fit a program's registers are read from memory once. A tile of them is ROWS rows by BLOCKS blocks of COLUMNS
elements; whatever is computed in float32 is computed block by block, so that between two passes over a row only its
elements as they were loaded stay in registers, and of a row that is no power of two at most a part of the last block is
masked. Backward is persistent: while a program works on a tile, its next ones are on their way to shared memory
(STAGES); the sums for the gradients of weight and bias stay in registers until the end. Longer rows are read twice, and
backward splits in two: sums along rows first, then tiles of columns that know them.

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
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalizes ROWS rows."""
    columns = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)  # (ROWS,)
    lane = tl.arange(0, COLUMNS)
    source = x + row[:, None] * (x_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    target = y + row[:, None] * columns + lane[None, :]
    values = ()  # of all blocks, as loaded
    for block in tl.static_range(BLOCKS):
        inside = _inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
        values = values + (tl.load(source + block * COLUMNS, mask=inside, other=0.0),)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.static_range(BLOCKS):
        total += values[block].to(tl.float32)
    average = (tl.sum(total, axis=1) * (1.0 / columns))[:, None]
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.static_range(BLOCKS):
        centred = values[block].to(tl.float32) - average
        if not (EVEN or block < BLOCKS - 1):
            centred = tl.where((block * COLUMNS + lane < columns)[None, :], centred, 0.0)
        squares += centred * centred
    scale = (1.0 / tl.sqrt(tl.sum(squares, axis=1) * (1.0 / columns) + eps))[:, None]
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        result = (values[block].to(tl.float32) - average) * scale
        if HAS_WEIGHT:
            result *= _parameters(weight, column, columns, EVEN or block < BLOCKS - 1)[None, :]
        if HAS_BIAS:
            result += _parameters(bias, column, columns, EVEN or block < BLOCKS - 1)[None, :]
        inside = _inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
        tl.store(target + block * COLUMNS, result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row[:, None], average, mask=(row < rows)[:, None])
    tl.store(rstd + row[:, None], scale, mask=(row < rows)[:, None])


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
    UNIT: tl.constexpr, EVEN: tl.constexpr, HOLD: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and partial sums for weight and bias.

    HOLD: the weight stays in registers from the beginning; otherwise it is fetched ahead, too. AGAIN: rows so long that
    they do not stay in registers beside their sums are loaded again for the second pass.
    """
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    held = ()  # of all blocks
    weight_sums = ()
    bias_sums = ()
    for block in tl.static_range(BLOCKS):
        if HAS_WEIGHT and HOLD:
            held = held + (_parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[None, :],)
        weight_sums = weight_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
        bias_sums = bias_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    # A program takes every (number of programs)-th tile of rows, always the same ones: sums are deterministic.
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        dy_rows = dy + row[:, None] * (dy_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
        x_rows = x + row[:, None] * (x_stride * UNIT) + lane[None, :]
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        gradients = ()  # of all blocks, as loaded
        values = ()
        for block in tl.static_range(BLOCKS):
            inside = _inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
            gradients = gradients + (tl.load(dy_rows + block * COLUMNS, mask=inside, other=0.0),)
            values = values + (tl.load(x_rows + block * COLUMNS, mask=inside, other=0.0),)
        along = tl.zeros((ROWS, COLUMNS), tl.float32)  # sums along the rows of dy * weight, and of that times normal x
        across = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range(BLOCKS):
            weighted = gradients[block].to(tl.float32)
            if HAS_WEIGHT:
                if HOLD:
                    weighted *= held[block]
                else:
                    weighted *= _parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[
                        None, :
                    ]
            along += weighted
            across += weighted * ((values[block].to(tl.float32) - average) * scale)
        along, across = tl.reduce((along, across), 1, _add_pairs)
        along = (along * (1.0 / columns))[:, None]
        across = (across * (1.0 / columns))[:, None]
        next_weight_sums = ()
        next_bias_sums = ()
        for block in tl.static_range(BLOCKS):
            inside = _inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
            if AGAIN:
                gradient = tl.load(dy_rows + block * COLUMNS, mask=inside, other=0.0, volatile=True).to(tl.float32)
                value = tl.load(x_rows + block * COLUMNS, mask=inside, other=0.0, volatile=True).to(tl.float32)
            else:
                gradient = gradients[block].to(tl.float32)
                value = values[block].to(tl.float32)
            normal = (value - average) * scale
            if SUM_WEIGHT:
                next_weight_sums = next_weight_sums + (weight_sums[block] + gradient * normal,)
            if SUM_BIAS:
                next_bias_sums = next_bias_sums + (bias_sums[block] + gradient,)
            if HAS_WEIGHT:
                if HOLD:
                    gradient *= held[block]
                else:
                    gradient *= _parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[
                        None, :
                    ]
            result = (gradient - along - normal * across) * scale
            target = dx + row[:, None] * columns + (block * COLUMNS + lane)[None, :]
            tl.store(target, result.to(dx.dtype.element_ty), mask=inside)
        if SUM_WEIGHT:
            weight_sums = next_weight_sums
        if SUM_BIAS:
            bias_sums = next_bias_sums
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        if SUM_WEIGHT:
            sums = tl.sum(weight_sums[block], axis=0)
            tl.store(partial + program * columns + column, sums, mask=column < columns)
        if SUM_BIAS:
            sums = tl.sum(bias_sums[block], axis=0)
            tl.store(partial + (programs + program) * columns + column, sums, mask=column < columns)


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
def _inside(row, rows, column, columns, FULL: tl.constexpr):
    """Which elements of a block exist: (ROWS, 1) where all columns do (FULL), else (ROWS, COLUMNS)."""
    inside = (row < rows)[:, None]
    if not FULL:
        inside = inside & (column < columns)[None, :]
    return inside


@triton.jit
def _parameters(pointer, column, columns, FULL: tl.constexpr):
    """One parameter a column, float32, and 0 past the end; FULL: all columns exist."""
    if FULL:
        return tl.load(pointer + column).to(tl.float32)
    else:
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
