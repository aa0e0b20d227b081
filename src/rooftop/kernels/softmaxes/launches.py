"""How the kernels of `triton_kernels.py` are launched; `softmaxes.py` has the operators.

Rows for which the tables have an entry of clusters go to the kernels of `clusters.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.operands.launch_data import WordConstants
from rooftop.kernels.operands.row_tiles import group_of, long_tile, tile, tile_config
from rooftop.kernels.operands.strided_rows import rows_of, unit
from rooftop.kernels.softmaxes import clusters, tables
from rooftop.launch.strides import merged
from rooftop.launch.triton_launch import launch, processors, require_triton


def forward(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """Softmax of x (..., N) or its logarithm; mask broadcastable to it."""
    require_triton()
    from rooftop.kernels.softmaxes import triton_kernels as kernels

    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    table = rows_of(x)
    normal = 2.0**-126 <= abs(scale) <= 2.0**126  # as a float32: what is not in a row is -inf there, and not x 0
    plan = clusters.plan(tables.CLUSTER_FORWARD, (table,), y) if mask is None and normal else None
    if plan is not None:
        clusters.softmax_forward(plan, table, y, scale, log)
        return y
    rows, columns = table.shape
    group = unit(columns, table.stride(0))
    memory, kind, layout = _mask_arguments(mask, x.shape, x)
    arguments = (table, memory, y, rows, columns // group, table.stride(0) // group, scale, *layout)
    constants: WordConstants = {"MASK": kind, "LOG": log, "WIDE": dtype == torch.float32, "UNIT": group}
    config = tile_config(tables.FORWARD, columns * x.element_size())
    if config is None:
        per_sm, block = long_tile(tables.FORWARD_LONG, columns * x.element_size(), x.element_size())
        block |= {"GROUP": group_of(group, x.element_size())}
        grid = (min(rows, per_sm * processors(x)),)
        launch(kernels.softmax_forward_long, grid, x.device, *arguments, **constants, **block)
    else:
        constants |= tile(config, columns, x.element_size()) | {"HOLD": config.hold}
        launch(kernels.softmax_forward, (-(-rows // config.rows),), x.device, *arguments, **constants)
    return y


def backward(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """dx, from dy and y (..., N); a boolean mask or none."""
    require_triton()
    from rooftop.kernels.softmaxes import triton_kernels as kernels

    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    dy, y_rows = rows_of(dy), rows_of(y.contiguous())
    plan = clusters.plan(tables.CLUSTER_BACKWARD, (dy, y_rows), dx) if mask is None else None
    if plan is not None:
        clusters.softmax_backward(plan, dy, y_rows, dx, scale, log)
        return dx
    rows, columns = y_rows.shape
    group = unit(columns, dy.stride(0))
    memory, kind, layout = _mask_arguments(mask, y.shape, y)
    arguments = (dy, y_rows, memory, dx, rows, columns // group, dy.stride(0) // group, scale, *layout)
    wide = y.dtype == dx.dtype == torch.float32
    constants: WordConstants = {"MASK": kind, "LOG": log, "WIDE": wide, "UNIT": group}
    element_bytes = dy.element_size() + y.element_size()
    config = tile_config(tables.BACKWARD, columns * element_bytes)
    if config is None:
        per_sm, block = long_tile(tables.BACKWARD_LONG, columns * element_bytes, element_bytes)
        grid = (min(rows, per_sm * processors(y)),)
        launch(kernels.softmax_backward_long, grid, y.device, *arguments, **constants, **block)
    else:
        constants |= tile(config, columns, element_bytes)
        launch(kernels.softmax_backward, (-(-rows // config.rows),), y.device, *arguments, **constants)
    return dx


def _mask_arguments(mask: Tensor | None, shape: torch.Size, like: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """(memory, kind, (middle, inner, strides of outer, middle, inner, columns)) of a mask that broadcasts to `shape`.

    Neighbouring dimensions are merged where one stride serves both; where more than three remain before the last, the
    mask is copied to the full shape.
    """
    if mask is None:
        return like, 0, (1, 1, 0, 0, 0, 0)
    kind = 2 if mask.dtype == torch.bool else 1
    full = (mask.view(torch.uint8) if kind == 2 else mask).expand(shape)
    dims = merged(shape[:-1], full.stride()[:-1])
    if len(dims) > 3:
        full = full.contiguous()
        dims = merged(shape[:-1], full.stride()[:-1])
    (_, (outer,)), (middle, (middle_stride,)), (inner, (inner_stride,)) = [(1, (0,))] * (3 - len(dims)) + dims
    return full, kind, (middle, inner, outer, middle_stride, inner_stride, full.stride(-1))
