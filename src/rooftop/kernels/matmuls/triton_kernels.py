"""Triton kernels of y = activation(x @ weight.T + bias) + residual; `launches.py` launches these kernels.

Three kernels compute the product. Tiles of ROWS by COLUMNS accumulate in float32, in steps of DEPTH through K. Tiles
are ordered in bands that are GROUP tiles high, so that tiles in progress at the same time share operands in L2.

- `linear_act_descriptors` copies tiles with the tensor memory accelerator (TMA) of Hopper and later GPUs. Its programs
  are persistent: the first copies of a tile are in flight while the previous tile is stored. A tile is stored in PARTS
  groups of columns. Storing a group needs less shared memory than storing a whole tile, so more is left for copies of
  operands. With two programs on an SM, one program multiplies while the other stores. If both programs began at the
  same time, they would store at the same time and leave the tensor cores idle. So OUT_OF_STEP delays the second half of
  the programs.
- `linear_act_single` also copies with TMA, one tile per program, for results with at most one tile per SM.
  `linear_act_single` loads bias and residual before the product. MORE columns allow tiles whose width is not a power of
  two.
- `linear_act_pointers` supports any strides and any K, one tile per program.

With SPLIT > 1 the dimension K is cut into SPLIT parts, and a separate program writes the float32 sums of each part.
`linear_act_finish` adds the sums of all parts in order without atomics, so results are deterministic.
`linear_act_finish` also computes the operations after cuBLAS's products.

Either dimension of x and weight may be contiguous. X_ACROSS means that K is not the contiguous dimension of x; W_ACROSS
means the same for weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftop.kernels.operands.triton_kernels.activations import NONE, activated, activation_gradient
from rooftop.kernels.operands.triton_kernels.products import in_parts, plus_product, tile_place


@triton.jit
def linear_act_descriptors(
    # descriptors: x (M, K), or (K, M) if X_ACROSS; weight (N, K), or (K, N) if W_ACROSS; y, z, residual (M, N)
    x, weight, y, z, residual,
    bias,  # (N,)
    rows, columns, depth, padded_rows, lag,  # padded_rows: rows of y for each part of K; lag: in clock cycles
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, ROUNDED: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, HALF: tl.constexpr, OUT_OF_STEP: tl.constexpr,
):  # fmt: skip
    """Compute every P-th tile of the product, where P is the number of programs. OUT_OF_STEP: the second half of the
    programs begins `lag` cycles later than the first half. ROUNDED: the activation's input is rounded to z's dtype
    before the activation is applied.
    """
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    steps_of_part = tl.cdiv(steps, SPLIT)
    tiles = row_tiles * column_tiles
    programs = tl.num_programs(0)
    start = tl.program_id(0)
    if OUT_OF_STEP:
        start += _zero_after(tl.where(start >= programs - programs // 2, lag, 0))
    # The position of a finished tile is computed again, so that the loops over tiles and over K become one loop. In
    # that loop, the copies for the next tile begin before this tile is finished.
    finished = start - programs
    for tile in tl.range(start, tiles * SPLIT, programs, flatten=True):
        row_tile, column_tile = tile_place(tile % tiles, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if SPLIT == 1:
            first, last = 0, steps
        else:
            first = tile // tiles * steps_of_part
            last = min(first + steps_of_part, steps)
        for step in range(first, last):
            left = _rows_from(x, row, step * DEPTH, X_ACROSS)
            right = _rows_from(weight, column, step * DEPTH, W_ACROSS).T
            total = plus_product(left, right, total, PRECISION, WIDEN)
        finished += programs
        row_tile, column_tile = tile_place(finished % tiles, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * COLUMNS
        target_row = finished // tiles * padded_rows + row
        WIDTH: tl.constexpr = COLUMNS // PARTS
        parts = in_parts(total, PARTS)
        for part in tl.static_range(PARTS):
            first_column = column + part * WIDTH
            values = parts[part]
            if HAS_BIAS:
                lane = first_column + tl.arange(0, WIDTH)
                values += tl.load(bias + lane, mask=lane < columns, other=0.0).to(tl.float32)[None, :]
            if KEEP:
                z.store([row, first_column], values.to(z.dtype))
            if ROUNDED:
                values = values.to(z.dtype).to(tl.float32)
            values = activated(values, ACTIVATION, HALF)
            if HAS_RESIDUAL:
                values += residual.load([row, first_column]).to(tl.float32)
            y.store([target_row, first_column], values.to(y.dtype))


@triton.jit
def linear_act_single(
    # descriptors as in linear_act_descriptors; weight_more: weight in boxes of MORE x DEPTH, or None if MORE is 0
    x, weight, weight_more, y, z,
    residual, bias,  # shapes: (M, N), (N,)
    rows, columns, depth, residual_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, ROUNDED: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, HALF: tl.constexpr, MORE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of COLUMNS + MORE columns. COLUMNS // PARTS columns are stored at a time; MORE is 0 or this
    number. EARLY selects programmatic dependent launch: this kernel may start while the previous kernel still runs, and
    waits for the previous kernel's results.
    """
    if EARLY:
        gdc_wait()
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS + MORE)
    row_tile, column_tile = tile_place(tl.program_id(0), row_tiles, column_tiles, GROUP)
    row, column = row_tile * ROWS, column_tile * (COLUMNS + MORE)
    # The loads of bias and residual start here, so that they run while the product is computed.
    if HAS_BIAS:
        offset = _ahead(bias, columns, column, COLUMNS)
    if HAS_RESIDUAL:
        added = _block_ahead(residual, rows, columns, row, column, residual_row, ROWS, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if MORE > 0:
        if HAS_BIAS:
            offset_more = _ahead(bias, columns, column + COLUMNS, MORE)
        if HAS_RESIDUAL:
            added_more = _block_ahead(residual, rows, columns, row, column + COLUMNS, residual_row, ROWS, MORE)
        total_more = tl.zeros((ROWS, MORE), tl.float32)
        for step in range(tl.cdiv(depth, DEPTH)):
            left = _rows_from(x, row, step * DEPTH, X_ACROSS)
            right = _rows_from(weight, column, step * DEPTH, W_ACROSS).T
            right_more = _rows_from(weight_more, column + COLUMNS, step * DEPTH, W_ACROSS).T
            total = plus_product(left, right, total, PRECISION, WIDEN)
            total_more = plus_product(left, right_more, total_more, PRECISION, WIDEN)
    else:
        for step in range(tl.cdiv(depth, DEPTH)):
            left = _rows_from(x, row, step * DEPTH, X_ACROSS)
            right = _rows_from(weight, column, step * DEPTH, W_ACROSS).T
            total = plus_product(left, right, total, PRECISION, WIDEN)
    if EARLY:
        gdc_launch_dependents()
    if HAS_BIAS:
        total += offset[None, :].to(tl.float32)
    if KEEP:
        _store_parts(z, total, row, column, PARTS)
    if ROUNDED:
        total = total.to(z.dtype).to(tl.float32)
    total = activated(total, ACTIVATION, HALF)
    if HAS_RESIDUAL:
        total += added.to(tl.float32)
    _store_parts(y, total, row, column, PARTS)
    if MORE > 0:
        if HAS_BIAS:
            total_more += offset_more[None, :].to(tl.float32)
        if KEEP:
            _store_parts(z, total_more, row, column + COLUMNS, 1)
        if ROUNDED:
            total_more = total_more.to(z.dtype).to(tl.float32)
        total_more = activated(total_more, ACTIVATION, HALF)
        if HAS_RESIDUAL:
            total_more += added_more.to(tl.float32)
        _store_parts(y, total_more, row, column + COLUMNS, 1)


@triton.jit
def linear_act_pointers(
    x, weight, y, z, residual, bias,  # x (M, K); weight (N, K); y ([SPLIT,] M, N); z, residual (M, N); bias (N,)
    rows, columns, depth, x_row, x_column, weight_row, weight_column, residual_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the product over one part of K. WIDE: offsets within x and weight need 64 bits."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    steps_of_part = tl.cdiv(steps, SPLIT)
    tiles = row_tiles * column_tiles
    part = tl.program_id(0) // tiles
    row_tile, column_tile = tile_place(tl.program_id(0) % tiles, row_tiles, column_tiles, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    # Rows and columns past the end read the last row or column, because a mask in the loop would take longer.
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
        total = plus_product(left, right, total, PRECISION, WIDEN)
        lane += DEPTH
    row, column = row.to(tl.int64), column.to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        tl.store(z + place, total.to(z.dtype.element_ty), mask=inside)
    if ROUNDED:
        total = total.to(z.dtype.element_ty).to(tl.float32)
    total = activated(total, ACTIVATION, HALF)
    if HAS_RESIDUAL:
        source = residual + row[:, None] * residual_row + column[None, :]
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    target = y + part.to(tl.int64) * rows * columns + place
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def linear_act_finish(
    sums, bias, residual, y, z,  # sums (SPLIT, padded rows, N); bias (N,); residual, y, z (M, N)
    rows, units, padded_rows, sums_row, y_row, residual_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, ROUNDED: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute y = activation(total + bias) + residual, where total adds the SPLIT parts of `sums`. z is the
    activation's input. Strides are in units of UNIT elements."""
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
    if ROUNDED:
        values = values.to(z.dtype.element_ty).to(tl.float32)
    values = activated(values, ACTIVATION, HALF)
    if HAS_RESIDUAL:
        source = residual + row[:, None] * (residual_row * UNIT) + column[None, :]
        values += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def linear_act_backward(
    dy, saved, dz, partial,  # dy (M, N), strided; saved, dz (M, N); partial (chunks, N)
    rows, units, dy_row, rows_of_chunk,
    ACTIVATION: tl.constexpr, OF_OUTPUT: tl.constexpr, SUM: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute dz = dy * activation', and with SUM also the column sums of dz over a chunk of rows.

    `saved` is the activation's input or, with OF_OUTPUT, its result. Without an activation the kernel computes only the
    sums. The sums are compensated (Kahan), because a chunk may have very many rows. With HALF, the sums need no
    compensation, because the rounding of the result to half precision is far coarser than the error of the sums.
    """
    columns = units * UNIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * rows_of_chunk
    last = min(first + rows_of_chunk, rows)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    lost = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < last)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        gradient = tl.load(dy + row[:, None] * (dy_row * UNIT) + column[None, :], mask=inside, other=0.0)
        gradient = gradient.to(tl.float32)
        if ACTIVATION != NONE:
            value = tl.load(saved + place, mask=inside, other=0.0).to(tl.float32)
            gradient = activation_gradient(gradient, value, ACTIVATION, OF_OUTPUT, HALF)
            tl.store(dz + place, gradient.to(dz.dtype.element_ty), mask=inside)
        if SUM:
            if HALF:
                sums += gradient
            else:
                sums, lost = _compensated(sums, lost, gradient)
    if SUM:
        target = partial + tl.program_id(1).to(tl.int64) * columns + column
        tl.store(target, tl.sum(sums, axis=0), mask=column < columns)


@triton.jit
def add_column_sums(
    partial, total,  # (chunks, N), (N,)
    chunks, columns,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the column sums of all chunks, in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    lost = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        inside = (chunk < chunks)[:, None] & (column < columns)[None, :]
        place = partial + chunk[:, None].to(tl.int64) * columns + column[None, :]
        found = tl.load(place, mask=inside, other=0.0)
        if HALF:
            sums += found
        else:
            sums, lost = _compensated(sums, lost, found)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=column < columns)


# ---- functions that several kernels share --------------------------------------------------------------------------


@triton.jit
def _compensated(sums, lost, values):
    """Add `values` to `sums` by Kahan summation (Kahan 1965). Return (new sums, new rounding error): each addition
    first subtracts the error `lost` of the previous addition. Infinite sums stay infinite.
    """
    values -= lost
    total = sums + values
    lost = tl.where(tl.abs(total) < float("inf"), (total - sums) - values, 0.0)
    return total, lost


@triton.jit
def _rows_from(source, row, step, ACROSS: tl.constexpr):
    """Load a block, DEPTH columns wide, of a matrix (rows, K) through its tensor descriptor `source`. The block begins
    at row `row` and column `step`. With ACROSS, the columns of the matrix are contiguous instead of its rows, and the
    function transposes the loaded block.
    """
    if ACROSS:
        block = source.load([step, row]).T
    else:
        block = source.load([row, step])
    return block


@triton.jit
def _ahead(bias, columns, column, WIDTH: tl.constexpr):
    lane = column + tl.arange(0, WIDTH)
    return tl.load(bias + lane, mask=lane < columns, other=0.0)


@triton.jit
def _block_ahead(residual, rows, columns, row, column, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    line, lane = row + tl.arange(0, ROWS), column + tl.arange(0, WIDTH)
    inside = (line < rows)[:, None] & (lane < columns)[None, :]
    return tl.load(residual + line.to(tl.int64)[:, None] * stride + lane[None, :], mask=inside, other=0.0)


@triton.jit
def _store_parts(target, values, row, column, PARTS: tl.constexpr):
    parts = in_parts(values.to(target.dtype), PARTS)
    for part in tl.static_range(PARTS):
        target.store([row, column + part * (values.shape[1] // PARTS)], parts[part])


@triton.jit
def _zero_after(cycles):
    """Return 0 after this many clock cycles. Adding the 0 to a value makes the program wait."""
    return tl.inline_asm_elementwise(
        """{
        .reg .u64 first, passed, wanted;
        .reg .pred early;
        cvt.u64.u32 wanted, $1;
        mov.u64 first, %clock64;
        WAIT:
        mov.u64 passed, %clock64;
        sub.u64 passed, passed, first;
        setp.lt.u64 early, passed, wanted;
        @early bra WAIT;
        mov.u32 $0, 0;
        }""",
        constraints="=r,r",
        args=[cycles],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
