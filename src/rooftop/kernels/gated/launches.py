"""Launch the kernels of `triton_kernels.py`; `gated.py` has the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.gated import tables
from rooftop.kernels.operands.launch_data import grid_of, tile_of
from rooftop.kernels.operands.strided_rows import unit, unit_columns
from rooftop.launch.triton_launch import launch, require_triton


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for gate and up (..., N) of any strides."""
    require_triton()
    from rooftop.kernels.gated.triton_kernels import swiglu_forward

    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    gates, ups = _as_rows(gate, up)
    rows, columns = gates.shape
    group = unit(columns, gates.stride(0), ups.stride(0))
    tile = tile_of(tables.FORWARD.tile_bytes // gate.element_size(), columns, tables.FORWARD.warps)
    sizes = (rows, columns // group, gates.stride(0) // group, ups.stride(0) // group)
    launch(swiglu_forward, grid_of(rows, columns, tile), gate.device, gates, ups, y, *sizes, UNIT=group, **tile)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Compute the gradients dgate and dup, (..., N). The stride between rows must be the same in dgate and dup."""
    require_triton()
    from rooftop.kernels.gated.triton_kernels import swiglu_backward

    if gate.numel() == 0:
        return
    gradients, gates, ups, to_gate, to_up = _as_rows(dy, gate, up, dgate, dup)
    rows, columns = gates.shape
    strides = [t.stride(0) for t in (gradients, gates, ups, to_gate)]
    group = unit(columns, *strides)
    tile = tile_of(tables.BACKWARD.tile_bytes // gate.element_size(), columns, tables.BACKWARD.warps)
    tensors, sizes = (gradients, gates, ups, to_gate, to_up), (rows, columns // group, *(s // group for s in strides))
    launch(swiglu_backward, grid_of(rows, columns, tile), gate.device, *tensors, *sizes, UNIT=group, **tile)


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """View tensors (..., N) as matrices (M, N) whose rows are contiguous, with copies where a view is impossible. If
    all tensors are contiguous, view each of them as a single row.
    """
    if all(t.is_contiguous() for t in tensors):
        return [t.reshape(1, -1) for t in tensors]
    columns = tensors[0].shape[-1]
    return [unit_columns(t.reshape(-1, columns)) for t in tensors]
