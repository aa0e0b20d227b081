"""Triton kernels of sparse convolution; `../sparse_convs.py` has the operator and explains the kernels.

A neighbour table has a row for each result and a column for each tap of the window. An element is the site at that tap,
or -1. Out-of-range sites count as -1. WIDE: some memory offset needs 64 bits.

`sparse_conv_rows` is a product of two matrices; the first matrix is never stored. The rows of the product are results,
and its columns are channels of the result. K runs over the taps and, within a tap, over the channels. A bit mask
contains the taps of a tile of rows. The loop reads the lowest set bit, and clears this bit after the tap's last
channels. So the loop has no branch, and the loads of later steps run while a step is multiplied.

`sparse_conv_weight_gradient` sums over pairs of a site and a result. Each program sums one piece of the pairs of one
tap. `sum_pieces` adds the sums of the pieces. In a sorted table the pairs of a tap are close together, and `block_bits`
and `list_blocks` list the blocks of rows that contain a tap. For unsorted tables `count_pairs`, `start_pairs` and
`list_pairs` list the pairs themselves; the position of a pair in its list depends only on the table. Without lists,
`sparse_conv_weight_gradient` reads all rows.

`neighbour_bits`, `count_bits` and `mask_keys` compute the keys by which rows are sorted; `sort_table` writes the sorted
table. Kernels read tables along the taps and write lists along the rows, because tables are contiguous along taps, and
lists along rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.products import plus_product


@triton.jit
def sparse_conv_rows(
    features, weight, bias, neighbours,  # shapes: (N, C), (O, T, C), (O,), (M, T)
    order, out,  # order (M,), or if SORTED, the sorted table (1 + words + T, M) of `sort_table`; out (M, O)
    sites, rows,  # N, M
    HAS_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, SORTED: tl.constexpr, MIRRORED: tl.constexpr, WIDE: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    TAP_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,  # weight's
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute out[m] = bias + sum over taps t of weight[:, t] features[neighbours[m, t]].

    MIRRORED: the taps of the weight are in reverse order. WIDTH: for this number of taps at a time, the kernel finds
    out which taps any row of the tile has.
    """
    WORDS: tl.constexpr = (TAPS + 31) // 32
    column_tiles: tl.constexpr = (OUT_CHANNELS + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = (CHANNELS + DEPTH - 1) // DEPTH
    position = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    real = position < rows
    inside = real
    row = position
    if HAS_ORDER:
        row = tl.load(order + position, mask=real, other=-1).to(tl.int32)
        real = (row >= 0) & (row < rows)
    out_offset = column * OUT_STRIDE
    if WIDE:
        row, position = row.to(tl.int64), position.to(tl.int64)
        out_offset = column.to(tl.int64) * OUT_STRIDE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first_tap in range(0, TAPS, WIDTH):
        if SORTED:
            mask = tl.load(order + (_line(1 + first_tap // 32, rows, WIDE) + position), mask=inside, other=0)
            set_bits = (mask[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1
            present = tl.max(set_bits, axis=0).to(tl.int64)  # (WIDTH,)
        else:
            present = tl.max(_known(neighbours, row, real, first_tap, sites, TAPS, WIDTH).to(tl.int64), axis=0)
        bits = tl.sum(present << tl.arange(0, WIDTH), axis=0)
        steps = tl.sum(present, axis=0).to(tl.int32) * blocks
        for step in range(steps):
            # bits & -bits is the lowest set bit. As a float, this number has the bit's index + 127 as exponent.
            tap = first_tap + ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            if SORTED:
                site = tl.load(order + (_line(1 + WORDS + tap, rows, WIDE) + position), mask=inside, other=-1)
            else:
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
            total = _plus(left, right, total, PRECISION, WIDEN, BY_BLOCK)
            bits = tl.where(block == blocks - 1, bits & (bits - 1), bits)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < OUT_CHANNELS, other=0.0).to(tl.float32)[None, :]
    target = out + (row[:, None] * OUT_CHANNELS + column[None, :])
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (column < OUT_CHANNELS)[None, :])


@triton.jit
def sparse_conv_weight_gradient(
    features, gradient, table, lists, counts,  # (N, C); (M, O); (M, T), `sort_table`'s if BLOCK; see LISTED; (T,)
    sums,  # (pieces, O, C)
    sites, rows, capacity, parts,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, TAPS: tl.constexpr, LANES: tl.constexpr,
    CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, BY_BLOCK: tl.constexpr,
    OUTS: tl.constexpr, INS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum gradient[m] features[n]^T over one piece of a tap's pairs (n, m).

    If LISTED, `lists` contains the pairs of each tap (2, T, capacity). With BLOCK, `lists` instead contains the blocks
    (T, capacity) of BLOCK rows of the sorted table. `_pieces` cuts the lists of all taps into at most `parts` + T
    pieces in total. Without LISTED, the rows of the table are cut into `parts` pieces for each tap. WHOLE: there is one
    part, and `sums` is (O, T, C).
    """
    WORDS: tl.constexpr = (TAPS + 31) // 32
    piece = tl.program_id(0)
    in_tiles: tl.constexpr = (CHANNELS + INS - 1) // INS
    to = tl.program_id(1) // in_tiles * OUTS + tl.arange(0, OUTS)
    channel = tl.program_id(1) % in_tiles * INS + tl.arange(0, INS)
    if LISTED:
        count, length, begin, end = _pieces(counts, capacity, parts, TAPS, LANES, DEPTH, BLOCK)
        tap = tl.sum((end <= piece).to(tl.int32), axis=0)  # LANES if no tap has this piece
        here = tl.arange(0, LANES) == tap
        first = (piece - tl.sum(tl.where(here, begin, 0), axis=0)) * length
        last = tl.minimum(first + length, tl.sum(tl.where(here, count, 0), axis=0))
    else:
        tap = piece // parts
        length = tl.cdiv(rows, parts)
        first = piece % parts * length
        last = tl.minimum(first + length, rows)
    real_tap = tap < TAPS
    if WIDE:
        tap, piece = tap.to(tl.int64), piece.to(tl.int64)
    total = tl.zeros((OUTS, INS), tl.float32)
    for start in range(first, last, DEPTH):
        pair = start + tl.arange(0, DEPTH)
        if BLOCK > 0:
            position = tl.load(lists + (tap * capacity + start // BLOCK)) * BLOCK + start % BLOCK + tl.arange(0, DEPTH)
            inside = (position >= 0) & (position < rows)
            row = tl.load(table + position, mask=inside, other=-1)
            site = tl.load(table + (_line(1 + WORDS + tap, rows, WIDE) + position), mask=inside, other=-1)
        elif LISTED:
            site = tl.load(lists + (tap * capacity + pair), mask=pair < last, other=-1)
            row = tl.load(lists + ((tap + TAPS) * capacity + pair), mask=pair < last, other=-1)
        else:
            row = pair
            if WIDE:
                row = row.to(tl.int64)
            site = tl.load(table + (row * TAPS + tap), mask=pair < last, other=-1)
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
        total = _plus(tl.trans(left), right, total, PRECISION, WIDEN, BY_BLOCK)
    if WHOLE:
        target = (to[:, None] * TAPS + tap) * CHANNELS + channel[None, :]
    else:
        target = (piece * OUT_CHANNELS + to[:, None]) * CHANNELS + channel[None, :]
    written = (to < OUT_CHANNELS)[:, None] & (channel < CHANNELS)[None, :] & real_tap
    tl.store(sums + target, total.to(sums.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["capacity"])
def sum_pieces(
    sums, counts, out,  # (pieces, O, C), (T,), (O, T, C)
    capacity, parts,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, LANES: tl.constexpr,
    CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    PIECES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Compute the weight's gradient `out` from the sums over pieces of each tap's pairs
    (`sparse_conv_weight_gradient`). Each program adds the sums of one tap in a fixed order; the result is 0 if the tap
    has no pairs.
    """
    size: tl.constexpr = OUT_CHANNELS * CHANNELS
    tap = tl.program_id(0)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    if LISTED:
        _, _, begin, end = _pieces(counts, capacity, parts, TAPS, LANES, DEPTH, BLOCK)
        here = tl.arange(0, LANES) == tap
        first, last = tl.sum(tl.where(here, begin, 0), axis=0), tl.sum(tl.where(here, end, 0), axis=0)
    else:
        first, last = tap * parts, tap * parts + parts
    total = tl.zeros((ELEMENTS,), tl.float32)
    for start in range(first, last, PIECES):
        piece = start + tl.arange(0, PIECES)
        inside = (piece < last)[:, None] & (element < size)[None, :]
        if WIDE:
            piece = piece.to(tl.int64)
        total += tl.sum(tl.load(sums + (piece[:, None] * size + element[None, :]), mask=inside, other=0.0), axis=0)
    target = (element // CHANNELS * TAPS + tap) * CHANNELS + element % CHANNELS
    tl.store(out + target, total.to(out.dtype.element_ty), mask=element < size)


# ---- orders of rows ----------------------------------------------------------------------------------------------


@triton.jit
def neighbour_bits(
    neighbours, masks,  # shapes: (M, T), (M, words) int32
    rows,
    TAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Set bit t % 32 of word t // 32 of a row's mask if the row has a neighbour at tap t."""
    WORDS: tl.constexpr = (TAPS + 31) // 32
    row = _rows(ROWS, WIDE)
    for word in range(WORDS):
        # 2^31 - 1 as the number of sites, so that every index >= 0 counts as a neighbour
        known = _known(neighbours, row, row < rows, word * 32, 2147483647, TAPS, 32)
        bits = tl.sum(known.to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :], axis=1)
        tl.store(masks + row * WORDS + word, bits.to(tl.int32, bitcast=True), mask=row < rows)


@triton.jit
def count_bits(
    masks, counts,  # shapes: (M, words), (32 * words,)
    rows,
    WORDS: tl.constexpr, SAMPLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each of the 32 bits of one word of the masks, count how many of SAMPLE evenly spaced rows have this bit set.
    Each program counts for one word.
    """
    word, bit = tl.program_id(0), tl.arange(0, 32)
    count = tl.zeros((32,), tl.int32)
    for start in range(0, SAMPLE, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64) * rows // SAMPLE
        count += tl.sum((tl.load(masks + row * WORDS + word)[:, None] >> bit[None, :]) & 1, axis=0)
    tl.store(counts + word * 32 + bit, count)


@triton.jit
def mask_keys(
    masks, counts, keys,  # shapes: (M, words), (32 * words,), (M,); keys are int32 if WORDS is 1, else int64
    rows,
    WORDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the position of each mask in a Gray code. In the Gray code, the rarest bit of the masks changes most
    rarely. Masks that are neighbours in this order differ in few bits.

    If masks have more than 64 bits, only the 64 rarest bits are used.
    """
    KEY_BITS: tl.constexpr = 32 if WORDS == 1 else 64
    row = _rows(ROWS, WIDE)
    code = tl.zeros((ROWS,), tl.uint32 if WORDS == 1 else tl.uint64)
    for word in range(WORDS):
        bit = word * 32 + tl.arange(0, 32)
        count = tl.load(counts + bit)
        rarer = tl.zeros((32,), tl.int32)
        for other_word in range(WORDS):
            other = other_word * 32 + tl.arange(0, 32)
            other_count = tl.load(counts + other)
            less = other_count[None, :] < count[:, None]
            tie = (other_count[None, :] == count[:, None]) & (other[None, :] < bit[:, None])
            rarer += tl.sum((less | tie).to(tl.int32), axis=1)
        mask = tl.load(masks + row * WORDS + word, mask=row < rows, other=0)
        is_set = ((mask[None, :] >> tl.arange(0, 32)[:, None]) & 1) != 0  # (32, ROWS)
        place = tl.maximum(KEY_BITS - 1 - rarer, 0).to(code.dtype)[:, None]
        code += tl.sum((is_set & (rarer < KEY_BITS)[:, None]).to(code.dtype) << place, axis=0)
    code ^= code >> 1  # each bit becomes the parity of itself and all higher bits
    code ^= code >> 2
    code ^= code >> 4
    code ^= code >> 8
    code ^= code >> 16
    if WORDS > 1:
        code ^= code >> 32
    kind = keys.dtype.element_ty
    # the highest bit is flipped, so that the signed keys sort like the unsigned codes
    key = code.to(kind, bitcast=True) ^ (tl.full((), 1, kind) << (KEY_BITS - 1))
    tl.store(keys + row, key, mask=row < rows)


@triton.jit
def sort_table(
    neighbours, order, table,  # shapes: (M, T), (M,), (1 + words + T, M)
    rows,
    TAPS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a sorted table: the order, the bits of each row, and the sites by tap, with the rows in that order."""
    WORDS: tl.constexpr = (TAPS + 31) // 32
    position = _rows(ROWS, WIDE)
    inside = position < rows
    row = tl.load(order + position, mask=inside, other=0)
    tl.store(table + position, row.to(tl.int32), mask=inside)
    row = row.to(tl.int64 if WIDE else tl.int32)
    for first_tap in range(0, TAPS, WIDTH):
        tap = first_tap + tl.arange(0, WIDTH)
        wanted = (tap < TAPS)[:, None] & inside[None, :]  # (WIDTH, ROWS)
        site = tl.load(neighbours + (row[None, :] * TAPS + tap[:, None]), mask=wanted, other=-1)
        bits = tl.sum((site >= 0).to(tl.int64) << tl.arange(0, WIDTH)[:, None], axis=0)
        tl.store(table + (_line(1 + first_tap // 32, rows, WIDE) + position), bits.to(tl.int32), mask=inside)
        tl.store(table + (_line(1 + WORDS + tap, rows, WIDE)[:, None] + position[None, :]), site, mask=wanted)


# ---- lists of blocks ---------------------------------------------------------------------------------------------


@triton.jit
def block_bits(
    table, bits,  # the result of `sort_table`; (words, blocks)
    rows, blocks,
    TAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For a block of BLOCK rows of a sorted table, set bit t % 32 of word t // 32 if any of these rows has a site at
    tap t.
    """
    WORDS: tl.constexpr = (TAPS + 31) // 32
    block = tl.program_id(0)
    position = block * BLOCK + tl.arange(0, BLOCK)
    for word in range(WORDS):
        mask = tl.load(table + (_line(1 + word, rows, WIDE) + position), mask=position < rows, other=0)
        set_bits = (mask[:, None] >> tl.arange(0, 32)[None, :]) & 1  # (BLOCK, 32)
        found = tl.sum(tl.max(set_bits, axis=0).to(tl.int64) << tl.arange(0, 32), axis=0)
        tl.store(bits + (word * blocks + block), found.to(tl.int32))


@triton.jit
def list_blocks(
    bits, lists, counts,  # (words, blocks), (T, blocks), (T,)
    blocks,
    SCANNED: tl.constexpr,
):  # fmt: skip
    """For each tap, list in ascending order the blocks that have the tap, and count these blocks."""
    tap = tl.program_id(0)
    before = tl.zeros((), tl.int32)
    for first in range(0, blocks, SCANNED):
        block = first + tl.arange(0, SCANNED)
        word = tl.load(bits + (tap // 32 * blocks + block), mask=block < blocks, other=0)
        has = (word >> tap % 32) & 1
        place = before + tl.cumsum(has, axis=0) - 1
        tl.store(lists + (tap.to(tl.int64) * blocks + place), block, mask=has == 1)
        before += tl.sum(has, axis=0)
    tl.store(counts + tap, before)


# ---- lists of pairs ----------------------------------------------------------------------------------------------


@triton.jit
def count_pairs(
    neighbours, counts,  # shapes: (M, T), (T, programs)
    sites, rows,
    TAPS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Count the neighbours of ROWS rows at each tap."""
    row = _rows(ROWS, WIDE)
    programs = tl.num_programs(0)
    for first_tap in range(0, TAPS, WIDTH):
        tap = first_tap + tl.arange(0, WIDTH)
        known = _known(neighbours, row, row < rows, first_tap, sites, TAPS, WIDTH)
        count = tl.sum(known.to(tl.int32), axis=0)
        tl.store(counts + (_line(tap, programs, True) + tl.program_id(0)), count, mask=tap < TAPS)


@triton.jit
def start_pairs(
    counts, starts, totals,  # shapes: (T, blocks), (T, blocks), (T,)
    blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """For each tap, compute the number of pairs that precede each block of rows, and the total number of pairs.
    `counts`: the number of pairs of each tap in each block.
    """
    tap = tl.program_id(0)
    line = _line(tap, blocks, True)
    before = tl.zeros((), tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        count = tl.load(counts + (line + block), mask=block < blocks, other=0)
        tl.store(starts + (line + block), before + tl.cumsum(count, axis=0) - count, mask=block < blocks)
        before += tl.sum(count, axis=0)
    tl.store(totals + tap, before)


@triton.jit
def list_pairs(
    neighbours, starts, pairs,  # shapes: (M, T), (T, programs), (2, T, capacity)
    sites, rows, capacity,
    TAPS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """List for each tap the sites and the rows of its pairs, in ascending order of rows."""
    row = _rows(ROWS, WIDE)
    programs = tl.num_programs(0)
    for first_tap in range(0, TAPS, WIDTH):
        tap = first_tap + tl.arange(0, WIDTH)
        wanted = (tap < TAPS)[:, None] & (row < rows)[None, :]  # (WIDTH, ROWS)
        site = tl.load(neighbours + (row[None, :] * TAPS + tap[:, None]), mask=wanted, other=-1)
        known = (site >= 0) & (site < sites)
        start = tl.load(starts + (_line(tap, programs, True) + tl.program_id(0)), mask=tap < TAPS, other=0)
        place = start[:, None] + tl.cumsum(known.to(tl.int32), axis=1) - 1
        kept = known & (place < capacity)
        tl.store(pairs + (_line(tap, capacity, WIDE)[:, None] + place), site, mask=kept)
        row_there = row[None, :].to(tl.int32) + tl.zeros_like(site)
        tl.store(pairs + (_line(tap + TAPS, capacity, WIDE)[:, None] + place), row_there, mask=kept)


# ---- functions that several kernels share ------------------------------------------------------------------------


@triton.jit
def _plus(left, right, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BY_BLOCK: tl.constexpr):
    """total + left @ right. With BY_BLOCK, the product is computed separately and then added to `total`, which reduces
    rounding errors.
    """
    if BY_BLOCK:
        # max_num_imprecise_acc keeps the compiler from accumulating in `total`; in float32 this argument has no other
        # effect.
        return total + tl.dot(left, right, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        return plus_product(left, right, total, PRECISION, WIDEN)


@triton.jit
def _pieces(
    counts, capacity, parts,
    TAPS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut the pairs of T taps into at most `parts` + T pieces, one for each program. All pieces have the same length,
    except for the last one of each tap, which may be shorter.

    Returns the number of each tap's pairs (LANES,), the length of a piece, and the begin and end of each tap's pieces
    among all pieces (LANES,). Pairs beyond a list's capacity are not counted. With BLOCK, `counts` are numbers of
    blocks of BLOCK rows instead of numbers of pairs.
    """
    lane = tl.arange(0, LANES)
    count = tl.load(counts + lane, mask=lane < TAPS, other=0)
    count = tl.minimum(tl.maximum(count, 0), capacity)
    if BLOCK > 0:
        count = count * BLOCK
    share = tl.cdiv(tl.cdiv(tl.sum(count.to(tl.int64), axis=0), parts), DEPTH) * DEPTH
    length = tl.minimum(tl.maximum(share, DEPTH), 1 << 30).to(tl.int32)
    pieces = count // length + (count % length != 0).to(tl.int32)
    end = tl.cumsum(pieces, axis=0)
    return count, length, end - pieces, end


@triton.jit
def _line(number, length, WIDE: tl.constexpr):
    """The memory offset of line `number`, if each line has `length` elements."""
    if WIDE:
        return tl.cast(number, tl.int64) * length
    else:
        return number * length


@triton.jit
def _rows(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The indices (ROWS,) of the rows that this program processes, as 64-bit integers if WIDE."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    return row


@triton.jit
def _known(neighbours, row, real, first_tap, sites, TAPS: tl.constexpr, WIDTH: tl.constexpr):
    """Whether each of WIDTH taps of each row has a site, (ROWS, WIDTH)."""
    tap = first_tap + tl.arange(0, WIDTH)
    inside = real[:, None] & (tap < TAPS)[None, :]
    site = tl.load(neighbours + (row[:, None] * TAPS + tap[None, :]), mask=inside, other=-1)
    return (site >= 0) & (site < sites)
