"""Triton kernels of the cross entropy; `losses.py` has the formula and the operators.

As in `softmax_kernels.py`, rows that fit a program's registers are read once as tiles, and longer ones by persistent
programs block by block with an online maximum and sum. Where the gradient is made too (GRADIENT), long rows are read a
second time from L2, from the end to the beginning. `dx` may be the memory of `x`: a program has read what it needs of
an element before it writes it.

Logits count from the row's maximum or, while that is not known, from the target's logit, so that a large common offset
costs no accuracy. A row whose target is ignored has loss 0 and gradient 0; one whose target is no class has NaN for
both, and nothing is read out of bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.softmax_kernels import fold_scores, is_inside, merge_lanes


@triton.jit
def cross_entropy_rows(
    x, target, weight, weight_sum, inverse,  # (M, V), (M,) int64, (V,), () float32, () float32
    losses, statistics, dx,  # (M,) float32, (2, M) float32: maximum, log of the sum of exponentials; (M, V)
    rows, units, x_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr, GRADIENT: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Losses of ROWS rows, and their statistics or (GRADIENT) dx; `kept` is 1 - smoothing, `spread` smoothing / V."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    lane = tl.arange(0, COLUMNS)
    source = x + row[:, None] * (x_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    label = tl.load(target + row, mask=row < rows, other=0)
    counted = (row < rows) & (label != ignored)
    row_weight, picked = _of_target(x + row * (x_stride * UNIT), weight, label, counted, columns, HAS_WEIGHT)
    largest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    values = ()  # of all blocks, as loaded
    for block in tl.static_range(BLOCKS):
        inside = is_inside(row, rows, block * COLUMNS + lane, columns, EVEN or block < BLOCKS - 1)
        values = values + (tl.load(source + block * COLUMNS, mask=inside, other=float("-inf")),)
        largest = tl.maximum(largest, values[block].to(tl.float32))
    maximum = tl.max(largest, axis=1)  # (ROWS,)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    weighted = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.static_range(BLOCKS):
        apart = values[block].to(tl.float32) - maximum[:, None]
        total += tl.exp(apart)
        if SMOOTH:
            column = block * COLUMNS + lane
            if HAS_WEIGHT:
                apart *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
            weighted += tl.where((column < columns)[None, :], apart, 0.0)
    logarithm = tl.log(tl.sum(total, axis=1))
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    loss = row_weight * (kept * (logarithm - (picked - maximum)))
    if SMOOTH:
        loss += spread * (whole * logarithm - tl.sum(weighted, axis=1))
    if Z:
        loss += row_weight * z_loss * (maximum + logarithm) * (maximum + logarithm)
    tl.store(losses + row, tl.where(counted, loss, 0.0), mask=row < rows)
    if not GRADIENT:
        tl.store(statistics + row, maximum, mask=row < rows)
        tl.store(statistics + rows + row, logarithm, mask=row < rows)
    else:
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if MEAN:
            factor *= tl.load(inverse)
        density, at_target = _coefficients(
            factor, row_weight, maximum + logarithm, whole, kept, spread, z_loss, SMOOTH, Z
        )
        for block in tl.static_range(BLOCKS):
            column = block * COLUMNS + lane
            apart = values[block].to(tl.float32) - maximum[:, None]
            result = tl.exp(apart - logarithm[:, None]) * density[:, None]
            if SMOOTH:
                share = _share(weight, column, columns, spread, HAS_WEIGHT)
                result -= factor[:, None] * share[None, :]
            result -= tl.where(column[None, :] == label[:, None], at_target[:, None], 0.0)
            result = tl.where(counted[:, None], result, 0.0)
            place = dx + row[:, None] * columns + column[None, :]
            inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
            tl.store(place, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_rows_long(
    x, target, weight, weight_sum, inverse, losses, statistics, dx,  # as above
    rows, units, x_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr, GRADIENT: tl.constexpr,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same of every (number of programs)-th row."""
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    blocks = tl.cdiv(columns, COLUMNS)
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(index, tl.int64)
        source = x + row * (x_stride * UNIT)
        label = tl.load(target + row)
        counted = label != ignored
        row_weight, picked = _of_target(source, weight, label, counted, columns, HAS_WEIGHT)
        # Infinite where the loss is infinite or NaN in any case: then the sums below count from 0.
        origin = tl.where(tl.abs(picked) < float("inf"), picked, 0.0)
        largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        weighted = tl.zeros((COLUMNS,), tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            column = block * COLUMNS + lane
            inside = column < columns
            scores = tl.load(source + column, mask=inside, other=float("-inf"), eviction_policy="evict_last")
            scores = scores.to(tl.float32)
            largest, total = fold_scores(largest, total, scores)
            if SMOOTH:
                apart = scores - origin
                if HAS_WEIGHT:
                    apart *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
                weighted += tl.where(inside, apart, 0.0)
        maximum, total_sum = merge_lanes(largest, total)
        logarithm = tl.log(total_sum)
        loss = row_weight * (kept * (logarithm - (picked - maximum)))
        if SMOOTH:
            loss += spread * (whole * (logarithm + (maximum - origin)) - tl.sum(weighted, axis=0))
        if Z:
            loss += row_weight * z_loss * (maximum + logarithm) * (maximum + logarithm)
        tl.store(losses + row, tl.where(counted, loss, 0.0))
        if not GRADIENT:
            tl.store(statistics + row, maximum)
            tl.store(statistics + rows + row, logarithm)
        else:
            factor = 1.0
            if MEAN:
                factor = tl.load(inverse)
            density, at_target = _coefficients(
                factor, row_weight, maximum + logarithm, whole, kept, spread, z_loss, SMOOTH, Z
            )
            for behind in tl.range(0, blocks, num_stages=STAGES):
                column = (blocks - 1 - behind) * COLUMNS + lane
                inside = column < columns
                scores = tl.load(source + column, mask=inside, other=0.0, eviction_policy="evict_first")
                result = tl.exp((scores.to(tl.float32) - maximum) - logarithm) * density
                if SMOOTH:
                    result -= factor * _share(weight, column, columns, spread, HAS_WEIGHT)
                result -= tl.where(column == label, at_target, 0.0)
                result = tl.where(counted, result, 0.0)
                tl.store(dx + row * columns + column, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_gradient(
    dloss, x, target, weight, weight_sum, inverse, statistics, dx,  # (M,) or (), the others as above
    rows, units, x_stride, dloss_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of ROWS rows and COLUMNS columns from the statistics."""
    columns = units * UNIT
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = is_inside(row, rows, column, columns, False)
    scores = tl.load(x + row[:, None] * (x_stride * UNIT) + column[None, :], mask=inside, other=0.0).to(tl.float32)
    label = tl.load(target + row, mask=row < rows, other=0)
    counted = (row < rows) & (label != ignored)
    row_weight = _weight_of_target(weight, label, counted, columns, HAS_WEIGHT)
    maximum = tl.load(statistics + row, mask=row < rows, other=0.0)
    logarithm = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
    factor = tl.load(dloss + row * dloss_stride, mask=row < rows, other=0.0).to(tl.float32)
    if MEAN:
        factor *= tl.load(inverse)
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    density, at_target = _coefficients(factor, row_weight, maximum + logarithm, whole, kept, spread, z_loss, SMOOTH, Z)
    result = tl.exp((scores - maximum[:, None]) - logarithm[:, None]) * density[:, None]
    if SMOOTH:
        result -= factor[:, None] * _share(weight, column, columns, spread, HAS_WEIGHT)[None, :]
    result -= tl.where(column[None, :] == label[:, None], at_target[:, None], 0.0)
    result = tl.where(counted[:, None], result, 0.0)
    tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def inverse_of_target_weights(
    target, weight, inverse,  # (M,) int64, (V,), () float32
    rows, columns, ignored,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 / sum of the weights of all targets that are not ignored; one program, always in the same order."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK).to(tl.int64)
        label = tl.load(target + row, mask=row < rows, other=0)
        counted = (row < rows) & (label != ignored)
        total += tl.where(counted, _weight_of_target(weight, label, counted, columns, HAS_WEIGHT), 0.0)
    tl.store(inverse, tl.div_rn(1.0, tl.sum(total, axis=0)))


@triton.jit
def scale_unless_one(
    gradient, factor, result,  # (N,), () float32, (N,) or the same memory
    elements,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gradient * factor; in place, a factor of 1 costs no more than reading it."""
    scale = tl.load(factor)
    if IN_PLACE:
        if scale != 1.0:
            _scale_blocks(gradient, scale, result, elements, BLOCK)
    else:
        _scale_blocks(gradient, scale, result, elements, BLOCK)


# ---- pieces ------------------------------------------------------------------------------------------------------


@triton.jit
def _scale_blocks(gradient, scale, result, elements, BLOCK: tl.constexpr):
    """Every (number of programs)-th block."""
    for block in tl.range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(gradient + index, mask=index < elements, other=0.0).to(tl.float32) * scale
        tl.store(result + index, values.to(result.dtype.element_ty), mask=index < elements)


@triton.jit
def _weight_of_target(weight, label, counted, columns, HAS_WEIGHT: tl.constexpr):
    """The weight of the target's class; NaN where the target is no class."""
    valid = counted & (label >= 0) & (label < columns)
    if HAS_WEIGHT:
        found = tl.load(weight + label, mask=valid, other=0.0).to(tl.float32)
    else:
        found = tl.where(valid, 1.0, 0.0)
    return tl.where(counted & (valid == 0), float("nan"), found)


@triton.jit
def _of_target(source, weight, label, counted, columns, HAS_WEIGHT: tl.constexpr):
    """The weight and the logit of the target."""
    valid = counted & (label >= 0) & (label < columns)
    picked = tl.load(source + label, mask=valid, other=0.0).to(tl.float32)
    return _weight_of_target(weight, label, counted, columns, HAS_WEIGHT), picked


@triton.jit
def _weight_sum(weight_sum, columns, HAS_WEIGHT: tl.constexpr):
    """Of all classes."""
    if HAS_WEIGHT:
        return tl.load(weight_sum)
    else:
        return columns.to(tl.float32)


@triton.jit
def _coefficients(
    factor, row_weight, log_sum_exp, whole, kept, spread, z_loss, SMOOTH: tl.constexpr, Z: tl.constexpr
):  # fmt: skip
    """What a probability is multiplied with in dx, and what is subtracted at the target."""
    density = row_weight * kept
    if Z:
        density += 2.0 * z_loss * row_weight * log_sum_exp
    if SMOOTH:
        density += spread * whole
    return factor * density, factor * (row_weight * kept)


@triton.jit
def _share(weight, column, columns, spread, HAS_WEIGHT: tl.constexpr):
    """What smoothing gives each class."""
    if HAS_WEIGHT:
        return spread * tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    else:
        return tl.where(column < columns, spread, 0.0)
