"""Triton kernels of layer norm and RMS norm for rows that do not fit a program's registers; `triton_kernels/norms.py`
has shared functions.

Forward reads a row twice. The second pass runs from the end of the row to its beginning, so that it starts with the
elements that the first pass read last and that are still in L2. Backward has two kernels. The first kernel computes
sums along rows. The second kernel uses the sums of the first kernel, computes dx in blocks of columns, and sums over
rows.

SHIFT: rows are not aligned to 16 bytes, so the kernel loads the groups of eight elements that enclose a row (see
`triton_kernels/norms.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.norms.triton_kernels.norms import enclosing, shift_of


@triton.jit
def norm_forward_long(
    x, residual, input_bias, weight, bias,  # x, residual (M, N); input_bias, weight, bias (N,); all but x may be None
    y, total, mean, rstd,  # (M, N) twice, (M,) twice; total is None if nothing is added; mean is None for RMS
    rows, units, x_stride, residual_stride, eps,
    RMS: tl.constexpr, SHIFT: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalize every P-th row, where P is the number of programs. For each of the COLUMNS positions of a block, the
    kernel updates the mean and the squared deviations of the elements at this position (Welford 1962; with RMS, only
    their sum of squares). At the end of the row, it combines the positions.
    """
    CORRECTED: tl.constexpr = not RMS and x.dtype.element_ty == tl.float32
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(index, tl.int64)
        source, target = row * (x_stride * UNIT), row * columns
        shift = 0
        if SHIFT:
            shift = shift_of(row, columns).to(tl.int32)
            source, target = enclosing(row, columns), enclosing(row, columns)
        blocks = tl.cdiv(shift + columns, COLUMNS)
        lane_mean = tl.zeros((COLUMNS,), tl.float32)
        lane_squares = tl.zeros((COLUMNS,), tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            place = block * COLUMNS + lane
            inside = (place >= shift) & (place < shift + columns)
            values = _load(x + source + place, place, shift, columns, SHIFT, "evict_last").to(tl.float32)
            if total is not None:
                if input_bias is not None:
                    values += tl.load(input_bias + (place - shift), mask=inside, other=0.0).to(tl.float32)
                if residual is not None:
                    offset = row * (residual_stride * UNIT)
                    if SHIFT:
                        offset = source
                    values += _load(residual + offset + place, place, shift, columns, SHIFT, "evict_first").to(
                        tl.float32
                    )
                rounded = values.to(total.dtype.element_ty)
                _store(total + target + place, rounded, place, shift, columns, SHIFT)
                values = rounded.to(tl.float32)
            if RMS:
                lane_squares += tl.where(inside, values * values, 0.0)
            else:
                seen = tl.cast(block + 1, tl.float32)
                inverse = 1.0 / seen
                if SHIFT:  # in block 0, the first lanes are elements of the previous row
                    inverse = tl.where(place % COLUMNS < shift, 1.0 / tl.maximum(seen - 1.0, 1.0), inverse)
                step = tl.where(inside, values - lane_mean, 0.0)
                lane_mean += step * inverse
                lane_squares += tl.where(inside, step * (values - lane_mean), 0.0)
        average = 0.0
        if not RMS:
            lane_count = ((columns + shift - lane + COLUMNS - 1) // COLUMNS).to(tl.float32)
            if SHIFT:
                lane_count -= (lane < shift).to(tl.float32)
            average = tl.sum(lane_mean * lane_count, axis=0) * (1.0 / columns)
            apart = lane_mean - average
            if CORRECTED:
                rest = tl.sum(apart * lane_count, axis=0) * (1.0 / columns)
                apart -= rest
            lane_squares += lane_count * apart * apart
            tl.store(mean + row, average)
        scale = 1.0 / tl.sqrt(tl.sum(lane_squares, axis=0) * (1.0 / columns) + eps)
        tl.store(rstd + row, scale)
        if total is not None:
            tl.debug_barrier()  # below, threads read elements that other threads have stored
        for behind in tl.range(0, blocks, num_stages=STAGES):
            place = (blocks - 1 - behind) * COLUMNS + lane
            if total is not None:
                values = _load(total + target + place, place, shift, columns, SHIFT, "evict_first").to(tl.float32)
            else:
                values = _load(x + source + place, place, shift, columns, SHIFT, "evict_first").to(tl.float32)
            if not RMS:
                values -= average
            if CORRECTED:
                values -= rest
            result = values * scale
            inside = (place >= shift) & (place < shift + columns)
            if weight is not None:
                result *= tl.load(weight + (place - shift), mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                result += tl.load(bias + (place - shift), mask=inside, other=0.0).to(tl.float32)
            _store(y + target + place, result.to(y.dtype.element_ty), place, shift, columns, SHIFT)


@triton.jit
def norm_row_sums(
    dy, x, weight, mean, rstd, sums,  # dy, x (M, N); weight (N,); mean, rstd (M,); sums (3, M) float32
    rows, units, dy_stride, x_stride,
    RMS: tl.constexpr, SHIFT: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the means along long rows that dx needs: the mean of dy * weight, and the mean of dy * weight times the
    normalized x. In a layer norm of float32 rows, also compute the rounding error of the mean of x (see
    `triton_kernels/norms.py`).
    """
    CORRECTED: tl.constexpr = not RMS and x.dtype.element_ty == tl.float32
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLUMNS)
    dy_start, x_start = row * (dy_stride * UNIT), row * (x_stride * UNIT)
    shift = 0
    if SHIFT:
        shift = shift_of(row, columns).to(tl.int32)
        dy_start, x_start = enclosing(row, columns), enclosing(row, columns)
    average = 0.0
    if not RMS:
        average = tl.load(mean + row)
    scale = tl.load(rstd + row)
    along = tl.zeros((COLUMNS,), tl.float32)
    across = tl.zeros((COLUMNS,), tl.float32)
    rests = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns + shift, COLUMNS):
        place = start + lane
        weighted = _load(dy + dy_start + place, place, shift, columns, SHIFT, "").to(tl.float32)
        values = _load(x + x_start + place, place, shift, columns, SHIFT, "").to(tl.float32)
        if weight is not None:
            inside = (place >= shift) & (place < shift + columns)
            weighted *= tl.load(weight + (place - shift), mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            along += weighted
        across += weighted * ((values - average) * scale)
        if CORRECTED:
            rests += tl.where(place < columns, values - average, 0.0)
    mean_along = tl.sum(along, axis=0) * (1.0 / columns)
    mean_across = tl.sum(across, axis=0) * (1.0 / columns)
    if CORRECTED:
        rest = tl.sum(rests, axis=0) * (1.0 / columns)
        mean_across -= rest * scale * mean_along
        tl.store(sums + 2 * rows + row, rest)
    tl.store(sums + row, mean_along)
    tl.store(sums + rows + row, mean_across)


@triton.jit
def norm_backward_long(
    dy, dtotal, x, weight, mean, rstd, sums, dx,  # dy, dtotal (or None), x, dx (M, N); weight (N,); mean, rstd (M,)
    partial,  # (chunks, 2, N) float32; sums: (3, M)
    rows, units, dy_stride, dtotal_stride, x_stride,
    RMS: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, SHIFT: tl.constexpr, UNIT: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of a block of columns in every C-th row, where C is the number of chunks. Also compute the partial
    sums of each chunk for the gradients of weight and bias.

    SHIFT: rows do not all begin at a multiple of eight elements. A row's shift is its distance from the previous
        multiple; shifts repeat every eight rows. The number of chunks must then be a multiple of eight, so that all
        rows of a program have the same shift.
    """
    CORRECTED: tl.constexpr = not RMS and x.dtype.element_ty == tl.float32
    columns = units * UNIT
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    shift = 0
    if SHIFT:
        shift = shift_of(chunk, columns)
    column = place - shift
    inside = (column >= 0) & (column < columns)
    if weight is not None:
        weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    for index in tl.range(chunk, rows, chunks, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        dy_start, x_start, dx_start = row * (dy_stride * UNIT), row * (x_stride * UNIT), row * columns
        if SHIFT:
            dx_start = enclosing(row, columns)
            dy_start, x_start = dx_start, dx_start
        average = 0.0
        if not RMS:
            average = tl.load(mean + row)
        scale, along, across = tl.load(rstd + row), tl.load(sums + row), tl.load(sums + rows + row)
        gradient = _load(dy + dy_start + place, place, shift, columns, SHIFT, "").to(tl.float32)
        value = _load(x + x_start + place, place, shift, columns, SHIFT, "").to(tl.float32)
        value -= average
        if CORRECTED:
            value -= tl.load(sums + 2 * rows + row)
        normal = value * scale
        if SUM_WEIGHT:
            weight_sum += gradient * normal
        if SUM_BIAS:
            bias_sum += gradient
        if weight is not None:
            gradient *= weights
        result = (gradient - along - normal * across) * scale
        if dtotal is not None:
            offset = row * (dtotal_stride * UNIT)
            if SHIFT:
                offset = dx_start
            result += _load(dtotal + offset + place, place, shift, columns, SHIFT, "").to(tl.float32)
        _store(dx + dx_start + place, result.to(dx.dtype.element_ty), place, shift, columns, SHIFT)
    if SUM_WEIGHT:
        tl.store(partial + 2 * chunk.to(tl.int64) * columns + column, weight_sum, mask=inside)
    if SUM_BIAS:
        tl.store(partial + (2 * chunk.to(tl.int64) + 1) * columns + column, bias_sum, mask=inside)


# ---- functions that several kernels share --------------------------------------------------------------------------


@triton.jit
def _load(pointers, place, shift, columns, SHIFT: tl.constexpr, EVICT: tl.constexpr):
    """Load a block of a row, with 0 for elements outside the row. `place`: the elements' positions; with SHIFT,
    position 0 is `shift` elements before the row, and whole groups of eight elements are loaded.
    """
    if SHIFT:
        groups = place < (shift + columns + 7) // 8 * 8
        values = tl.load(pointers, mask=groups, other=0.0, eviction_policy=EVICT)
        return tl.where((place >= shift) & (place < shift + columns), values, 0.0)
    else:
        return tl.load(pointers, mask=place < columns, other=0.0, eviction_policy=EVICT)


@triton.jit
def _store(pointers, values, place, shift, columns, SHIFT: tl.constexpr):
    """Store a block of a row. With SHIFT, whole groups of eight elements are stored at once. A group that overlaps a
    neighbouring row is stored one element at a time.
    """
    if SHIFT:
        begin = (shift + 7) // 8 * 8
        end = (shift + columns) // 8 * 8
        tl.store(pointers, values, mask=(place >= begin) & (place < end))
        inside = (place >= shift) & (place < shift + columns)
        tl.store(pointers, values, mask=inside & ((place < begin) | (place >= end)))
    else:
        tl.store(pointers, values, mask=place < columns)
