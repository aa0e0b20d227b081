"""Triton kernels of softmax and its logarithm; `softmaxes.py` has the operators.

Rows that fit in a program's registers are read from memory once. A tile has ROWS rows, and each row has BLOCKS blocks
of COLUMNS elements. Registers contain a tile as loaded (with a mask: as float32 scores) or, with HOLD, as float32
exponentials. Longer rows are read twice. Only a few persistent programs run, so that most of a row is still in L2 at
the second read. The second pass runs from the end to the beginning, so that it starts with the elements that the first
pass read last. The elements of a row after its last full block stay in registers, so the loops load without masks. In
the first pass each lane keeps its own maximum, and a sum of exponentials relative to this maximum (Milakov and
Gimelshein 2018). The lanes are merged at the end.

With WIDE, for float32 results, forward adds exponentials in float64, and backward computes in float64 between loads and
stores. In float32, the rounding error of a row's sum would change all results of that row. In about one of twenty
random small tensors, the error of the results would then be more than twice PyTorch's error. For the same reason
backward divides the sum of dy * y by the sum of y, which is not exactly one. For half precision results, the rounding
of the results is far coarser than the error of a float32 sum.

A maximum ignores NaN but an exponential does not, so a row that contains NaN becomes NaN as a whole. A row of only -inf
also becomes NaN, because exp(-inf - (-inf)) is NaN.

`units` and the strides of rows are in units of UNIT elements, so that the compiler knows that UNIT divides N, and loads
several elements at a time. EVEN: N is the width of the tile. All offsets of rows are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import fold_scores, is_inside, merge_lanes, sum_of_lanes, widened

NO_MASK = tl.constexpr(0)
ADDED = tl.constexpr(1)  # a mask of numbers, added to the scaled rows
KEPT = tl.constexpr(2)  # a mask of bytes, 0 where a score is -inf


@triton.jit
def softmax_forward(
    x, mask, y,  # x, y: (M, N); mask: any shape, read by strides
    rows, units, x_stride, scale,
    mask_middle, mask_inner, outer_stride, middle_stride, inner_stride, column_stride,
    MASK: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    HOLD: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute softmax(x * scale + mask), or its logarithm with LOG, for ROWS rows."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    lane = tl.arange(0, COLUMNS)
    source = x + row[:, None] * (x_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    target = y + row[:, None] * columns + lane[None, :]
    mask_rows = _rows_of_mask(row, mask_middle, mask_inner, outer_stride, middle_stride, inner_stride)
    largest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    values = ()  # the values of all blocks, masked
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
        loaded = tl.load(source + block * COLUMNS, mask=inside, other=0.0)
        if MASK != NO_MASK:
            place = mask + mask_rows[:, None] + (column * column_stride)[None, :]
            loaded = _masked(loaded.to(tl.float32) * scale, place, inside, MASK)
        values = values + (loaded,)
        scores = _scores(loaded, scale, column, columns, MASK, EVEN or block < BLOCKS - 1)
        largest = tl.maximum(largest, scores)
    maximum = tl.max(largest, axis=1)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    held = ()  # if HOLD: the exponentials of all blocks, or with LOG, the exponentials' arguments
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        apart = _scores(values[block], scale, column, columns, MASK, EVEN or block < BLOCKS - 1) - maximum
        powers = tl.exp(apart)
        total += powers
        if HOLD:
            held = held + ((apart if LOG else powers),)
    sums = sum_of_lanes(total, 1, WIDE).to(tl.float32)[:, None]
    inverse, logarithm = tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), sums), tl.log(sums)
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        if HOLD:
            result = held[block] - logarithm if LOG else held[block] * inverse
        else:
            apart = _scores(values[block], scale, column, columns, MASK, True) - maximum
            if LOG:
                result = apart - logarithm
            else:
                result = tl.exp(apart) * inverse
        inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
        tl.store(target + block * COLUMNS, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def softmax_forward_long(
    x, mask, y,  # as above
    rows, units, x_stride, scale,
    mask_middle, mask_inner, outer_stride, middle_stride, inner_stride, column_stride,
    MASK: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Do the same as `softmax_forward` for every P-th row, where P is the number of programs."""
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    full = columns // COLUMNS * COLUMNS
    tail = full + lane
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(index, tl.int64)
        source, target = x + row * (x_stride * UNIT), y + row * columns
        mask_row = mask + _rows_of_mask(row, mask_middle, mask_inner, outer_stride, middle_stride, inner_stride)
        last = tl.load(source + tail, mask=tail < columns, other=0.0)
        largest = tl.full((COLUMNS // GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((COLUMNS // GROUP,), tl.float32)
        for start in tl.range(0, full, COLUMNS, num_stages=STAGES):
            column = start + lane
            scores = tl.load(source + column, eviction_policy=AGAIN).to(tl.float32)
            if MASK != NO_MASK:
                scores = _masked(scores * scale, mask_row + column * column_stride, None, MASK)
            largest, total = fold_scores(largest, total, _scores(scores, scale, column, columns, MASK, True), GROUP)
        if MASK != NO_MASK:
            last = _masked(last.to(tl.float32) * scale, mask_row + tail * column_stride, tail < columns, MASK)
        largest, total = fold_scores(largest, total, _scores(last, scale, tail, columns, MASK, False), GROUP)
        maximum, total_sum = merge_lanes(largest, total, WIDE)
        total_sum = total_sum.to(tl.float32)
        inverse, logarithm = tl.div_rn(1.0, total_sum), tl.log(total_sum)
        result = _softmax_of(_scores(last, scale, tail, columns, MASK, True), maximum, inverse, logarithm, LOG)
        tl.store(target + tail, result.to(y.dtype.element_ty), mask=tail < columns)
        for behind in tl.range(0, full, COLUMNS, num_stages=STAGES):
            column = full - COLUMNS - behind + lane
            scores = tl.load(source + column, eviction_policy="evict_first").to(tl.float32)
            if MASK != NO_MASK:
                scores = _masked(scores * scale, mask_row + column * column_stride, None, MASK)
            scores = _scores(scores, scale, column, columns, MASK, True)
            result = _softmax_of(scores, maximum, inverse, logarithm, LOG)
            tl.store(target + column, result.to(y.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def softmax_backward(
    dy, y, mask, dx,  # dy, y, dx: (M, N); mask: any shape, read by strides
    rows, units, dy_stride, scale,
    mask_middle, mask_inner, outer_stride, middle_stride, inner_stride, column_stride,
    MASK: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dx of ROWS rows from y and dy. If there is a mask of bytes, dx is 0 where the mask is 0."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    dy_rows = dy + row[:, None] * (dy_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    y_rows = y + row[:, None] * columns + lane[None, :]
    mask_rows = _rows_of_mask(row, mask_middle, mask_inner, outer_stride, middle_stride, inner_stride)
    gradients = ()  # all blocks of dy, as loaded
    results = ()
    total = tl.zeros((ROWS, COLUMNS), tl.float64 if WIDE else tl.float32)
    whole = tl.zeros((ROWS, COLUMNS), tl.float64)  # only if WIDE
    for block in tl.static_range(BLOCKS):
        inside = is_inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
        gradients = gradients + (tl.load(dy_rows + block * COLUMNS, mask=inside, other=0.0),)
        results = results + (tl.load(y_rows + block * COLUMNS, mask=inside, other=float("-inf") if LOG else 0.0),)
        total += _summand(gradients[block], results[block], LOG, WIDE)
        if WIDE:
            whole += _probability(results[block], LOG, WIDE)
    sums = tl.sum(total, axis=1)[:, None]
    if WIDE:
        sums /= tl.sum(whole, axis=1)[:, None]
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + lane
        inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
        result = _gradient(gradients[block], results[block], sums, scale, LOG, WIDE)
        if MASK == KEPT:
            place = mask + mask_rows[:, None] + (column * column_stride)[None, :]
            result = tl.where(tl.load(place, mask=inside, other=0) != 0, result, 0.0)
        target = dx + row[:, None] * columns + column[None, :]
        tl.store(target, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_long(
    dy, y, mask, dx,  # as above
    rows, units, dy_stride, scale,
    mask_middle, mask_inner, outer_stride, middle_stride, inner_stride, column_stride,
    MASK: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Do the same as `softmax_backward` for every P-th row, where P is the number of programs."""
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    full = columns // COLUMNS * COLUMNS
    tail = full + lane
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(index, tl.int64)
        dy_row, y_row, dx_row = dy + row * (dy_stride * UNIT), y + row * columns, dx + row * columns
        mask_row = mask + _rows_of_mask(row, mask_middle, mask_inner, outer_stride, middle_stride, inner_stride)
        last_gradient = tl.load(dy_row + tail, mask=tail < columns, other=0.0)
        last_value = tl.load(y_row + tail, mask=tail < columns, other=float("-inf") if LOG else 0.0)
        total = tl.zeros((COLUMNS,), tl.float64 if WIDE else tl.float32)
        whole = tl.zeros((COLUMNS,), tl.float64)  # only if WIDE
        for start in tl.range(0, full, COLUMNS, num_stages=STAGES):
            gradient = tl.load(dy_row + (start + lane), eviction_policy=AGAIN)
            if LOG and not WIDE:  # only dy is summed
                total += gradient.to(tl.float32)
            else:
                value = tl.load(y_row + (start + lane), eviction_policy=AGAIN)
                total += _summand(gradient, value, LOG, WIDE)
                if WIDE:
                    whole += _probability(value, LOG, WIDE)
        total += _summand(last_gradient, last_value, LOG, WIDE)
        sums = tl.sum(total, axis=0)
        if WIDE:
            sums /= tl.sum(whole + _probability(last_value, LOG, WIDE), axis=0)
        result = _gradient(last_gradient, last_value, sums, scale, LOG, WIDE)
        if MASK == KEPT:
            kept = tl.load(mask_row + tail * column_stride, mask=tail < columns, other=0) != 0
            result = tl.where(kept, result, 0.0)
        tl.store(dx_row + tail, result.to(dx.dtype.element_ty), mask=tail < columns)
        for behind in tl.range(0, full, COLUMNS, num_stages=STAGES):
            column = full - COLUMNS - behind + lane
            gradient = tl.load(dy_row + column, eviction_policy="evict_first")
            value = tl.load(y_row + column, eviction_policy="evict_first")
            result = _gradient(gradient, value, sums, scale, LOG, WIDE)
            if MASK == KEPT:
                result = tl.where(tl.load(mask_row + column * column_stride) != 0, result, 0.0)
            tl.store(dx_row + column, result.to(dx.dtype.element_ty), eviction_policy="evict_first")


# ---- functions that several kernels share ------------------------------------------------------------------------


@triton.jit
def _softmax_of(scores, maximum, inverse, logarithm, LOG: tl.constexpr):
    """The softmax of a row's scores, from the row's maximum and 1 / (sum of exponentials). With LOG, the log-softmax,
    from the logarithm of this sum.
    """
    if LOG:
        return (scores - maximum) - logarithm
    else:
        return tl.exp(scores - maximum) * inverse


@triton.jit
def _scores(values, scale, column, columns, MASK: tl.constexpr, FULL: tl.constexpr):
    """Compute scaled float32 scores, with -inf past the end of a row unless FULL. If there is a mask, `values` are
    already scaled, so the function does not scale them.
    """
    scores = values.to(tl.float32)
    if MASK == NO_MASK:
        scores = scores * scale
    if not FULL:
        if len(scores.shape) == 2:
            scores = tl.where((column < columns)[None, :], scores, float("-inf"))
        else:
            scores = tl.where(column < columns, scores, float("-inf"))
    return scores


@triton.jit
def _masked(scores, place, inside, MASK: tl.constexpr):
    """Add the mask to the scores, or with a mask of bytes, set scores to -inf where the mask is 0."""
    if MASK == ADDED:
        return scores + _load(place, inside).to(tl.float32)
    else:
        return tl.where(_load(place, inside) != 0, scores, float("-inf"))


@triton.jit
def _load(place, inside):
    """Load the elements where `inside` is true, with 0 elsewhere. If `inside` is None, load all elements."""
    if inside is None:
        return tl.load(place)
    else:
        return tl.load(place, mask=inside, other=0)


@triton.jit
def _rows_of_mask(row, middle, inner, outer_stride, middle_stride, inner_stride):
    """The offset, in the mask, of the mask's row that belongs to each row of x. `middle` and `inner` are sizes: the row
    number is split into an index (outer, middle, inner), and a stride is 0 where the mask is broadcast.
    """
    outer = row // inner // middle
    return outer * outer_stride + (row // inner % middle) * middle_stride + (row % inner) * inner_stride


@triton.jit
def _probability(value, LOG: tl.constexpr, WIDE: tl.constexpr):
    """The softmax from the result of forward, which is the softmax, or with LOG, its logarithm."""
    if LOG:
        return widened(tl.exp(value.to(tl.float32)), WIDE)
    else:
        return widened(value, WIDE)


@triton.jit
def _summand(gradient, value, LOG: tl.constexpr, WIDE: tl.constexpr):
    """An element's term of the sum over its row that the gradient needs: dy * y, or with LOG, dy."""
    if LOG:
        return widened(gradient, WIDE)
    else:
        return widened(gradient, WIDE) * widened(value, WIDE)


@triton.jit
def _gradient(gradient, value, sums, scale, LOG: tl.constexpr, WIDE: tl.constexpr):
    """dx = (dy - sum) * y * scale, or with LOG, dx = (dy - exp(y) * sum) * scale."""
    if LOG:
        return (widened(gradient, WIDE) - _probability(value, LOG, WIDE) * sums) * scale
    else:
        return (widened(gradient, WIDE) - sums) * widened(value, WIDE) * scale
