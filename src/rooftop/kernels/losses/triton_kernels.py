"""Triton kernels of the cross entropy; `losses.py` has the formula and the operators.

As in `softmaxes/triton_kernels.py`, rows that fit a program's registers are read once as tiles. Longer rows are read by
persistent programs, block by block with an online maximum and sum. With GRADIENT the kernel also computes the gradient.
With GRADIENT, long rows are read a second time, mostly from L2, from the end to the beginning. Between the two
readings, the elements after a row's last full block stay in registers. `dx` may share memory with `x`: a program reads
each element before writing it.

WIDE is set for float32 logits: exponentials are added in float64, and the losses of rows (`losses`) are stored in
float64. In float32, the rounding error of a row's sum or logarithm would change all results of that row, for some small
tensors by more than twice PyTorch's error.

The kernels subtract the row's maximum from all logits. In a long row, the sum for label smoothing is computed before
the maximum is known, so there the kernel subtracts the target's logit instead. So a large common offset of the logits
does not reduce the accuracy. A row whose target is ignored has loss 0 and gradient 0. A row whose target is not a class
has NaN for loss and gradient; the kernel reads nothing out of bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import fold_scores, is_inside, merge_lanes, sum_of_lanes
from rooftop.kernels.operands.triton_kernels.scalars import reciprocal


@triton.jit
def cross_entropy_rows(
    x, target, weight, weight_sum, inverse,  # x (M, V); target (M,) int64; weight (V,); weight_sum, inverse () float32
    losses, statistics, dx,  # shapes: (M,) float32 or float64; (2, M) float32, maxima and sums of exponentials; (M, V)
    rows, units, x_stride, dx_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr, GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the losses of ROWS rows, and their statistics or, with GRADIENT, dx. kept = 1 - smoothing, spread =
    smoothing / V.
    """
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    lane = tl.arange(0, COLUMNS)
    source = x + row[:, None] * (x_stride * UNIT) + lane[None, :]  # (ROWS, COLUMNS)
    label = tl.load(target + row, mask=row < rows, other=0)
    counted = (row < rows) & (label != ignored)
    row_weight, picked = _of_target(x + row * (x_stride * UNIT), weight, label, counted, columns, HAS_WEIGHT)
    largest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    values = ()  # values of all blocks, as loaded
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
    sums = sum_of_lanes(total, 1, WIDE)  # (ROWS,)
    logarithm = tl.log(sums)
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    loss = row_weight * (kept * (logarithm - (picked - maximum)))
    if SMOOTH:
        loss += spread * (whole * logarithm - sum_of_lanes(weighted, 1, WIDE))
    if Z:
        loss += row_weight * z_loss * (maximum + logarithm) * (maximum + logarithm)
    tl.store(losses + row, tl.where(counted, loss, 0.0), mask=row < rows)
    if not GRADIENT:
        tl.store(statistics + row, maximum, mask=row < rows)
        tl.store(statistics + rows + row, sums.to(tl.float32), mask=row < rows)
    else:
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if MEAN:
            factor *= tl.load(inverse)
        log_sum_exp = (maximum + logarithm).to(tl.float32)
        at_target, squared = _terms(factor, row_weight, log_sum_exp, kept, z_loss)
        inverse_sum = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), sums.to(tl.float32))
        for block in tl.static_range(BLOCKS):
            column = block * COLUMNS + lane
            power = tl.exp(values[block].to(tl.float32) - maximum[:, None]) * inverse_sum[:, None]
            share = _class_weights(weight, column, columns, HAS_WEIGHT and SMOOTH)
            result = _gradient(
                power, column[None, :] == label[:, None], at_target[:, None], squared[:, None],
                (factor * spread)[:, None], whole, share[None, :], SMOOTH, Z,
            )  # fmt: skip
            result = tl.where(counted[:, None], result, 0.0)
            place = dx + row[:, None] * (dx_stride * UNIT) + column[None, :]
            inside = is_inside(row, rows, column, columns, EVEN or block < BLOCKS - 1)
            tl.store(place, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_rows_long(
    x, target, weight, weight_sum, inverse, losses, statistics, dx,  # as above
    rows, units, x_stride, dx_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr, GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Do the same as `cross_entropy_rows` for every P-th row, where P is the number of programs. Rows whose
    target is ignored are not read.

    SHIFTED: x and dx are contiguous, but a row need not begin at a multiple of GROUP elements. The program loads the
        groups of GROUP elements that enclose a row, so the element at a position has column = position - shift. The
        program stores whole groups at once. If a group is shared with a neighbouring row, the program stores only this
        row's elements of the group, after it has loaded the whole row. SHIFTED does not support class weights.
    """
    columns = units * UNIT
    lane = tl.arange(0, COLUMNS)
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(index, tl.int64)
        source, result_row = x + row * (x_stride * UNIT), dx + row * (dx_stride * UNIT)
        if SHIFTED:
            shift = ((row * columns) % GROUP).to(tl.int32)
            enclosing = row * columns // GROUP * GROUP
            from_x, to_dx = x + enclosing, dx + enclosing
        else:
            shift = 0
            from_x, to_dx = source, result_row
        length = shift + columns
        full = length // COLUMNS * COLUMNS
        tail = full + lane
        label = tl.load(target + row)
        if label == ignored:
            tl.store(losses + row, 0.0)
            if GRADIENT:
                for start in tl.range(0, columns, COLUMNS):
                    zeros = tl.zeros((COLUMNS,), dx.dtype.element_ty)
                    tl.store(result_row + (start + lane), zeros, mask=start + lane < columns)
            else:
                tl.store(statistics + row, 0.0)
                tl.store(statistics + rows + row, 1.0)
        else:
            last = tl.load(from_x + tail, mask=_in_groups(tail, length, GROUP, SHIFTED), other=float("-inf"))
            if SHIFTED:
                last = tl.where((tail >= shift) & (tail < length), last, float("-inf"))
            row_weight, picked = _of_target(source, weight, label, True, columns, HAS_WEIGHT)
            # If the target's logit is infinite or NaN, the loss is infinite or NaN as well. The sums below then
            # subtract 0 instead of the target's logit.
            origin = tl.where(tl.abs(picked) < float("inf"), picked, 0.0)
            largest = tl.full((COLUMNS // GROUP,), float("-inf"), tl.float32)
            total = tl.zeros((COLUMNS // GROUP,), tl.float32)
            weighted = tl.zeros((COLUMNS // GROUP,), tl.float32)
            for start in tl.range(0, full, COLUMNS, num_stages=STAGES):
                scores = tl.load(from_x + (start + lane), eviction_policy=AGAIN).to(tl.float32)
                if SHIFTED:
                    scores = tl.where(start + lane >= shift, scores, float("-inf"))
                largest, total = fold_scores(largest, total, scores, GROUP)
                if SMOOTH:
                    apart = (scores - origin) * _class_weights(weight, start + lane, columns, HAS_WEIGHT)
                    if SHIFTED:
                        apart = tl.where(start + lane >= shift, apart, 0.0)
                    weighted += tl.sum(tl.reshape(apart, (COLUMNS // GROUP, GROUP)), axis=1)
            largest, total = fold_scores(largest, total, last.to(tl.float32), GROUP)
            if SMOOTH:
                apart = tl.where((tail >= shift) & (tail < length), last.to(tl.float32) - origin, 0.0)
                apart *= _class_weights(weight, tail, columns, HAS_WEIGHT)
                weighted += tl.sum(tl.reshape(apart, (COLUMNS // GROUP, GROUP)), axis=1)
            maximum, total_sum = merge_lanes(largest, total, WIDE)
            logarithm = tl.log(total_sum)
            loss = row_weight * (kept * (logarithm - (picked - maximum)))
            if SMOOTH:
                loss += spread * (whole * (logarithm + (maximum - origin)) - sum_of_lanes(weighted, 0, WIDE))
            if Z:
                loss += row_weight * z_loss * (maximum + logarithm) * (maximum + logarithm)
            tl.store(losses + row, loss)
            total_sum = total_sum.to(tl.float32)
            if not GRADIENT:
                tl.store(statistics + row, maximum)
                tl.store(statistics + rows + row, total_sum)
            else:
                factor = 1.0
                if MEAN:
                    factor = tl.load(inverse)
                log_sum_exp = (maximum + logarithm).to(tl.float32)
                at_target, squared = _terms(factor, row_weight, log_sum_exp, kept, z_loss)
                density = at_target
                if SMOOTH:
                    density += factor * spread * whole
                if Z:
                    density += squared
                density = tl.div_rn(density, total_sum)
                result = tl.exp(last.to(tl.float32) - maximum) * density
                if SMOOTH:
                    result -= (factor * spread) * _class_weights(weight, tail, columns, HAS_WEIGHT)
                if SHIFTED:
                    whole_groups = (tail >= _next_group(shift, GROUP)) & (tail < length // GROUP * GROUP)
                    tl.store(to_dx + tail, result.to(dx.dtype.element_ty), mask=whole_groups)
                else:
                    tl.store(to_dx + tail, result.to(dx.dtype.element_ty), mask=tail < columns)
                for behind in tl.range(0, full, COLUMNS, num_stages=STAGES):
                    column = full - COLUMNS - behind + lane
                    scores = tl.load(from_x + column, eviction_policy="evict_first")
                    result = tl.exp(scores.to(tl.float32) - maximum) * density
                    if SMOOTH:
                        result -= (factor * spread) * _class_weights(weight, column, columns, HAS_WEIGHT)
                    if SHIFTED:
                        tl.store(
                            to_dx + column, result.to(dx.dtype.element_ty), mask=column >= _next_group(shift, GROUP),
                            eviction_policy="evict_first",
                        )  # fmt: skip
                    else:
                        tl.store(to_dx + column, result.to(dx.dtype.element_ty), eviction_policy="evict_first")
                if SHIFTED:  # store both ends of the row now, after all loads, because dx may be x
                    edge = tl.arange(0, 2 * GROUP)
                    column = tl.where(edge < GROUP, edge, length // GROUP * GROUP + edge - GROUP)
                    shared = tl.where(edge < GROUP, (shift > 0) & (edge >= shift), column < length)
                    scores = tl.load(from_x + column, mask=shared, other=0.0).to(tl.float32)
                    result = tl.exp(scores - maximum) * density
                    if SMOOTH:
                        result -= factor * spread
                    tl.store(to_dx + column, result.to(dx.dtype.element_ty), mask=shared)
                # Overwrite the target's element here, so that the loop over columns need not search for the target.
                tl.debug_barrier()
                power = tl.div_rn(tl.exp(picked - maximum), total_sum)
                valid = (label >= 0) & (label < columns)
                share = _class_weight(weight, label, valid, HAS_WEIGHT)
                result = _gradient(power, True, at_target, squared, factor * spread, whole, share, SMOOTH, Z)
                tl.store(result_row + label, result.to(dx.dtype.element_ty), mask=valid)


@triton.jit
def cross_entropy_gradient(
    dloss, x, target, weight, weight_sum, inverse, statistics, dx,  # dloss (M,) or (), x and dx (M, V)
    rows, units, x_stride, dloss_stride, ignored, kept, spread, z_loss,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, MEAN: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient dx for ROWS rows and COLUMNS columns, from the statistics that forward saved."""
    columns = units * UNIT
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = is_inside(row, rows, column, columns, False)
    loaded = tl.load(x + row[:, None] * (x_stride * UNIT) + column[None, :], mask=inside, other=0.0)
    label = tl.load(target + row, mask=row < rows, other=0)
    sums = tl.load(statistics + rows + row, mask=row < rows, other=1.0)
    factor = tl.load(dloss + row * dloss_stride, mask=row < rows, other=0.0).to(tl.float32)
    if MEAN:
        factor *= tl.load(inverse)
    # Nothing can be computed from the logits without the maximum. If it were loaded before this barrier, ptxas would
    # compute the first elements before it loads the others, to save registers. Odd rows, whose elements are loaded one
    # by one, would then take 2.7 times as long.
    tl.debug_barrier()
    maximum = tl.load(statistics + row, mask=row < rows, other=0.0)
    counted = (row < rows) & (label != ignored)
    row_weight = _weight_of_target(weight, label, counted, columns, HAS_WEIGHT)
    whole = _weight_sum(weight_sum, columns, HAS_WEIGHT)
    at_target, squared = _terms(factor, row_weight, maximum + tl.log(sums), kept, z_loss)
    power = tl.exp(loaded.to(tl.float32) - maximum[:, None]) * reciprocal(sums)[:, None]
    share = _class_weights(weight, column, columns, HAS_WEIGHT and SMOOTH)
    result = _gradient(
        power, column[None, :] == label[:, None], at_target[:, None], squared[:, None],
        (factor * spread)[:, None], whole, share[None, :], SMOOTH, Z,
    )  # fmt: skip
    result = tl.where(counted[:, None], result, 0.0)
    tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def inverse_of_target_weights(
    target, weight, inverse,  # shapes: (M,) int64, (V,), () float32
    rows, columns, ignored,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute 1 / (sum of the valid targets' weights), or 0 if no target is valid. One program adds the
    weights in a fixed order.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK).to(tl.int64)
        label = tl.load(target + row, mask=row < rows, other=0)
        valid = (row < rows) & (label != ignored) & (label >= 0) & (label < columns)
        total += _class_weight(weight, label, valid, HAS_WEIGHT)
    divisor = tl.sum(total, axis=0)
    none = divisor == 0.0
    tl.store(inverse, tl.where(none, 0.0, tl.div_rn(1.0, tl.where(none, 1.0, divisor))))


@triton.jit
def total_of_losses(losses, inverse, out, rows, HAS_INVERSE: tl.constexpr, BLOCK: tl.constexpr):  # (M,), (), ()
    """Compute the sum of losses times `inverse`. One program adds the losses in a fixed order, in float64."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + row, mask=row < rows, other=0.0).to(tl.float64)
    total = tl.sum(sums, axis=0)
    if HAS_INVERSE:
        total *= tl.load(inverse)
    tl.store(out, total.to(tl.float32).to(out.dtype.element_ty))


@triton.jit
def scale_unless_one(
    gradient, factor, result,  # shapes: (N,), (), (N,); result may be gradient
    elements,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute result = gradient * factor. With IN_PLACE, the kernel writes nothing if the factor is 1."""
    scale = tl.load(factor).to(tl.float32)
    if IN_PLACE:
        if scale != 1.0:
            _scale_blocks(gradient, scale, result, elements, BLOCK)
    else:
        _scale_blocks(gradient, scale, result, elements, BLOCK)


# ---- functions that several kernels share --------------------------------------------------------------------------


@triton.jit
def _in_groups(position, length, GROUP: tl.constexpr, SHIFTED: tl.constexpr):
    """Whether an element at `position` is inside a row that ends at `length`. With SHIFTED, the kernel loads aligned
    groups of GROUP elements, and the result is whether the element's group overlaps the row.
    """
    if SHIFTED:
        return position < (length + GROUP - 1) // GROUP * GROUP
    else:
        return position < length


@triton.jit
def _next_group(position, GROUP: tl.constexpr):
    """Round a position up to a multiple of GROUP, where a group of elements that are loaded together begins."""
    return (position + GROUP - 1) // GROUP * GROUP


@triton.jit
def _scale_blocks(gradient, scale, result, elements, BLOCK: tl.constexpr):
    """Write gradient * scale to `result`. Each of P programs processes every P-th block of BLOCK elements."""
    for block in tl.range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(gradient + index, mask=index < elements, other=0.0).to(tl.float32) * scale
        tl.store(result + index, values.to(result.dtype.element_ty), mask=index < elements)


@triton.jit
def _class_weight(weight, label, valid, HAS_WEIGHT: tl.constexpr):
    """The weight of the target's class; 0 if the class is not valid."""
    if HAS_WEIGHT:
        return tl.load(weight + label, mask=valid, other=0.0).to(tl.float32)
    else:
        return tl.where(valid, 1.0, 0.0)


@triton.jit
def _weight_of_target(weight, label, counted, columns, HAS_WEIGHT: tl.constexpr):
    """The weight of the target's class; 0 if the target is not counted, and NaN if it is counted but is not the index
    of a class.
    """
    valid = counted & (label >= 0) & (label < columns)
    return tl.where(counted & (valid == 0), float("nan"), _class_weight(weight, label, valid, HAS_WEIGHT))


@triton.jit
def _of_target(source, weight, label, counted, columns, HAS_WEIGHT: tl.constexpr):
    """Return (weight of the target's class, the row's logit for this class). `source` points to the row's logits."""
    valid = counted & (label >= 0) & (label < columns)
    picked = tl.load(source + label, mask=valid, other=0.0).to(tl.float32)
    return _weight_of_target(weight, label, counted, columns, HAS_WEIGHT), picked


@triton.jit
def _weight_sum(weight_sum, columns, HAS_WEIGHT: tl.constexpr):
    """The sum of all class weights."""
    if HAS_WEIGHT:
        return tl.load(weight_sum)
    else:
        return columns.to(tl.float32)


@triton.jit
def _class_weights(weight, column, columns, HAS_WEIGHT: tl.constexpr):
    """The weights of a block of classes."""
    if HAS_WEIGHT:
        return tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    else:
        return tl.full(column.shape, 1.0, tl.float32)


@triton.jit
def _terms(factor, row_weight, log_sum_exp, kept, z_loss):
    """Return the factors (a, b) of dx = a (p - [target]) + b p for probabilities p; b is the factor of the z-loss."""
    return factor * (row_weight * kept), factor * (2.0 * z_loss * row_weight * log_sum_exp)


@triton.jit
def _gradient(
    power, is_target, at_target, squared, spread, whole, share, SMOOTH: tl.constexpr, Z: tl.constexpr
):  # fmt: skip
    """Compute dx from the softmax probabilities `power`. Each term is computed separately, so that subtracting 1 from a
    probability near 1 is exact.
    """
    result = tl.where(is_target, power - 1.0, power) * at_target
    if SMOOTH:
        result += spread * (power * whole - share)
    if Z:
        result += power * squared
    return result
