"""Copies of matrices whose rows are whole multiples of 16 bytes, which products by tensor cores want.

Libraries multiply rows that 16 bytes do not divide several times more slowly; a copy costs one trip through memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.operands.references import without_kernels
from rooftop.launch.triton_launch import launch, require_triton

ALIGNMENT, ROW_BYTES = 16, 128
LEAST_PADDED = 1 << 17  # elements of a result from which copies take less time than they save
TILE = {"ROWS": 4, "COLUMNS": 1024, "num_warps": 4}


def missing_columns(columns: int, x: Tensor) -> int:
    """How many more columns of the dtype of x make rows multiples of 128 bytes; none where 16 bytes divide them, and on
    a CPU."""
    size = x.element_size()
    return -columns % (ROW_BYTES // size) if x.device.type == "cuda" and columns * size % ALIGNMENT else 0


def padded(x: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """x (M, N), any strides, with so many more rows and columns of zeros; x itself where there are none."""
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
