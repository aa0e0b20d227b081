"""The Triton kernels of counter-based random numbers; `randoms.py` has the operators, `words.py` explains how numbers
are computed.

Random numbers are computed in integers, except for conversions (exact, or rounded once), products that are exact, and
one float64 sum. The products are exact, so a compiler may fuse a product with the sum without changing the result. A
key and a step are each passed as two halves of 32 bits, so that a new value needs no recompilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = ["key_low", "key_high", "step_low", "step_high"]


@triton.jit(do_not_specialize=[*KEYS, "lower_word", "last_word"])
def random_fill(
    out, table,  # (rows, columns) contiguous; (32, 8) int32, coefficients of quantiles
    key_low, key_high, step_low, step_high,
    rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_3, offset,
    scale, shift, low, high,  # float32
    lower_word, last_word,  # with NORMAL, words are mapped to the range from lower_word to lower_word + last_word
    NORMAL: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write shift + scale * u, limited to [low, high], to each element of one tile. The random number u is uniform in
    [0, 1), or with NORMAL, from the standard normal distribution.
    """
    row, column = _tile(columns, GROUPED, ROWS, COLUMNS)
    index = _index(row, column, size_1, size_2, stride_0, stride_1, stride_2, stride_3, offset)
    word = _words(index, key_low, key_high, step_low, step_high, GROUPED)
    if NORMAL:
        word = _within(word, lower_word.to(tl.uint32, bitcast=True), last_word.to(tl.uint32, bitcast=True))
        plain = normal(word, table).to(tl.float64)
    else:
        plain = (word >> 8).to(tl.int32).to(tl.float64) * 5.9604644775390625e-08  # 2^-24
    value = (plain * scale + shift).to(tl.float32)
    value = tl.minimum(tl.maximum(value, low), high)
    place, inside = _place(rows, columns, GROUPED, ROWS, COLUMNS)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*KEYS, "dropped_words"])
def dropout_tile(
    x, y,  # (rows, columns) contiguous
    step_there,  # () int64: the step, read instead of step_low and step_high if STEP_THERE; otherwise unused
    key_low, key_high, step_low, step_high,
    rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_3, offset,
    dropped_words, scale,  # dropped_words: number of words that drop an element, below 2^32; scale: float32
    STEP_THERE: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write x * scale to one tile, or 0 for elements whose random word is below `dropped_words`."""
    if STEP_THERE:
        step = tl.load(step_there)
        step_low = step.to(tl.int32)
        step_high = (step >> 32).to(tl.int32)
    row, column = _tile(columns, GROUPED, ROWS, COLUMNS)
    index = _index(row, column, size_1, size_2, stride_0, stride_1, stride_2, stride_3, offset)
    word = _words(index, key_low, key_high, step_low, step_high, GROUPED)
    place, inside = _place(rows, columns, GROUPED, ROWS, COLUMNS)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
    value = tl.where(word < dropped_words.to(tl.uint32, bitcast=True), 0.0, value)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tile(columns, GROUPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The row indices (ROWS, 1) and the column indices (1, COLUMNS) of this program's tile. If GROUPED, a column is a
    group of four elements, and there are COLUMNS / 4 column indices.
    """
    WIDTH: tl.constexpr = COLUMNS // 4 if GROUPED else COLUMNS
    blocks = tl.cdiv(columns, WIDTH)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    return row, column


@triton.jit
def _place(rows, columns, GROUPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The offsets (ROWS, COLUMNS) of a program's elements in the result (rows, columns), and the mask of those that
    exist.
    """
    UNIT: tl.constexpr = 4 if GROUPED else 1
    width = tl.full((), UNIT, tl.int64) * columns  # `columns` fits in int32, but the number of elements may not
    row, column = _tile(width, False, ROWS, COLUMNS)
    return row * width + column, (row < rows) & (column < width)


@triton.jit
def _index(row, column, size_1, size_2, stride_0, stride_1, stride_2, stride_3, offset):
    """The 64-bit positions of a part's elements in the whole tensor, in elements or in groups of four, like the
    strides.
    """
    outer = row // size_2
    index = offset + (outer // size_1) * stride_0 + (outer % size_1) * stride_1 + (row % size_2) * stride_2
    return index + column * stride_3


@triton.jit
def _words(index, key_low, key_high, step_low, step_high, GROUPED: tl.constexpr):
    """Compute the random 32-bit words of elements. If GROUPED, `index` (R, C) has the indices of groups of four
    elements, and the result has the shape (R, 4 C).
    """
    block = index if GROUPED else index >> 2
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + step_low.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + step_high.to(tl.uint32, bitcast=True)
    c0, c1, c2, c3 = philox(c0, c1, c2, c3, key_low.to(tl.uint32, bitcast=True), key_high.to(tl.uint32, bitcast=True))
    if GROUPED:
        words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    else:
        lane = index & 3
        words = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
    return words


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-10 of counters and a key, all uint32."""
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _within(word, lower_word, last_word):
    """Map uniform 32-bit words, in order, to the integers from lower_word to lower_word + last_word, both included. The
    results are as evenly distributed as possible.
    """
    wide = word.to(tl.uint64)
    return lower_word + ((wide * last_word + wide) >> 32).to(tl.uint32)


@triton.jit
def normal(word, table):
    """The normal quantile of (word + 1/2) / 2^32 in float32; see `normal_quantiles_reference`."""
    negative = (word >> 31) == 0
    tail = (tl.where(negative, word, word ^ 0xFFFFFFFF) << 1) | 1
    # the mask clears the bit after the leading 1, so rounding to float32 does not change the exponent
    leading = (tail & ((tail >> 1) ^ 0xFFFFFFFF)).to(tl.float32)
    octave = 158 - (leading.to(tl.int32, bitcast=True) >> 23)
    place = (((tail << octave.to(tl.uint32)) << 1) ^ 0x80000000).to(tl.int32, bitcast=True)
    row = table + octave * 8
    total = tl.load(row + 7)
    for power in tl.static_range(6, -1, -1):
        total = tl.load(row + power) + ((total.to(tl.int64) * place.to(tl.int64) + 1073741824) >> 31).to(tl.int32)
    return tl.where(negative, -total, total).to(tl.float32) * 3.725290298461914e-09  # 2^-28
