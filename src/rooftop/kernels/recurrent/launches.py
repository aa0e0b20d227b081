"""Launch the kernels of `triton_kernels.py`; `conv_lstms.py` has the operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftop.kernels.operands.launch_data import Constants, ElementsConfig, grid_of, tile_of
from rooftop.kernels.recurrent import tables
from rooftop.launch.triton_launch import launch, require_triton


def forward(
    hidden: Tensor, next_cell: Tensor, gates: Tensor, cell: Tensor, added: Tensor | None, bias: Tensor | None,
    scores: Tensor | None, kinds: Constants,
) -> None:  # fmt: skip
    """Write the results to hidden, next_cell and, if given, scores. All tensors must have the same memory format.
    `kinds`: indices of the activations.
    """
    require_triton()
    from rooftop.kernels.recurrent.triton_kernels import conv_lstm_forward

    if cell.numel() == 0:
        return
    rows, columns, grid, constants = _tiles(tables.FORWARD, gates, cell, added)
    constants |= kinds | {"BIAS": bias is not None, "KEEP": scores is not None}
    read = (gates, gates if added is None else added, gates if bias is None else bias, cell)
    written = (hidden, next_cell, gates if scores is None else scores)
    sizes = (rows, columns // constants["UNIT"], columns // cell.shape[1])
    launch(conv_lstm_forward, grid, gates.device, *read, *written, *sizes, **constants)


def backward(
    dgates: Tensor, dcell: Tensor, dhidden: Tensor, more_dhidden: Tensor | None, dnext_cell: Tensor, gates: Tensor,
    cell: Tensor, added: Tensor | None, kinds: Constants,
) -> None:  # fmt: skip
    """Write the gradients to dgates and dcell. All tensors must have the same memory format."""
    require_triton()
    from rooftop.kernels.recurrent.triton_kernels import conv_lstm_backward

    if cell.numel() == 0:
        return
    rows, columns, grid, constants = _tiles(tables.BACKWARD, gates, cell, added)
    constants |= kinds | {"MORE": more_dhidden is not None}
    more, other = dhidden if more_dhidden is None else more_dhidden, gates if added is None else added
    tensors = (dhidden, more, dnext_cell, gates, other, cell, dgates, dcell)
    launch(conv_lstm_backward, grid, gates.device, *tensors, rows, columns // constants["UNIT"], **constants)


def format_of(gates: Tensor) -> torch.memory_format:
    """The memory format of the operator: channels last if the gates are channels last, else contiguous."""
    last = not gates.is_contiguous() and gates.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _tiles(
    config: ElementsConfig, gates: Tensor, cell: Tensor, added: Tensor | None
) -> tuple[int, int, tuple[int], Constants]:
    """Return the number of rows and columns of the cell in memory, the grid and the constants. A row is a pixel if the
    tensors are channels last, and otherwise a sample. A row of the gates contains all four gates side by side.
    """
    batch, features, height, width = cell.shape
    if format_of(gates) == torch.channels_last:
        rows, columns = batch * height * width, features
    else:
        rows, columns = batch, features * height * width
    tile = tile_of(config.elements, columns, config.warps)
    precise = gates.dtype == torch.float32
    constants = tile | {"UNIT": math.gcd(8, columns), "ADD": added is not None, "PRECISE": precise}
    return rows, columns, grid_of(rows, columns, tile), constants
