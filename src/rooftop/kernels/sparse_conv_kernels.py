"""Triton kernels of sparse convolution; `sparse_convs.py` has the operator and says how they work.

A neighbour table has a row for each result and a column for each tap of the window (an offset): the site that lies
there, or -1. Sites that the features do not have are read as none. WIDE: some offset needs 64 bits.

`sparse_conv_rows` is a product of matrices of which one is never stored: its rows are results, its columns channels of
the result, and K runs over the taps and, within a tap, over the channels. Which taps a tile of rows has at all is a
number, one bit for each: the loop takes its lowest bit, and clears it when the tap's channels are done. So the loop has
no branch, and the loads of later steps are on their way while a step is multiplied.

`sparse_conv_weight_gradient` reduces over pairs of a site and a result, tap by tap. `count_pairs` and `list_pairs` make
the lists of pairs; where a pair stands follows from the table alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.matmul_kernels import plus_product


@triton.jit
def sparse_conv_rows(
    features, weight, bias, neighbours, order, out,  # (N, C), (O, T, C), (O,), (M, T), (M,), (M, O)
    sites, rows,  # N, M
    HAS_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, MIRRORED: tl.constexpr, WIDE: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    TAP_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,  # of the weight
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[m] = bias + sum over taps t of weight[:, t] features[neighbours[m, t]].

    MIRRORED: of the weight the taps are taken from the last to the first. WIDTH: taps that are looked at together.
    """
    column_tiles: tl.constexpr = (OUT_CHANNELS + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = (CHANNELS + DEPTH - 1) // DEPTH
    position = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    real = position < rows
    row = position
    if HAS_ORDER:
        row = tl.load(order + position, mask=real, other=-1).to(tl.int32)
        real = (row >= 0) & (row < rows)
    out_offset = column * OUT_STRIDE
    if WIDE:
        row = row.to(tl.int64)
        out_offset = column.to(tl.int64) * OUT_STRIDE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first_tap in range(0, TAPS, WIDTH):
        present = tl.max(_known(neighbours, row, real, first_tap, sites, TAPS, WIDTH).to(tl.int64), axis=0)  # (WIDTH,)
        bits = tl.sum(present << tl.arange(0, WIDTH), axis=0)
        steps = tl.sum(present, axis=0).to(tl.int32) * blocks
        for step in range(steps):
            # The exponent of a power of two as a float is which bit it is.
            tap = first_tap + ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            site = tl.load(neighbours + row * TAPS + tap, mask=real, other=-1)
            known = (site >= 0) & (site < sites)
            if WIDE:
                site = site.to(tl.int64)
            block = step % blocks
            channel = block * DEPTH + tl.arange(0, DEPTH)
            if WIDE:
                channel = channel.to(tl.int64)
            taken = TAPS - 1 - tap if MIRRORED else tap
            left_mask, right_mask = known[:, None], (column < OUT_CHANNELS)[None, :]
            if CHANNELS % DEPTH != 0:
                left_mask = left_mask & (channel < CHANNELS)[None, :]
                right_mask = right_mask & (channel < CHANNELS)[:, None]
            left = tl.load(features + (site[:, None] * CHANNELS + channel[None, :]), mask=left_mask, other=0.0)
            place = taken * TAP_STRIDE + channel[:, None] * CHANNEL_STRIDE + out_offset[None, :]
            right = tl.load(weight + place, mask=right_mask, other=0.0)
            total = plus_product(left, right, total, PRECISION, WIDEN)
            bits = tl.where(block == blocks - 1, bits & (bits - 1), bits)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < OUT_CHANNELS, other=0.0).to(tl.float32)[None, :]
    target = out + (row[:, None] * OUT_CHANNELS + column[None, :])
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (column < OUT_CHANNELS)[None, :])


@triton.jit
def sparse_conv_weight_gradient(
    features, gradient, pairs, counts, sums,  # (N, C), (M, O), (2, T, capacity), (T,), (splits, O, T, C)
    sites, rows, capacity, splits,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The sum of gradient[m] features[n]^T over one of `splits` equal parts of a tap's pairs (n, m)."""
    tap, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    in_tiles: tl.constexpr = (CHANNELS + INS - 1) // INS
    to = tl.program_id(1) // in_tiles * OUTS + tl.arange(0, OUTS)
    channel = tl.program_id(1) % in_tiles * INS + tl.arange(0, INS)
    count = tl.load(counts + tap)
    share = tl.cdiv(count, splits)
    first = part * share
    last = tl.minimum(first + share, count)
    if WIDE:
        tap, part = tap.to(tl.int64), part.to(tl.int64)
    total = tl.zeros((OUTS, INS), tl.float32)
    for start in range(first, last, DEPTH):
        pair = start + tl.arange(0, DEPTH)
        site = tl.load(pairs + (tap * capacity + pair), mask=pair < last, other=-1)
        row = tl.load(pairs + ((tap + TAPS) * capacity + pair), mask=pair < last, other=-1)
        known = (site >= 0) & (site < sites) & (row >= 0) & (row < rows)
        if WIDE:
            site, row = site.to(tl.int64), row.to(tl.int64)
        left = tl.load(
            gradient + (row[:, None] * OUT_CHANNELS + to[None, :]),
            mask=known[:, None] & (to < OUT_CHANNELS)[None, :],
            other=0.0,
        )
        right = tl.load(
            features + (site[:, None] * CHANNELS + channel[None, :]),
            mask=known[:, None] & (channel < CHANNELS)[None, :],
            other=0.0,
        )
        total = plus_product(tl.trans(left), right, total, PRECISION, WIDEN)
    target = ((part * OUT_CHANNELS + to[:, None]) * TAPS + tap) * CHANNELS + channel[None, :]
    inside = (to < OUT_CHANNELS)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(sums + target, total.to(sums.dtype.element_ty), mask=inside)


@triton.jit
def neighbour_bits(
    neighbours, masks,  # (M, T), (M, words) int32
    rows,
    TAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bit t % 32 of word t // 32 says whether a row has a neighbour at tap t."""
    WORDS: tl.constexpr = (TAPS + 31) // 32
    row = _rows(ROWS, WIDE)
    for word in range(WORDS):
        # 2^31 - 1, the most rows that there are: every neighbour is known
        known = _known(neighbours, row, row < rows, word * 32, 2147483647, TAPS, 32)
        bits = tl.sum(known.to(tl.int64) << tl.arange(0, 32)[None, :], axis=1)
        tl.store(masks + row * WORDS + word, bits.to(tl.int32), mask=row < rows)


@triton.jit
def count_pairs(
    neighbours, counts,  # (M, T), (programs, T)
    sites, rows,
    TAPS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How many neighbours ROWS rows have at each tap."""
    row = _rows(ROWS, WIDE)
    for first_tap in range(0, TAPS, WIDTH):
        tap = first_tap + tl.arange(0, WIDTH)
        known = _known(neighbours, row, row < rows, first_tap, sites, TAPS, WIDTH)
        count = tl.sum(known.to(tl.int32), axis=0)
        tl.store(counts + tl.program_id(0) * TAPS + tap, count, mask=tap < TAPS)


@triton.jit
def list_pairs(
    neighbours, starts, pairs,  # (M, T), (programs, T): pairs of a tap before these rows, (2, T, capacity)
    sites, rows, capacity,
    TAPS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sites, then rows, of the pairs of each tap, in the order of rows."""
    row = _rows(ROWS, WIDE)
    for first_tap in range(0, TAPS, WIDTH):
        tap = first_tap + tl.arange(0, WIDTH)
        known = _known(neighbours, row, row < rows, first_tap, sites, TAPS, WIDTH)  # (ROWS, WIDTH)
        site = tl.load(neighbours + (row[:, None] * TAPS + tap[None, :]), mask=known, other=-1)
        start = tl.load(starts + tl.program_id(0) * TAPS + tap, mask=tap < TAPS, other=0)
        place = start[None, :] + tl.cumsum(known.to(tl.int32), axis=0) - 1
        first = tap[None, :] * capacity
        second = (tap[None, :] + TAPS) * capacity
        if WIDE:
            first = tap[None, :].to(tl.int64) * capacity
            second = (tap[None, :] + TAPS).to(tl.int64) * capacity
        kept = known & (place < capacity)
        tl.store(pairs + (first + place), site, mask=kept)
        tl.store(pairs + (second + place), row[:, None].to(tl.int32) + tl.zeros_like(site), mask=kept)


# ---- pieces ------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The rows of a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    return row


@triton.jit
def _known(neighbours, row, real, first_tap, sites, TAPS: tl.constexpr, WIDTH: tl.constexpr):
    """Which of WIDTH taps of each row have a site, (ROWS, WIDTH)."""
    tap = first_tap + tl.arange(0, WIDTH)
    inside = real[:, None] & (tap < TAPS)[None, :]
    site = tl.load(neighbours + (row[:, None] * TAPS + tap[None, :]), mask=inside, other=-1)
    return (site >= 0) & (site < sites)
