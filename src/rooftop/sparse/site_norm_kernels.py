"""The Triton kernels of batch norm over sites. `site_norms.py` has the operators.

The rows are divided into parts of equal length, and each program sums one part. For each block of columns, one program
merges the parts, always in the same order. The result of a part is a count, a mean and a sum of squared deviations.
Merging as in Chan et al. 1983, "Algorithms for Computing the Sample Variance", avoids cancellation for large means.

Arithmetic uses the dtype of the statistics, which is float64 for float32 rows. A mean rounded to float32 would shift
all sites by the same amount. For values far from zero, that shift would exceed the rounding error of the rows
themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def site_moments(
    x, sites, means, squares, counts,  # shapes: (N, C), (N,) bool, (P, C), (P, C), (P,)
    rows, length,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program computes the count of the sites in one part of `length` rows, and for a block of columns the mean
    and the sum of squared deviations over these sites. `length` is a multiple of ROWS."""
    part, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wide: tl.constexpr = means.dtype.element_ty
    count = tl.zeros((), wide)
    mean = tl.zeros((COLUMNS,), wide)
    square = tl.zeros((COLUMNS,), wide)
    for start in range(0, length, ROWS):
        value, known = _tile(x, sites, part, start, length, rows, column, CHANNELS, ROWS, wide)
        here = tl.sum(known.to(wide))
        local = tl.sum(value, axis=0) / tl.maximum(here, 1.0)
        away = tl.where(known[:, None], value - local[None, :], 0.0)
        merged = count + here
        apart, share = local - mean, here / tl.maximum(merged, 1.0)
        mean += apart * share
        square += tl.sum(away * away, axis=0) + apart * apart * (count * share)
        count = merged
    place = part * CHANNELS + column
    tl.store(means + place, mean, mask=column < CHANNELS)
    tl.store(squares + place, square, mask=column < CHANNELS)
    tl.store(counts + part, count, mask=tl.program_id(1) == 0)


@triton.jit
def merge_moments(
    means, squares, counts, running_mean, running_var,  # shapes: (P, C), (P, C), (P,), (C,), (C,)
    mean_out, var_out, center, rate, count_out,  # shapes: (C,), (C,), (C,), (C,), (1,)
    parts, eps,
    CHANNELS: tl.constexpr, RUNNING: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of the parts into the mean and variance of all sites, for each column. Write `center` and
    `rate`, with which a row is normalized as (x - center) * rate. They come from this mean and variance or, with fewer
    than two sites, from the running statistics if these exist."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wide: tl.constexpr = means.dtype.element_ty
    count = tl.zeros((), wide)
    total = tl.zeros((COLUMNS,), wide)
    for start in range(0, parts, PARTS):
        here, mean, _ = _parts(means, squares, counts, start, parts, column, CHANNELS, PARTS)
        count += tl.sum(here)
        total += tl.sum(mean * here[:, None], axis=0)
    mean_of_all = total / tl.maximum(count, 1.0)
    square_of_all = tl.zeros((COLUMNS,), wide)
    for start in range(0, parts, PARTS):
        here, mean, square = _parts(means, squares, counts, start, parts, column, CHANNELS, PARTS)
        apart = mean - mean_of_all[None, :]
        square_of_all += tl.sum(square + apart * apart * here[:, None], axis=0)
    var = square_of_all / tl.maximum(count, 1.0)
    inside = column < CHANNELS
    tl.store(mean_out + column, mean_of_all, mask=inside)
    tl.store(var_out + column, var, mask=inside)
    tl.store(count_out, count, mask=tl.program_id(0) == 0)
    if RUNNING:
        few = count < 2.0
        mean_of_all = tl.where(few, tl.load(running_mean + column, mask=inside, other=0.0).to(wide), mean_of_all)
        var = tl.where(few, tl.load(running_var + column, mask=inside, other=1.0).to(wide), var)
    tl.store(center + column, mean_of_all, mask=inside)
    tl.store(rate + column, (1.0 / tl.sqrt((var + eps).to(tl.float64))).to(wide), mask=inside)


@triton.jit
def normalize_sites(
    x, sites, center, rate, weight, bias, y,  # shapes: (N, C), (N,), (C,), (C,), (C,), (C,), (N, C)
    rows,
    CHANNELS: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write (x - center) * rate * weight + bias for sites, and 0 for other rows."""
    wide: tl.constexpr = center.dtype.element_ty
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value, known = _tile(x, sites, tl.program_id(0), 0, ROWS, rows, column, CHANNELS, ROWS, wide)
    scale, inside = tl.load(rate + column, mask=column < CHANNELS, other=0.0), column < CHANNELS
    value = (value - tl.load(center + column, mask=inside, other=0.0)[None, :]) * scale[None, :]
    if AFFINE:
        value = value * tl.load(weight + column, mask=inside, other=0.0).to(wide)[None, :]
        value += tl.load(bias + column, mask=inside, other=0.0).to(wide)[None, :]
    _store(y, tl.where(known[:, None], value, 0.0), rows, column, CHANNELS, ROWS)


@triton.jit
def site_gradient_sums(
    dy, x, sites, center, rate, sums, products,  # shapes: (N, C), (N, C), (N,), (C,), (C,), (P, C), (P, C)
    rows, length,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program sums dy, and dy times the normalized x, over the sites in one part of `length` rows."""
    part, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    middle = tl.load(center + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(rate + column, mask=inside, other=0.0)[None, :]
    wide: tl.constexpr = center.dtype.element_ty
    plain = tl.zeros((COLUMNS,), wide)
    scaled = tl.zeros((COLUMNS,), wide)
    for start in range(0, length, ROWS):
        value, known = _tile(x, sites, part, start, length, rows, column, CHANNELS, ROWS, wide)
        slope, _ = _tile(dy, sites, part, start, length, rows, column, CHANNELS, ROWS, wide)
        plain += tl.sum(slope, axis=0)
        scaled += tl.sum(tl.where(known[:, None], slope * (value - middle) * scale, 0.0), axis=0)
    place = part * CHANNELS + column
    tl.store(sums + place, plain, mask=inside)
    tl.store(products + place, scaled, mask=inside)


@triton.jit
def site_gradient(
    dy, x, sites, center, rate, weight, dbias, dweight, count, dx,  # (N, C) twice, (N,), (C,) 5 times, (1,), (N, C)
    rows,
    CHANNELS: tl.constexpr, AFFINE: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dx, the gradient of x, for rows that are sites, and 0 for all other rows."""
    wide: tl.constexpr = center.dtype.element_ty
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    value, known = _tile(x, sites, tl.program_id(0), 0, ROWS, rows, column, CHANNELS, ROWS, wide)
    slope, _ = _tile(dy, sites, tl.program_id(0), 0, ROWS, rows, column, CHANNELS, ROWS, wide)
    scale = tl.load(rate + column, mask=inside, other=0.0)
    normal = (value - tl.load(center + column, mask=inside, other=0.0)[None, :]) * scale[None, :]
    sites_in_all = tl.load(count)
    of_mean = tl.load(dbias + column, mask=inside, other=0.0) / tl.maximum(sites_in_all, 1.0)
    of_var = tl.load(dweight + column, mask=inside, other=0.0) / tl.maximum(sites_in_all, 1.0)
    through = of_mean[None, :] + normal * of_var[None, :]
    if RUNNING:
        through = tl.where(sites_in_all < 2.0, 0.0, through)  # running statistics do not depend on x
    if AFFINE:
        scale = scale * tl.load(weight + column, mask=inside, other=0.0).to(wide)
    _store(dx, tl.where(known[:, None], (slope - through) * scale[None, :], 0.0), rows, column, CHANNELS, ROWS)


# ---- helpers ---------------------------------------------------------------------------------------------------


@triton.jit
def _tile(
    x, sites, part, start, length, rows, column, CHANNELS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load (ROWS, COLUMNS) values in the dtype of the statistics, with 0 for rows that are not sites. Also returns
    which rows are sites."""
    row = part.to(tl.int64) * length + start + tl.arange(0, ROWS)
    known = tl.load(sites + row, mask=row < rows, other=0) != 0
    place = row[:, None] * CHANNELS + column[None, :]
    value = tl.load(x + place, mask=known[:, None] & (column < CHANNELS)[None, :], other=0.0)
    return value.to(DTYPE), known


@triton.jit
def _store(y, value, rows, column, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * CHANNELS + column[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (column < CHANNELS)[None, :])


@triton.jit
def _parts(means, squares, counts, start, parts, column, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """Load the statistics of PARTS consecutive parts of the rows, from part `start` on: number of sites (PARTS,), mean
    and sum of squared deviations (PARTS, COLUMNS). The statistics of parts that do not exist are 0.
    """
    part = start + tl.arange(0, PARTS)
    place = part[:, None] * CHANNELS + column[None, :]
    wanted = (part < parts)[:, None] & (column < CHANNELS)[None, :]
    count = tl.load(counts + part, mask=part < parts, other=0.0)
    return count, tl.load(means + place, mask=wanted, other=0.0), tl.load(squares + place, mask=wanted, other=0.0)
