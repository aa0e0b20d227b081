"""Triton kernels of layer norm and RMS norm, of x or of x + input_bias + residual. `launches.py` launches the kernels.

Rows that fit in a program's registers are read from memory once. A tile has ROWS rows, and each row has BLOCKS blocks
of COLUMNS elements. Float32 values are computed block by block. Between two passes over a row, registers contain the
row's elements only in their own dtype. If the length of a row is not a power of two, masks are needed only in the last
block. Programs of backward are persistent: while a program computes a tile, the program's next tiles are loaded to
shared memory (STAGES). The sums for the gradients of weight and bias stay in registers until the end.
`triton_kernels/long_norms.py` has the kernels for longer rows.

Statistics are float32. The variance is computed from squared deviations from the mean instead of from squares, so that
a large common offset of a row does not reduce the accuracy. The mean itself is rounded to float32; in a row with a
large offset the mean's error exceeds the rounding of the deviations. For float32 rows (CORRECTED) the kernel therefore
also subtracts the mean of the deviations. Sums are multiplied by 1 / N, because the fast division by N is not exact
even for N = 1. x + residual is rounded before it is normalized, because backward reads the rounded sum. If forward
normalized the sum before rounding, in nearly constant rows the large 1 / std would magnify the rounding error.

`units` and the strides are in units of UNIT elements, so that the compiler knows that UNIT divides N, and loads several
elements at a time. EVEN: N is the width of the tile. All offsets of rows are 64-bit. The compiler omits the code for
tensors that are None.

Shifted kernels are for rows of two-byte elements whose length N is not a multiple of eight. Not all rows of such a
length begin at a multiple of 16 bytes. The kernels load the groups of eight elements that enclose a row, 16 bytes at a
time; lane i then contains column i - shift. From one tile of a program to the next, the row numbers grow by a multiple
of eight. So row i of every tile has the same shift, and weights and sums stay in the same lanes. Blocks 1 to WHOLE - 1
contain neither end of a row. Whole groups are stored 16 bytes at a time; the two groups at a row's ends are stored one
element at a time. The number of rows is a multiple of eight, so no group reaches past the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import is_inside

# ---- forward -----------------------------------------------------------------------------------------------------


@triton.jit
def norm_forward(
    x, residual, input_bias, weight, bias,  # x, residual (M, N); input_bias, weight, bias (N,); all but x may be None
    y, total, mean, rstd,  # (M, N) twice, (M,) twice; total is None if nothing is added; mean is None for RMS
    rows, units, x_stride, residual_stride, eps,
    RMS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the norm of ROWS rows."""
    CORRECTED: tl.constexpr = not RMS and x.dtype.element_ty == tl.float32
    columns = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)  # (ROWS,)
    lane = tl.arange(0, COLUMNS)
    source = x + row[:, None] * (x_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    target = row[:, None] * columns + lane[None, :]
    values = ()  # one tensor for each block, in the dtype of x
    for block in tl.static_range(BLOCKS):
        inside = is_inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
        values = values + (tl.load(source + block * COLUMNS, mask=inside, other=0.0),)
    if total is not None:
        added = ()
        for block in tl.static_range(BLOCKS):
            column = block * COLUMNS + lane
            inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
            term = tl.zeros((ROWS, COLUMNS), total.dtype.element_ty)
            if residual is not None:
                place = residual + row[:, None] * (residual_stride * UNIT) + column[None, :]
                term = tl.load(place, mask=inside, other=0.0)
            added = added + (term,)
        sums = ()
        for block in tl.static_range(BLOCKS):
            column = block * COLUMNS + lane
            result = values[block].to(tl.float32)
            if input_bias is not None:
                result += parameters(input_bias, column, columns, EVEN or block < BLOCKS - 1)[None, :]
            result = (result + added[block].to(tl.float32)).to(total.dtype.element_ty)
            inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
            tl.store(total + target + block * COLUMNS, result, mask=inside)
            sums = sums + (result,)
        values = sums
    average = tl.zeros((ROWS, 1), tl.float32)
    rest = average
    if not RMS:
        lane_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range(BLOCKS):
            lane_sums += values[block].to(tl.float32)
        average = (tl.sum(lane_sums, axis=1) * (1.0 / columns))[:, None]
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    lane_rests = squares
    for block in tl.static_range(BLOCKS):
        centred = values[block].to(tl.float32)
        if not RMS:
            centred -= average
            if not (EVEN or block < BLOCKS - 1):
                centred = tl.where((block * COLUMNS + lane < columns)[None, :], centred, 0.0)
            lane_rests += centred
        squares += centred * centred
    if CORRECTED:
        rest, variance = _rest_and_variance(lane_rests, squares, columns)
    else:
        variance = tl.sum(squares, axis=1) * (1.0 / columns)
    scale = (1.0 / tl.sqrt(variance + eps))[:, None]
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        result = values[block].to(tl.float32)
        if not RMS:
            result -= average
        if CORRECTED:
            result -= rest
        result *= scale
        if weight is not None:
            result *= parameters(weight, column, columns, EVEN or block < BLOCKS - 1)[None, :]
        if bias is not None:
            result += parameters(bias, column, columns, EVEN or block < BLOCKS - 1)[None, :]
        inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
        tl.store(y + target + block * COLUMNS, result.to(y.dtype.element_ty), mask=inside)
    if not RMS:
        tl.store(mean + row[:, None], average, mask=(row < rows)[:, None])
    tl.store(rstd + row[:, None], scale, mask=(row < rows)[:, None])


@triton.jit
def norm_forward_shifted(
    x, residual, input_bias, weight, bias, y, total, mean, rstd,  # as in `norm_forward`, but contiguous
    rows, columns, eps,  # the number of rows must be a multiple of 8
    RMS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Normalize every P-th tile of rows, where P is the number of programs. Weight, bias and input bias stay in
    registers."""
    lane = tl.arange(0, COLUMNS)
    shift = shift_of(tl.program_id(0) * ROWS + tl.arange(0, ROWS), columns)[:, None]  # (ROWS, 1)
    weights = ()  # one tensor for each block, in the dtype of weight; loaded once for all tiles
    biases = ()
    input_biases = ()
    for block in tl.static_range(BLOCKS):
        column = (block * COLUMNS + lane)[None, :] - shift
        inside = (column >= 0) & (column < columns)
        if weight is not None:
            weights = weights + (tl.load(weight + column, mask=inside, other=0.0),)
        if bias is not None:
            biases = biases + (tl.load(bias + column, mask=inside, other=0.0),)
        if input_bias is not None:
            input_biases = input_biases + (tl.load(input_bias + column, mask=inside, other=0.0),)
    for tile in tl.range(tl.program_id(0), rows // ROWS, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        place = enclosing(row, columns)[:, None] + lane[None, :]
        values = ()
        for block in tl.static_range(BLOCKS):
            position = block * COLUMNS + lane
            values = values + (
                load_shifted(x + place + block * COLUMNS, position, shift, columns, block == 0 or block >= WHOLE),
            )
        if total is not None:
            added = ()
            for block in tl.static_range(BLOCKS):
                term = tl.zeros((ROWS, COLUMNS), total.dtype.element_ty)
                if residual is not None:
                    position = block * COLUMNS + lane
                    term = load_shifted(
                        residual + place + block * COLUMNS, position, shift, columns, block == 0 or block >= WHOLE
                    )
                added = added + (term,)
            sums = ()
            for block in tl.static_range(BLOCKS):
                result = values[block].to(tl.float32)
                if input_bias is not None:
                    result += input_biases[block].to(tl.float32)
                result = (result + added[block].to(tl.float32)).to(total.dtype.element_ty)
                store_shifted(
                    total + place + block * COLUMNS,
                    result,
                    block * COLUMNS + lane,
                    shift,
                    columns,
                    block == 0 or block >= WHOLE,
                )
                sums = sums + (result,)
            values = sums
        average = tl.zeros((ROWS, 1), tl.float32)
        if not RMS:
            lane_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for block in tl.static_range(BLOCKS):
                lane_sums += values[block].to(tl.float32)
            average = (tl.sum(lane_sums, axis=1) * (1.0 / columns))[:, None]
        squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range(BLOCKS):
            centred = values[block].to(tl.float32)
            if not RMS:
                centred -= average
                if block == 0 or block >= WHOLE:
                    column = (block * COLUMNS + lane)[None, :] - shift
                    centred = tl.where((column >= 0) & (column < columns), centred, 0.0)
            squares += centred * centred
        scale = (1.0 / tl.sqrt(tl.sum(squares, axis=1) * (1.0 / columns) + eps))[:, None]
        for block in tl.static_range(BLOCKS):
            result = values[block].to(tl.float32)
            if not RMS:
                result -= average
            result *= scale
            if weight is not None:
                result *= weights[block].to(tl.float32)
            if bias is not None:
                result += biases[block].to(tl.float32)
            result = result.to(y.dtype.element_ty)
            store_shifted(
                y + place + block * COLUMNS,
                result,
                block * COLUMNS + lane,
                shift,
                columns,
                block == 0 or block >= WHOLE,
            )
        if not RMS:
            tl.store(mean + row[:, None], average)
        tl.store(rstd + row[:, None], scale)


# ---- backward ----------------------------------------------------------------------------------------------------


@triton.jit
def norm_backward(
    dy, dtotal, x, weight, mean, rstd, dx,  # dy, dtotal, x, dx (M, N); weight (N,); mean, rstd (M,)
    partial,  # (programs, 2, N) float32: each program's sums over its rows, for weight and for bias
    rows, units, dy_stride, dtotal_stride, x_stride,
    RMS: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, HOLD: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx, and the partial sums for the gradients of weight and bias.

    `dtotal`: a gradient that is added to dx, or None. HOLD: the weight stays in registers; without HOLD, the kernel
        prefetches the weight like the rows. AGAIN: the second pass loads the rows again, because rows and sums together
        do not fit in registers.
    """
    CORRECTED: tl.constexpr = not RMS and x.dtype.element_ty == tl.float32
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    held = ()  # the weights of all blocks
    weight_sums = ()
    bias_sums = ()
    for block in tl.static_range(BLOCKS):
        if weight is not None and HOLD:
            held = held + (parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[None, :],)
        weight_sums = weight_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
        bias_sums = bias_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    # A program computes the same tiles of rows in each run, so the sums are deterministic.
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        dy_rows = dy + row[:, None] * (dy_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
        x_rows = x + row[:, None] * (x_stride * UNIT) + lane[None, :]
        average = tl.zeros((ROWS, 1), tl.float32)
        if not RMS:
            average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        gradients = ()  # one tensor for each block, in the dtype of dy
        values = ()
        for block in tl.static_range(BLOCKS):
            inside = is_inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
            gradients = gradients + (tl.load(dy_rows + block * COLUMNS, mask=inside, other=0.0),)
            values = values + (tl.load(x_rows + block * COLUMNS, mask=inside, other=0.0),)
        along = tl.zeros((ROWS, COLUMNS), tl.float32)  # each lane's sum of dy * weight over the blocks
        across = tl.zeros((ROWS, COLUMNS), tl.float32)  # each lane's sum of dy * weight * normalized x
        lane_rests = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range(BLOCKS):
            weighted = gradients[block].to(tl.float32)
            if weight is not None:
                if HOLD:
                    weighted *= held[block]
                else:
                    weighted *= parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[None, :]
            if RMS:
                across += weighted * (values[block].to(tl.float32) * scale)
            else:
                along += weighted
                centred = values[block].to(tl.float32) - average
                across += weighted * (centred * scale)
                if CORRECTED:
                    if not (EVEN or block < BLOCKS - 1):
                        centred = tl.where((block * COLUMNS + lane < columns)[None, :], centred, 0.0)
                    lane_rests += centred
        if RMS:
            across = (tl.sum(across, axis=1) * (1.0 / columns))[:, None]
        else:
            along, across = tl.reduce((along, across), 1, _add_pairs)
            along = (along * (1.0 / columns))[:, None]
            across = (across * (1.0 / columns))[:, None]
        if CORRECTED:
            rest = (tl.sum(lane_rests, axis=1) * (1.0 / columns))[:, None]
            across -= rest * scale * along
        next_weight_sums = ()
        next_bias_sums = ()
        for block in tl.static_range(BLOCKS):
            inside = is_inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
            if AGAIN:
                gradient = tl.load(dy_rows + block * COLUMNS, mask=inside, other=0.0, volatile=True).to(tl.float32)
                value = tl.load(x_rows + block * COLUMNS, mask=inside, other=0.0, volatile=True).to(tl.float32)
            else:
                gradient = gradients[block].to(tl.float32)
                value = values[block].to(tl.float32)
            if not RMS:
                value -= average
            if CORRECTED:
                value -= rest
            normal = value * scale
            if SUM_WEIGHT:
                next_weight_sums = next_weight_sums + (weight_sums[block] + gradient * normal,)
            if SUM_BIAS:
                next_bias_sums = next_bias_sums + (bias_sums[block] + gradient,)
            if weight is not None:
                if HOLD:
                    gradient *= held[block]
                else:
                    gradient *= parameters(weight, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)[None, :]
            if not RMS:
                gradient -= along
            result = (gradient - normal * across) * scale
            if dtotal is not None:
                place = dtotal + row[:, None] * (dtotal_stride * UNIT) + (block * COLUMNS + lane)[None, :]
                result += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            target = dx + row[:, None] * columns + (block * COLUMNS + lane)[None, :]
            tl.store(target, result.to(dx.dtype.element_ty), mask=inside)
        if SUM_WEIGHT:
            weight_sums = next_weight_sums
        if SUM_BIAS:
            bias_sums = next_bias_sums
    program = tl.program_id(0).to(tl.int64)
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        if SUM_WEIGHT:
            sums = tl.sum(weight_sums[block], axis=0)
            tl.store(partial + 2 * program * columns + column, sums, mask=column < columns)
        if SUM_BIAS:
            sums = tl.sum(bias_sums[block], axis=0)
            tl.store(partial + (2 * program + 1) * columns + column, sums, mask=column < columns)


@triton.jit
def norm_backward_shifted(
    dy, dtotal, x, weight, mean, rstd, dx,  # as in `norm_backward`, but contiguous
    partial,  # (programs * ROWS, 2, N)
    rows, columns,  # the number of rows must be a multiple of 8
    RMS: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do the same as `norm_backward` for rows that do not begin at multiples of 16 bytes. The rows at index i of all
    tiles of a program have the same shift. The program therefore keeps separate partial sums for each i.
    """
    lane = tl.arange(0, COLUMNS)
    first = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shift = shift_of(first, columns)[:, None]  # (ROWS, 1)
    weights = ()  # one tensor for each block, in the dtype of weight; loaded once for all tiles
    weight_sums = ()
    bias_sums = ()
    for block in tl.static_range(BLOCKS):
        if weight is not None:
            column = (block * COLUMNS + lane)[None, :] - shift
            inside = (column >= 0) & (column < columns)
            weights = weights + (tl.load(weight + column, mask=inside, other=0.0),)
        weight_sums = weight_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
        bias_sums = bias_sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for tile in tl.range(tl.program_id(0), rows // ROWS, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        place = enclosing(row, columns)[:, None] + lane[None, :]  # (ROWS, COLUMNS)
        average = tl.zeros((ROWS, 1), tl.float32)
        if not RMS:
            average = tl.load(mean + row)[:, None]
        scale = tl.load(rstd + row)[:, None]
        gradients = ()
        values = ()
        for block in tl.static_range(BLOCKS):
            position = block * COLUMNS + lane
            gradients = gradients + (
                load_shifted(dy + place + block * COLUMNS, position, shift, columns, block == 0 or block >= WHOLE),
            )
            values = values + (
                load_shifted(x + place + block * COLUMNS, position, shift, columns, block == 0 or block >= WHOLE),
            )
        along = tl.zeros((ROWS, COLUMNS), tl.float32)
        across = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range(BLOCKS):
            weighted = gradients[block].to(tl.float32)
            if weight is not None:
                weighted *= weights[block].to(tl.float32)
            if RMS:
                across += weighted * (values[block].to(tl.float32) * scale)
            else:
                along += weighted
                across += weighted * ((values[block].to(tl.float32) - average) * scale)
        if RMS:
            across = (tl.sum(across, axis=1) * (1.0 / columns))[:, None]
        else:
            along, across = tl.reduce((along, across), 1, _add_pairs)
            along = (along * (1.0 / columns))[:, None]
            across = (across * (1.0 / columns))[:, None]
        next_weight_sums = ()
        next_bias_sums = ()
        for block in tl.static_range(BLOCKS):
            gradient = gradients[block].to(tl.float32)
            value = values[block].to(tl.float32)
            if not RMS:
                value -= average
            normal = value * scale
            if SUM_WEIGHT:
                next_weight_sums = next_weight_sums + (weight_sums[block] + gradient * normal,)
            if SUM_BIAS:
                next_bias_sums = next_bias_sums + (bias_sums[block] + gradient,)
            if weight is not None:
                gradient *= weights[block].to(tl.float32)
            if not RMS:
                gradient -= along
            result = (gradient - normal * across) * scale
            position = block * COLUMNS + lane
            if dtotal is not None:
                more = load_shifted(
                    dtotal + place + block * COLUMNS, position, shift, columns, block == 0 or block >= WHOLE
                )
                result += more.to(tl.float32)
            result = result.to(dx.dtype.element_ty)
            store_shifted(dx + place + block * COLUMNS, result, position, shift, columns, block == 0 or block >= WHOLE)
        if SUM_WEIGHT:
            weight_sums = next_weight_sums
        if SUM_BIAS:
            bias_sums = next_bias_sums
    sums_rows = first.to(tl.int64)[:, None] * (2 * columns)
    for block in tl.static_range(BLOCKS):
        column = (block * COLUMNS + lane)[None, :] - shift
        inside = (column >= 0) & (column < columns)
        if SUM_WEIGHT:
            tl.store(partial + sums_rows + column, weight_sums[block], mask=inside)
        if SUM_BIAS:
            tl.store(partial + sums_rows + columns + column, bias_sums[block], mask=inside)


@triton.jit
def add_partial_sums(
    partial, dweight, dbias,  # (programs, 2, N) float32, (N,), (N,)
    programs, columns,
    SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weight and bias. The program adds the partial sums in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if SUM_WEIGHT:
        total = _sum_of_rows(partial, programs, column, columns, ROWS, COLUMNS)
        tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask=column < columns)
    if SUM_BIAS:
        total = _sum_of_rows(partial + columns, programs, column, columns, ROWS, COLUMNS)
        tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask=column < columns)


# ---- functions that several kernels share, also those of triton_kernels/long_norms.py ------------------------------


@triton.jit
def parameters(pointer, column, columns, FULL: tl.constexpr):
    """Load a block of a parameter (N,) in float32, with 0 past the end. FULL: no column is past the end."""
    if FULL:
        return tl.load(pointer + column).to(tl.float32)
    else:
        return tl.load(pointer + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def shift_of(row, columns):
    """The number of elements that precede a row's first element within its group of eight elements."""
    return ((row % 8) * (columns % 8)) % 8


@triton.jit
def enclosing(row, columns):
    """The offset of the group of eight elements that contains a row's first element. The last operation of the function
    is * 8, so the compiler knows that the result is a multiple of 8.
    """
    return (row * columns) // 8 * 8


@triton.jit
def load_shifted(place, lane, shift, columns, ENDS: tl.constexpr):
    """Load elements of rows (ROWS, COLUMNS) in groups of eight. Elements that belong to a neighbouring row become 0.
    `shift`: (ROWS, 1).

    ENDS: the block may contain an end of a row.
    """
    if ENDS:
        column = lane[None, :] - shift
        values = tl.load(place, mask=lane[None, :] < (shift + columns + 7) // 8 * 8, other=0.0)
        return tl.where((column >= 0) & (column < columns), values, 0.0)
    else:
        return tl.load(place)


@triton.jit
def store_shifted(place, values, lane, shift, columns, ENDS: tl.constexpr):
    """Store groups of eight elements at once. A group that overlaps a neighbouring row is stored one element at
    a time.
    """
    position = lane[None, :]
    if ENDS:
        begin = (shift + 7) // 8 * 8
        end = (shift + columns) // 8 * 8
        tl.store(place, values, mask=(position >= begin) & (position < end))
        inside = (position >= shift) & (position < shift + columns)
        tl.store(place, values, mask=inside & ((position < begin) | (position >= end)))
    else:
        tl.store(place, values)


@triton.jit
def _rest_and_variance(rests, squares, columns):
    """Compute (rounding error of the mean (ROWS, 1), variance (ROWS,)) of each row. `rests` and `squares` (ROWS,
    lanes): sums of the deviations from the rounded mean, and of their squares.
    """
    rest, variance = tl.reduce((rests, squares), 1, _add_pairs)
    rest = rest * (1.0 / columns)
    return rest[:, None], tl.maximum(variance * (1.0 / columns) - rest * rest, 0.0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_of_rows(partial, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows 0, 2, 4, ... of `partial` for the given columns. `rows` counts only the summed rows."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + (2 * row)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    return tl.sum(total, axis=0)
