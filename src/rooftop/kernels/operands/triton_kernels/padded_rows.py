"""The Triton kernel that copies a matrix and adds zeros; `../padded_rows.py` explains its purpose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pad_rows(
    x, result, rows, columns, result_rows, result_columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy x (rows, columns) to the first rows and columns of result (result_rows, result_columns), which is
    contiguous. All other elements of result become 0.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0)
    tl.store(result + row * result_columns + column, values, mask=(row < result_rows) & (column < result_columns))
