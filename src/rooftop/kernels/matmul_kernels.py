"""Triton kernels of y = activation(x @ weight.T + bias) + residual; `matmuls.py` has the operators.

Two make the product, both in float32 tiles of ROWS by COLUMNS, DEPTH of the K dimension at a time, and both visit the
tiles in bands of GROUP rows of tiles, so that the tiles that are worked on at a time share their operands in L2:

- `linear_act_descriptors` copies tiles with the tensor memory accelerator (TMA) of Hopper and later GPUs. Its programs
  are persistent, so that the first copies of a tile are on their way while the tile before is finished. A tile is
  finished in PARTS of its columns, so that what is staged for the store leaves more shared memory for copies.
- `linear_act_pointers` takes any strides and any K, one tile a program.

With SPLIT > 1 the K dimension is cut, each part writes float32 sums of its own, and `linear_act_finish` adds them in
their order: no atomics, the same bits each time. That kernel also finishes products that a library made.

x and weight may lie in memory either way: X_ACROSS and W_ACROSS say that K is their slow dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
SILU = tl.constexpr(4)
SIGMOID = tl.constexpr(5)


@triton.jit
def linear_act_descriptors(
    x, weight, y, z, residual,  # descriptors: (M, K) or (K, M), (N, K) or (K, N), (M, N), (M, N), (M, N)
    bias,  # (N,)
    rows, columns, depth, padded_rows,  # padded_rows: from one part of K to the next, in y
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Every (number of programs)-th tile."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    steps_of_part = tl.cdiv(steps, SPLIT)
    tiles = row_tiles * column_tiles
    programs = tl.num_programs(0)
    # Where a tile is finished is computed anew: the loop over tiles and the one over K become one, in which the copies
    # for the next tile begin before this one is finished.
    finished = tl.program_id(0) - programs
    for tile in tl.range(tl.program_id(0), tiles * SPLIT, programs, flatten=True):
        row_tile, column_tile = _place(tile % tiles, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if SPLIT == 1:
            first, last = 0, steps
        else:
            first = tile // tiles * steps_of_part
            last = min(first + steps_of_part, steps)
        for step in range(first, last):
            if X_ACROSS:
                left = x.load([step * DEPTH, row]).T
            else:
                left = x.load([row, step * DEPTH])
            if W_ACROSS:
                right = weight.load([step * DEPTH, column])
            else:
                right = weight.load([column, step * DEPTH]).T
            total = _add_product(left, right, total, PRECISION, WIDEN)
        finished += programs
        row_tile, column_tile = _place(finished % tiles, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * COLUMNS
        target_row = finished // tiles * padded_rows + row
        WIDTH: tl.constexpr = COLUMNS // PARTS
        parts = _parts(total, PARTS)
        for part in tl.static_range(PARTS):
            start = column + part * WIDTH
            values = parts[part]
            if HAS_BIAS:
                lane = start + tl.arange(0, WIDTH)
                values += tl.load(bias + lane, mask=lane < columns, other=0.0).to(tl.float32)[None, :]
            if KEEP:
                z.store([row, start], values.to(z.dtype))
            values = _activated(values, ACTIVATION)
            if HAS_RESIDUAL:
                values += residual.load([row, start]).to(tl.float32)
            y.store([target_row, start], values.to(y.dtype))


@triton.jit
def linear_act_pointers(
    x, weight, y, z, residual, bias,  # (M, K), (N, K), (M, N) or (SPLIT, M, N), (M, N), (M, N), (N,)
    rows, columns, depth, x_row, x_column, weight_row, weight_column, residual_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile, of one part of K; WIDE: offsets within x and weight need 64 bits."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    steps_of_part = tl.cdiv(steps, SPLIT)
    tiles = row_tiles * column_tiles
    part = tl.program_id(0) // tiles
    row_tile, column_tile = _place(tl.program_id(0) % tiles, row_tiles, column_tiles, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    # Rows and columns past the end read the last one: a mask in the loop would cost more.
    left_row, right_row = tl.minimum(row, rows - 1), tl.minimum(column, columns - 1)
    lane = part * steps_of_part * DEPTH + tl.arange(0, DEPTH)
    if WIDE:
        lane = lane.to(tl.int64)
    left_of = x + left_row[:, None] * x_row  # (ROWS, 1)
    right_of = weight + right_row[None, :] * weight_row  # (1, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(part * steps_of_part, min((part + 1) * steps_of_part, steps)):
        inside = lane < depth
        left = tl.load(left_of + lane[None, :] * x_column, mask=inside[None, :], other=0.0)
        right = tl.load(right_of + lane[:, None] * weight_column, mask=inside[:, None], other=0.0)
        total = _add_product(left, right, total, PRECISION, WIDEN)
        lane += DEPTH
    row, column = row.to(tl.int64), column.to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        tl.store(z + place, total.to(z.dtype.element_ty), mask=inside)
    total = _activated(total, ACTIVATION)
    if HAS_RESIDUAL:
        source = residual + row[:, None] * residual_row + column[None, :]
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    target = y + part.to(tl.int64) * rows * columns + place
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def linear_act_finish(
    sums, bias, residual, y, z,  # (SPLIT, padded rows, N), (N,), (M, N), (M, N), (M, N)
    rows, units, padded_rows, sums_row, y_row, residual_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = activation(sum of sums + bias) + residual; z is what is activated. Strides count groups of UNIT elements."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * (y_row * UNIT) + column[None, :]
    first = sums + row[:, None] * (sums_row * UNIT) + column[None, :]
    values = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        later = first + tl.cast(padded_rows, tl.int64) * (sums_row * UNIT) * part
        values += tl.load(later, mask=inside, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        tl.store(z + place, values.to(z.dtype.element_ty), mask=inside)
    values = _activated(values, ACTIVATION)
    if HAS_RESIDUAL:
        source = residual + row[:, None] * (residual_row * UNIT) + column[None, :]
        values += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def linear_act_backward(
    dy, saved, dz, partial,  # (M, N) strided, (M, N), (M, N), (chunks, N)
    rows, units, dy_row, rows_of_chunk,
    ACTIVATION: tl.constexpr, OF_OUTPUT: tl.constexpr, SUM: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dz = dy * activation', and with SUM the column sums of dz over a chunk of rows.

    `saved` is what was activated or, with OF_OUTPUT, the result. Without an activation only the sums are made.
    """
    columns = units * UNIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * rows_of_chunk
    last = min(first + rows_of_chunk, rows)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < last)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        gradient = tl.load(dy + row[:, None] * (dy_row * UNIT) + column[None, :], mask=inside, other=0.0)
        gradient = gradient.to(tl.float32)
        if ACTIVATION != NONE:
            value = tl.load(saved + place, mask=inside, other=0.0).to(tl.float32)
            gradient = _gradient(gradient, value, ACTIVATION, OF_OUTPUT)
            tl.store(dz + place, gradient.to(dz.dtype.element_ty), mask=inside)
        if SUM:
            sums += gradient
    if SUM:
        target = partial + tl.program_id(1).to(tl.int64) * columns + column
        tl.store(target, tl.sum(sums, axis=0), mask=column < columns)


@triton.jit
def add_column_sums(
    partial, total,  # (chunks, N), (N,)
    chunks, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over chunks, in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        inside = (chunk < chunks)[:, None] & (column < columns)[None, :]
        sums += tl.load(partial + chunk[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=column < columns)


# ---- pieces ------------------------------------------------------------------------------------------------------


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of a tile: down GROUP rows of tiles, then one column on; then the next GROUP rows."""
    band = tile // (GROUP * column_tiles)
    height = min(row_tiles - band * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return band * GROUP + within % height, within // height


@triton.jit
def _add_product(left, right, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + left @ right. WIDEN: Triton's interpreter takes the bits of bfloat16 for whole numbers in a product."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _parts(values, PARTS: tl.constexpr):
    """(ROWS, COLUMNS) as a tuple of 1, 2 or 4 tensors of neighbouring columns."""
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


@triton.jit
def _activated(values, ACTIVATION: tl.constexpr):
    """float32 in and out. NaN stays NaN."""
    if ACTIVATION == RELU:
        values = tl.where(values < 0.0, 0.0, values)
    elif ACTIVATION == GELU:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        values = values * tl.sigmoid(_gelu_argument(values))
    elif ACTIVATION == SILU:
        values = values * tl.sigmoid(values)
    elif ACTIVATION == SIGMOID:
        values = tl.sigmoid(values)
    return values


@triton.jit
def _gelu_argument(values):
    """(1 + tanh(u)) / 2 is sigmoid(2 u): this is 2 u = 2 sqrt(2 / pi) (v + 0.044715 v^3)."""
    return 1.5957691216057308 * values * (1.0 + 0.044715 * values * values)


@triton.jit
def _gradient(gradient, value, ACTIVATION: tl.constexpr, OF_OUTPUT: tl.constexpr):
    """gradient * activation'; value is the result where OF_OUTPUT, else what was activated."""
    if ACTIVATION == RELU:
        result = tl.where(value <= 0.0, 0.0, gradient)
    elif ACTIVATION == GELU:
        below = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        result = gradient * (below + value * 0.3989422804014327 * tl.exp(-0.5 * value * value))
    elif ACTIVATION == GELU_TANH:
        share = tl.sigmoid(_gelu_argument(value))
        slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * value * value)
        result = gradient * share * (1.0 + value * slope * (1.0 - share))
    elif ACTIVATION == SILU:
        share = tl.sigmoid(value)
        result = gradient * share * (1.0 + value * (1.0 - share))
    else:
        share = value if OF_OUTPUT else tl.sigmoid(value)
        result = gradient * share * (1.0 - share)
    return result
