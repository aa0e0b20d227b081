"""The Triton kernels that correspond to `indexing.cu`: each program takes a tile. Triton arranges the threads so that
neighbouring threads touch neighbouring addresses where the tile has such addresses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_columns(a, b, c, rows, columns, BLOCK: tl.constexpr):  # (rows, columns) each
    """Each program adds BLOCK columns, from the first row to the last."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for row in tl.range(0, rows):
        at = tl.cast(row, tl.int64) * columns + column
        total = tl.load(a + at, mask=column < columns) + tl.load(b + at, mask=column < columns)
        tl.store(c + at, total, mask=column < columns)


@triton.jit
def add_rows(a, b, c, rows, columns, BLOCK: tl.constexpr):
    """Each program adds BLOCK rows, from the first column to the last."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for column in tl.range(0, columns):
        at = row.to(tl.int64) * columns + column
        tl.store(c + at, tl.load(a + at, mask=row < rows) + tl.load(b + at, mask=row < rows), mask=row < rows)


@triton.jit
def add_tile(a, b, c, rows, columns, slab, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program adds one tile. The third dimension of the grid counts slabs of `slab` rows."""
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.program_id(2) * slab + within
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (within < slab) & (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    tl.store(c + at, tl.load(a + at, mask=inside) + tl.load(b + at, mask=inside), mask=inside)
