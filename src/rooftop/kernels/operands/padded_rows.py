"""Copy matrices so that the size of each row is a multiple of 16 bytes, which fast tensor-core products need.

If rows are not multiples of 16 bytes, cuBLAS multiplies several times more slowly. A copy takes only one pass over
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.operands.references import without_kernels
from rooftop.launch.triton_launch import launch, require_triton

ALIGNMENT, ROW_BYTES = 16, 128
LEAST_PADDED = 1 << 17  # minimum number of elements of a result for which copies save more time than they take
TILE = {"ROWS": 4, "COLUMNS": 1024, "num_warps": 4}


def missing_columns(columns: int, x: Tensor) -> int:
    """The number of columns to append to a matrix of `columns` columns, with the dtype and device of x, so that the
    size of a row is a multiple of 128 bytes. The number is 0 on a CPU, and if the size is already a multiple of 16
    bytes.
    """
    size = x.element_size()
    return -columns % (ROW_BYTES // size) if x.device.type == "cuda" and columns * size % ALIGNMENT else 0


def padded(x: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Append `rows` rows and `columns` columns of zeros to x (M, N), of any strides. If both are 0, return x itself."""
    if rows == 0 and columns == 0:
        return x
    shape = (x.shape[0] + rows, x.shape[1] + columns)
    if without_kernels(x.device):
        return torch.nn.functional.pad(x, (0, columns, 0, rows))
    require_triton()
    from rooftop.kernels.operands.triton_kernels.padded_rows import pad_rows

    result = torch.empty(shape, dtype=x.dtype, device=x.device)
    grid = (-(-shape[0] // TILE["ROWS"]), -(-shape[1] // TILE["COLUMNS"]))
    launch(pad_rows, grid, x.device, x, result, *x.shape, *shape, *x.stride(), **TILE)
    return result
