"""Triton kernel that copies numbers where a mask says so; `masked_copies.py` launches it.

The target is never read. A thread holds a group of numbers, as many as one load can take: a group that is chosen as a
whole, as most are, is stored at once, one that is chosen in part number by number, and one that is not chosen is not
even loaded. A number of the mask may stand for several of the target, those of one element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_lead", "target_lead"])
def masked_copy(
    source,  # rows of numbers, or one element of CHANNELS
    target,  # rows of numbers
    mask,  # bytes, one for each PER numbers of a row
    source_lead, target_lead,  # from where the pointers are to the first number
    rows, inner_rows, units,  # rows are an outer and an inner dimension, the inner one of so many; units of a row
    source_outer, source_inner, target_outer, target_inner, mask_outer, mask_inner,
    CHANNELS: tl.constexpr,  # of a source that is one element, else 0
    PER: tl.constexpr,
    UNIT: tl.constexpr,  # numbers: leads, rows and steps of source and target are multiples of it, and given so
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS numbers a program, in groups of UNIT."""
    columns = units * UNIT
    blocks = tl.cdiv(columns, COLUMNS)
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if WIDE:
        part, block = part.to(tl.int64), block.to(tl.int64)
    group = tl.arange(0, ROWS * COLUMNS // UNIT)
    row = part * ROWS + group // (COLUMNS // UNIT)
    column = (block * COLUMNS + group % (COLUMNS // UNIT) * UNIT)[:, None] + tl.arange(0, UNIT)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    outer, inner = row // inner_rows, row % inner_rows
    place = (outer * mask_outer + inner * mask_inner)[:, None] + column // PER
    chosen = tl.load(mask + place, mask=inside, other=0) != 0
    some, every = chosen, chosen  # of a group
    if UNIT > 1:
        some = tl.max(chosen.to(tl.int32), 1)[:, None] != 0
        every = tl.min(chosen.to(tl.int32), 1)[:, None] != 0
    if CHANNELS == 0:
        place = (source_lead + outer * source_outer + inner * source_inner)[:, None] * UNIT + column
        numbers = tl.load(source + place, mask=some)
    elif CHANNELS == 1:
        numbers = tl.load(source)
    else:
        numbers = tl.load(source + column % CHANNELS)
    place = (target_lead + outer * target_outer + inner * target_inner)[:, None] * UNIT + column
    tl.store(target + place, numbers, mask=every)
    if UNIT > 1:
        tl.store(target + place, numbers, mask=chosen & ~every)
