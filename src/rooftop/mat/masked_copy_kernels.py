"""Triton kernel that copies numbers where a mask says so; `masked_copies.py` launches it.

The target is never read. A thread has a group of marks (bytes of the mask) and the numbers that they stand for, which
are as many wide words: of a mask for pixels of three bytes, 16 marks and three words of 16 bytes. A group that is
chosen as a whole, as most are, is stored word by word, and of one that is not chosen nothing is even loaded. Where a
program has a group that is chosen in part, that one is stored number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_lead", "target_lead", "mask_lead"])
def masked_copy(
    source,  # rows of numbers, or one element of CHANNELS
    target,  # rows of numbers
    mask,  # rows of bytes, one for each PER numbers
    source_lead, target_lead, mask_lead,  # from where the pointers are to the first number or mark, in words
    rows, inner_rows, groups,  # rows are an outer and an inner dimension, the inner one of so many; groups of a row
    source_outer, source_inner, target_outer, target_inner, mask_outer, mask_inner,  # from row to row, in words
    CHANNELS: tl.constexpr,  # of a source that is one element, else 0
    PER: tl.constexpr,
    MARKS: tl.constexpr,  # of a group
    MASK_WORD: tl.constexpr,  # marks: what the mask is read by
    WORDS: tl.constexpr,  # of numbers, in a group
    WORD: tl.constexpr,  # numbers: what source and target are read and written by
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS groups a program."""
    blocks = tl.cdiv(groups, COLUMNS)
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if WIDE:
        part, block = part.to(tl.int64), block.to(tl.int64)
    number = tl.arange(0, ROWS * COLUMNS)
    row, group = part * ROWS + number // COLUMNS, block * COLUMNS + number % COLUMNS
    inside = (row < rows) & (group < groups)
    outer, inner = row // inner_rows, row % inner_rows
    mark = tl.arange(0, MARKS)[None, :]
    begin = (mask_lead + outer * mask_outer + inner * mask_inner) * MASK_WORD + group * MARKS
    marks = tl.load(mask + begin[:, None] + mark, mask=inside[:, None], other=0)
    bits = tl.sum((marks != 0).to(tl.int32) << mark, 1)
    some, every = bits != 0, bits == (1 << MARKS) - 1
    source_word = source_lead + outer * source_outer + inner * source_inner + group * WORDS
    target_word = target_lead + outer * target_outer + inner * target_inner + group * WORDS
    for word in tl.static_range(WORDS):
        numbers = numbers_of(source, source_word + word, group, word, some, CHANNELS, PER, WORD)
        place = ((target_word + word) * WORD)[:, None] + tl.arange(0, WORD)[None, :]
        tl.store(target + place, numbers, mask=every[:, None])
    if MARKS > 1:
        in_part = some & ~every
        if tl.max(in_part.to(tl.int32), 0) != 0:
            for word in tl.static_range(WORDS):
                numbers = numbers_of(source, source_word + word, group, word, in_part, CHANNELS, PER, WORD)
                place = ((target_word + word) * WORD)[:, None] + tl.arange(0, WORD)[None, :]
                which = (word * WORD + tl.arange(0, WORD)) // PER
                chosen = (bits[:, None] >> which[None, :]) & 1 != 0
                tl.store(target + place, numbers, mask=chosen & in_part[:, None])


@triton.jit
def numbers_of(
    source, place, group, word, wanted,
    CHANNELS: tl.constexpr, PER: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """The words of the source at these places; of one element its numbers again and again."""
    lane = tl.arange(0, WORD)[None, :]
    if CHANNELS == 0:
        return tl.load(source + (place * WORD)[:, None] + lane, mask=wanted[:, None])
    if PER > 1:  # a group begins with an element
        channel = tl.broadcast_to((word * WORD + lane) % CHANNELS, [group.shape[0], WORD])
    else:
        channel = ((group * WORD)[:, None] + lane) % CHANNELS
    return tl.load(source + channel)
