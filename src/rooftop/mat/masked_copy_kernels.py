"""Triton kernel that copies numbers under a mask; `masked_copies.py` launches it.

The target is never read. A thread handles a group of marks (bytes of the mask) and the numbers that they select, as
wide words. With pixels of three bytes, a group is 16 marks and three words of 16 bytes. Most groups are fully selected
and are stored word by word. If no mark of a group is set, the group's numbers are not loaded. A partly selected group
is stored number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_lead", "target_lead", "mask_lead"])
def masked_copy(
    # Rows of numbers. If CHANNELS > 0, (CHANNELS, TABLE): row p repeats the element's numbers, starting at channel p.
    source,
    target,  # rows of numbers
    mask,  # rows of bytes: one byte for every PER numbers
    # Leads and distances between rows count words: WORD numbers for source and target, MASK_WORD marks for the mask.
    source_lead, target_lead, mask_lead,  # distances from the pointers to the first number or mark
    rows, inner_rows, words,  # number of rows; rows of the inner dimension; words of a row
    source_outer, source_inner, target_outer, target_inner, mask_outer, mask_inner,  # distances between rows
    CHANNELS: tl.constexpr,  # number of channels if the source is one element; 0 if it is not
    TABLE: tl.constexpr,  # row length of that table
    PER: tl.constexpr,
    WORD: tl.constexpr,  # numbers that one load or store of source and target moves
    WORDS: tl.constexpr,  # words of a group; a group covers whole marks
    MARKS: tl.constexpr,  # marks of a group
    MASK_WORD: tl.constexpr,  # marks that one load of the mask reads
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy source elements to the target where the mask is not 0. Each program handles a block of ROWS x COLUMNS
    words.
    """
    blocks = tl.cdiv(words, COLUMNS)
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if WIDE:
        part, block = part.to(tl.int64), block.to(tl.int64)
    number = tl.arange(0, ROWS * COLUMNS)
    row, word = part * ROWS + number // COLUMNS, block * COLUMNS + number % COLUMNS
    inside = (row < rows) & (word < words)
    outer, inner = row // inner_rows, row % inner_rows
    group, of_group = word // WORDS, word % WORDS
    begin = (mask_lead + outer * mask_outer + inner * mask_inner) * MASK_WORD + group * MARKS
    bits = bits_of(mask, begin, inside, MARKS, MASK_WORD)
    first, last = of_group * WORD // PER, (of_group * WORD + WORD - 1) // PER
    full = (2 << (last - first)) - 1
    of_word = (bits >> first) & full
    some, every = of_word != 0, of_word == full
    lane = tl.arange(0, WORD)[None, :]
    place = ((target_lead + outer * target_outer + inner * target_inner + word) * WORD)[:, None] + lane
    if CHANNELS == 0:
        begin = (source_lead + outer * source_outer + inner * source_inner + word) * WORD
        numbers = tl.load(source + begin[:, None] + lane, mask=some[:, None])
    else:
        numbers = tl.load(source + (word * WORD % CHANNELS * TABLE)[:, None] + lane, mask=some[:, None])
    tl.store(target + place, numbers, mask=every[:, None])
    if WORD > 1:
        in_part = some & (of_word != full)
        if tl.max(in_part.to(tl.int32), 0) != 0:
            which = ((of_group * WORD)[:, None] + lane) // PER
            chosen = (bits[:, None] >> which) & 1 != 0
            tl.store(target + place, numbers, mask=chosen & in_part[:, None])


@triton.jit
def bits_of(mask, begin, inside, MARKS: tl.constexpr, MASK_WORD: tl.constexpr):
    """Pack MARKS mask bytes from `begin` on into an integer: bit i is 1 if byte i is not 0."""
    if MASK_WORD % 4 == 0:  # four marks at a time
        four = tl.arange(0, MARKS // 4)[None, :]
        fours = mask.to(tl.pointer_type(tl.uint32)) + (begin // 4)[:, None] + four
        marks = tl.load(fours, mask=inside[:, None], other=0)
        ones = (((marks & 0x7F7F7F7F) + 0x7F7F7F7F | marks) >> 7) & 0x01010101  # a byte that is not 0 becomes 1
        return tl.sum(((ones * 0x01020408 >> 24) & 15).to(tl.int32) << 4 * four, 1)  # the four bits become adjacent
    mark = tl.arange(0, MARKS)[None, :]
    marks = tl.load(mask + begin[:, None] + mark, mask=inside[:, None], other=0)
    return tl.sum((marks != 0).to(tl.int32) << mark, 1)
