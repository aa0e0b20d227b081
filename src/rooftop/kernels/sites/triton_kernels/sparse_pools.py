"""Triton kernels of pooling over sites; `../sparse_pools.py` and `../sparse_global_pools.py` have the operators and
explain the kernels.

`triton_kernels/sparse_convs.py` describes the table of neighbours. Out-of-range sites and results count as absent.
WIDE: some offset needs 64 bits. AHEAD: number of taps of a row that are loaded at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sparse_pool_rows(
    features, neighbours, out, counts,  # shapes: (N, C), (M, T), (M, C), (M,)
    sites, rows,  # N, M
    AVERAGE: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute the maximum or (with AVERAGE) the mean of each row's neighbours; 0 for rows without neighbours. With
    AVERAGE, also store the number of neighbours.
    """
    row, column = _tile(CHANNELS, ROWS, COLUMNS, WIDE)
    real, inside = row < rows, column < CHANNELS
    lowest: tl.constexpr = 0.0 if AVERAGE else float("-inf")
    total = tl.full((ROWS, COLUMNS), lowest, tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for first in range(0, TAPS, AHEAD):
        values = ()
        for step in tl.static_range(AHEAD):
            tap = first + step
            site = tl.load(neighbours + (row * TAPS + tap), mask=real & (tap < TAPS), other=-1)
            known = (site >= 0) & (site < sites)
            if WIDE:
                site = site.to(tl.int64)
            place = features + (site[:, None] * CHANNELS + column[None, :])
            values = values + (tl.load(place, mask=known[:, None] & inside[None, :], other=lowest),)
            count += known.to(tl.int32)
        for step in tl.static_range(AHEAD):
            value = values[step].to(tl.float32)
            if AVERAGE:
                total += value
            else:
                total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    if AVERAGE:
        total = total / tl.maximum(count, 1).to(tl.float32)[:, None]
        tl.store(counts + row, count, mask=real)  # all tiles of columns store the same value
    total = tl.where((count > 0)[:, None], total, 0.0)
    target = out + (row[:, None] * CHANNELS + column[None, :])
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def sparse_pool_gradient(
    dy, y, features, counts, table, dfeatures,  # dy, y (M, C); features, dfeatures (N, C); counts (M,); table (N, T)
    sites, rows,  # N, M
    AVERAGE: tl.constexpr, MIRRORED: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of each site. For a mean, sum dy / count over the results that contain the site. For a
    maximum, sum dy over the results whose maximum the site equals.

    MIRRORED: `table` is the forward table, which the kernel reads with its taps in reverse order.
    """
    site, column = _tile(CHANNELS, ROWS, COLUMNS, WIDE)
    real, inside = site < sites, column < CHANNELS
    here = site[:, None] * CHANNELS + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if not AVERAGE:
        x = tl.load(features + here, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for first in range(0, TAPS, AHEAD):
        slopes, others = (), ()
        for step in tl.static_range(AHEAD):
            tap = first + step
            taken = TAPS - 1 - tap if MIRRORED else tap
            row = tl.load(table + (site * TAPS + taken), mask=real & (tap < TAPS), other=-1)
            known = (row >= 0) & (row < rows)
            if WIDE:
                row = row.to(tl.int64)
            there, there_is = row[:, None] * CHANNELS + column[None, :], known[:, None] & inside[None, :]
            slopes = slopes + (tl.load(dy + there, mask=there_is, other=0.0),)
            if AVERAGE:
                others = others + (tl.load(counts + row, mask=known, other=1),)
            else:
                others = others + (tl.load(y + there, mask=there_is, other=0.0),)
        for step in tl.static_range(AHEAD):
            slope = slopes[step].to(tl.float32)
            if AVERAGE:
                # a count is 0 only if the tables do not match
                total += slope / tl.maximum(others[step], 1).to(tl.float32)[:, None]
            else:
                best = others[step].to(tl.float32)
                total += tl.where((x == best) | ((x != x) & (best != best)), slope, 0.0)  # NaN equals a maximum of NaN
    tl.store(dfeatures + here, total.to(dfeatures.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def sparse_global_pool_parts(
    features, batch, parts, part_counts,  # shapes: (N, C), (N,), (programs, B, C) float32, (programs, B) int32
    sites, batch_size, share,  # N, B, rows of a program
    AVERAGE: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program reduces `share` rows: for each batch element, it computes the maxima or sums over those of its rows
    that belong to the batch element, and their number. The program writes nothing for batch elements outside the range
    of batch elements of its rows.
    """
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    begin = part.to(tl.int64) * share
    end = tl.minimum(begin + share, sites)
    lowest, highest = batch_size, -1
    for start in range(begin, end, ROWS):
        _, element, known = _elements(batch, start, end, batch_size, ROWS)
        lowest = tl.minimum(lowest, tl.min(tl.where(known, element, batch_size), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(known, element, -1), axis=0))
    nothing: tl.constexpr = 0.0 if AVERAGE else float("-inf")
    for each in range(lowest, highest + 1):
        total = tl.full((ROWS, COLUMNS), nothing, tl.float32)
        count = tl.zeros((ROWS,), tl.int32)
        for start in range(begin, end, ROWS):
            row, element, known = _elements(batch, start, end, batch_size, ROWS)
            mine = known & (element == each)
            place = row[:, None] * CHANNELS + column[None, :]
            if not WIDE:
                place = place.to(tl.int32)
            value = tl.load(features + place, mask=mine[:, None] & inside[None, :], other=nothing).to(tl.float32)
            if AVERAGE:
                total += value
            else:
                total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
            count += mine.to(tl.int32)
        at = part.to(tl.int64) * batch_size + each
        if AVERAGE:
            found = tl.sum(total, axis=0)
        else:
            found = tl.max(total, axis=0)
            missing = tl.max((total != total).to(tl.int32), axis=0)  # tl.max ignores NaN
            found = tl.where(missing != 0, float("nan"), found)
        tl.store(parts + (at * CHANNELS + column), found, mask=inside)
        tl.store(part_counts + at, tl.sum(count, axis=0))  # all tiles of columns store the same value


# ---- functions that several kernels share ------------------------------------------------------------------------


@triton.jit
def _tile(CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The row indices (ROWS,) and column indices (COLUMNS,) of a program's tile."""
    column_tiles: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    first = program // column_tiles
    if WIDE:
        first = first.to(tl.int64)
    return first * ROWS + tl.arange(0, ROWS), program % column_tiles * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _elements(batch, start, end, batch_size, ROWS: tl.constexpr):
    """Return the rows, the rows' batch elements as int32, and the mask of the valid batch elements."""
    row = start + tl.arange(0, ROWS)
    element = tl.load(batch + row, mask=row < end, other=-1)
    return row, element.to(tl.int32), (element >= 0) & (element < batch_size)
