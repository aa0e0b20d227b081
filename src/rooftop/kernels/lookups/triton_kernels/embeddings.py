"""The Triton kernels of embeddings and of their gradient. `lookups/embeddings.py` explains and calls these kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    table, tokens, result,  # shapes: (V, D); (items,); (items, D)
    items, width, table_rows, table_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gather the table's rows for the tokens. If device asserts are enabled, a token outside the table is an error."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens + row, mask=row < items, other=0)
    tl.device_assert((token >= 0) & (token < table_rows), "embedding: a token is outside of the table")
    inside = (row < items)[:, None] & (column < width)[None, :]
    values = tl.load(table + token.to(tl.int64)[:, None] * table_stride + column[None, :], mask=inside, other=0.0)
    tl.store(result + row[:, None] * width + column[None, :], values, mask=inside)


@triton.jit
def add_equal(
    values, tokens, table,  # (items, D); (items,); (V, D)
    items, width, table_rows, skipped, value_stride,
    ITEMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of `values` at the positions of one token. There is one program for each position: the program of
    the token's first position stores the sum, and the programs of the token's later positions store nothing.
    """
    first = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens + first)
    earlier = 0
    for begin in range(0, first, ITEMS):
        place = begin + tl.arange(0, ITEMS)
        other = tl.load(tokens + place, mask=place < first, other=-1)
        earlier += tl.sum(((other == token) & (place < first)).to(tl.int32), 0)
    if (earlier == 0) & (token >= 0) & (token < table_rows) & (token != skipped):
        total = tl.zeros((COLUMNS,), tl.float32)
        for begin in range(first, items, ITEMS):
            place = begin + tl.arange(0, ITEMS)
            equal = (tl.load(tokens + place, mask=place < items, other=-1) == token) & (place < items)
            if tl.sum(equal.to(tl.int32), 0) > 0:
                rows = values + place.to(tl.int64)[:, None] * value_stride + column[None, :]
                inside = equal[:, None] & (column < width)[None, :]
                total += tl.sum(tl.load(rows, mask=inside, other=0.0).to(tl.float32), 0)
        target = table + token.to(tl.int64) * width + column
        tl.store(target, total.to(table.dtype.element_ty), mask=column < width)


@triton.jit
def add_runs(
    values, order, tokens,  # shapes: (*, D) rows; (items,) row numbers, not read if item i is row i; (items,) sorted
    table, sums, sum_tokens,  # shapes: (V, D); (2 * programs, D) float32; (2 * programs,)
    items, width, table_rows, skipped, value_stride,
    INDIRECT: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the runs of equal tokens among CHUNK items.

    The sum of a run that lies within the chunk is stored as a row of the table. The first partial sum of a chunk
    belongs to a run that began in an earlier chunk. The second partial sum belongs to a run that begins in this chunk
    and continues in the next chunk. If there is no such run, the token of the partial sum is -1. If a run from an
    earlier chunk fills this chunk and continues, its sum is the first partial sum. The second partial sum then has the
    run's token and is 0.
    """
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, items) - 1
    token = tl.load(tokens + first)
    before = tl.load(tokens + first - 1, mask=first > 0, other=-2)
    began_before = before == token
    opening = token
    head = sums + 2 * chunk * width + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(0, CHUNK, AHEAD):
        rows = ()  # AHEAD rows are loaded before the first is used
        for step in tl.static_range(AHEAD):
            item = first + block + step
            if INDIRECT:
                row = tl.load(order + item, mask=item <= last, other=0)
            else:
                row = item
            rows = rows + (tl.load(values + row * value_stride + column, mask=real & (item <= last), other=0.0),)
        for step in tl.static_range(AHEAD):
            item = first + block + step
            total += rows[step].to(tl.float32)
            after = tl.load(tokens + item + 1, mask=item + 1 < items, other=-2)
            ends = (item <= last) & ((after != token) | (item == last))
            goes_on = (item == last) & (after == token)
            inside = ends & ~began_before & ~goes_on
            known = (token >= 0) & (token < table_rows) & (token != skipped)
            target = table + tl.where(known, token, 0).to(tl.int64) * width + column
            tl.store(target, total.to(table.dtype.element_ty), mask=real & inside & known)
            tl.store(head, total, mask=real & ends & began_before)
            tl.store(head + width, tl.where(began_before, 0.0, total), mask=real & goes_on)
            if tl.program_id(1) == 0:
                tl.store(sum_tokens + 2 * chunk + 1, tl.where(goes_on, token, -1), mask=item == last)
            total = tl.where(ends, 0.0, total)
            began_before = began_before & ~ends
            token = tl.where(item < last, after, token)
    if tl.program_id(1) == 0:
        tl.store(sum_tokens + 2 * chunk, tl.where(before == opening, opening, -1))
