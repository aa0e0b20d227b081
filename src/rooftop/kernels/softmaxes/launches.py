"""Launch the softmax kernels that the plans of `plans.py` select; `softmaxes.py` has the operators."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.operands.strided_rows import rows_of
from rooftop.kernels.softmaxes import clusters
from rooftop.kernels.softmaxes.plans import backward_problem, choose, forward_problem
from rooftop.launch.strides import merged
from rooftop.launch.triton_launch import launch, require_triton


@cache
def _kernel(name: str) -> Any:
    """The Triton kernel with this name. Calls after the first call only look up the kernel in a dictionary."""
    require_triton()
    from rooftop.kernels.softmaxes import triton_kernels

    return getattr(triton_kernels, name)


def forward(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """Compute the softmax of x (..., N), or its logarithm; the mask must be broadcastable to x."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    table = rows_of(x)
    plan = choose(forward_problem(table, mask, scale, log, dtype))
    if plan.clusters is not None:
        clusters.softmax_forward(plan.clusters, table, y, scale, log)
        return y
    memory, layout = _mask_arguments(mask, x.shape, x)
    launch(_kernel(plan.kernel), plan.grid, x.device, table, memory, y, *plan.sizes, scale, *layout, **plan.constants)
    return y


def backward(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """Compute dx from dy and y (..., N), with a boolean mask or None."""
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    dy, y_rows = rows_of(dy), rows_of(y.contiguous())
    plan = choose(backward_problem(dy, y_rows, mask, log, dtype))
    if plan.clusters is not None:
        clusters.softmax_backward(plan.clusters, dy, y_rows, dx, scale, log)
        return dx
    memory, layout = _mask_arguments(mask, y.shape, y)
    tensors = (dy, y_rows, memory, dx)
    launch(_kernel(plan.kernel), plan.grid, y.device, *tensors, *plan.sizes, scale, *layout, **plan.constants)
    return dx


def _mask_arguments(mask: Tensor | None, shape: torch.Size, like: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The kernel arguments of a mask that broadcasts to `shape`: (mask tensor, (sizes of middle and inner, strides of
    outer, middle, inner and columns)).

    The mask is expanded to `shape`. Neighbouring dimensions before the last dimension are merged if a single stride
    steps through both. The expanded mask is copied if more than three of these dimensions remain, or if an offset
    within a row exceeds 32 bits.
    """
    if mask is None:
        return like, (1, 1, 0, 0, 0, 0)
    full = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(shape)
    dims = merged(shape[:-1], full.stride()[:-1])
    if len(dims) > 3 or shape[-1] * full.stride(-1) >= 1 << 31:
        full = full.contiguous()
        dims = merged(shape[:-1], full.stride()[:-1])
    (_, (outer,)), (middle, (middle_stride,)), (inner, (inner_stride,)) = [(1, (0,))] * (3 - len(dims)) + dims
    return full, (middle, inner, outer, middle_stride, inner_stride, full.stride(-1))
