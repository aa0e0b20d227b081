"""Launch a plan: a kernel of `triton_kernels.py`, or cuBLAS and a kernel for the operations after the product.

`tables.py` makes the plans; `matmuls.py` has the operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import matrix_precision
from rooftop.kernels.matmuls.tables import (
    BACKWARD_COLUMNS,
    BACKWARD_PROGRAMS_PER_SM,
    BACKWARD_ROWS,
    BACKWARD_WARPS,
    FINISH_COLUMNS,
    FINISH_ELEMENTS,
    FINISH_WARPS,
    SUM_OF_CHUNKS,
    LinearPlan,
    Tile,
    describable,
    finished_by_library,
)
from rooftop.kernels.operands.activations import ACTIVATIONS
from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.padded_rows import LEAST_PADDED, missing_columns, padded
from rooftop.kernels.operands.strided_rows import unit, unit_columns
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor


def forward(
    plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    keep: bool, rounded: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute (y (M, N), input of the activation) with cuBLAS or a kernel, as `plan` selects. The input of the
    activation is empty unless `keep`. Operands may have any strides.

    `rounded`: round the input of the activation to y's dtype before the activation is applied.
    """
    rows, columns = x.shape[0], weight.shape[0]
    nothing = x.new_empty(0)
    if rows == 0 or columns == 0:
        return x.new_empty(rows, columns), x.new_empty(rows, columns) if keep else nothing
    if plan.backend == "library":
        return _by_library(x, weight, bias, activation, residual, keep)
    require_triton()
    assert plan.tile is not None
    tile = plan.tile
    if tile.kernel != "pointers":
        x, weight = _described_or_copied(x), _described_or_copied(weight)
        residual = _described_or_copied(residual, rows_only=True) if residual is not None else None
        y = _aligned_rows(rows, columns, x)
        before = _aligned_rows(rows, columns, x) if keep else nothing
    else:
        residual = unit_columns(residual) if residual is not None else None
        y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        before = torch.empty_like(y) if keep else nothing
    steps = -(-x.shape[1] // tile.depth)
    split = -(-steps // -(-steps // tile.split))  # fewer parts than tile.split if some would be empty
    run = _RUN[tile.kernel]
    bias = bias.contiguous() if bias is not None else None
    if split == 1:
        run(tile, 1, x, weight, bias, activation, residual, y, before, rows, rounded)
    else:
        padded = -(-rows // tile.rows) * tile.rows if tile.kernel == "descriptors" else rows
        sums = torch.empty((split * padded, y.stride(0)), dtype=torch.float32, device=x.device)[:, :columns]
        run(tile, split, x, weight, None, "none", None, sums, nothing, padded, False)
        finish(sums, split, padded, bias, activation, residual, y, before, rounded)
    return y.contiguous(), before.contiguous()


def _by_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Compute (y, input of the activation) by cuBLAS, with a separate pass for the operations that cuBLAS does not
    fuse.
    """
    nothing, (rows, columns) = x.new_empty(0), (x.shape[0], weight.shape[0])
    x, weight, bias = _with_aligned_rows(x, weight, bias)
    if bias is not None and finished_by_library(x, bias, activation, residual, keep):
        y = torch._addmm_activation(bias, x, weight.t(), use_gelu=activation == "gelu_tanh")
        return y[:, :columns].contiguous(), nothing
    before = functional.linear(x, weight, bias)[:, :columns]
    if activation == "none" and residual is None:
        y = before.contiguous()
        return y, y.clone() if keep else nothing
    require_triton()
    residual = unit_columns(residual) if residual is not None else None
    # y may overwrite `before` if `before` is contiguous: one thread reads each element, and then writes it
    y = before if before.is_contiguous() and not keep else before.new_empty(rows, columns)
    finish(before, 1, rows, None, activation, residual, y, nothing)
    return y, before.contiguous() if keep else nothing


def _with_aligned_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pad the operands with zeros, as if the layer had more inputs and outputs, so that their rows are aligned."""
    depth, columns = missing_columns(x.shape[1], x), missing_columns(weight.shape[0], x)
    if x.shape[0] * weight.shape[0] < LEAST_PADDED or not (depth or columns):
        return x, weight, bias
    bias = functional.pad(bias, (0, columns)) if bias is not None else None
    return padded(x, columns=depth), padded(weight, columns, depth), bias


def _with_descriptors(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, padded_rows: int, rounded: bool,
) -> None:  # fmt: skip
    """Launch the persistent kernel. With several parts of K, y has the float32 sums of part p from row p * padded_rows
    on.
    """
    from rooftop.kernels.matmuls.triton_kernels import linear_act_descriptors

    rows, depth = x.shape
    columns = weight.shape[0]
    part = tile.columns // tile.parts
    keep = before.numel() > 0
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * split
    launch(
        linear_act_descriptors,
        (min(tiles, tile.programs_per_sm * processors(x)),),
        x.device,
        _described(x, tile.rows, tile.depth),
        _described(weight, tile.columns, tile.depth),
        _described(y, tile.rows, part),
        _described(before, tile.rows, part) if keep else None,
        _described(residual, tile.rows, part) if residual is not None else None,
        *(bias, rows, columns, depth, padded_rows, tile.lag * depth),
        X_ACROSS=x.stride(1) != 1, W_ACROSS=weight.stride(1) != 1, PARTS=tile.parts,
        OUT_OF_STEP=tile.lag > 0 and not INTERPRETED,
        **_constants(tile, split, x, bias, activation, residual, keep, rounded),
    )  # fmt: skip


def _with_single_tiles(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, _: int, rounded: bool,
) -> None:  # fmt: skip
    from rooftop.kernels.matmuls.triton_kernels import linear_act_single

    assert split == 1
    rows, depth = x.shape
    columns = weight.shape[0]
    part = tile.columns // tile.parts
    keep = before.numel() > 0
    launch(
        linear_act_single,
        (-(-rows // tile.rows) * -(-columns // (tile.columns + tile.more)),),
        x.device,
        _described(x, tile.rows, tile.depth),
        _described(weight, tile.columns, tile.depth),
        _described(weight, tile.more, tile.depth) if tile.more else None,
        _described(y, tile.rows, part),
        _described(before, tile.rows, part) if keep else None,
        *(residual, bias, rows, columns, depth, residual.stride(0) if residual is not None else 0),
        X_ACROSS=x.stride(1) != 1, W_ACROSS=weight.stride(1) != 1, PARTS=tile.parts, MORE=tile.more,
        **({"EARLY": True, "launch_pdl": True} if tile.early and not INTERPRETED else {"EARLY": False}),
        **_constants(tile, split, x, bias, activation, residual, keep, rounded),
    )  # fmt: skip


def _described(t: Tensor, height: int, width: int) -> TensorDescriptor:
    """A tensor descriptor with boxes of (height, width). If columns are contiguous, the descriptor describes the
    transpose.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if t.stride(1) != 1:
        t, height, width = t.t(), width, height
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [height, width])


def _with_pointers(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, _: int, rounded: bool,
) -> None:  # fmt: skip
    from rooftop.kernels.matmuls.triton_kernels import linear_act_pointers

    rows, depth = x.shape
    columns = weight.shape[0]
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * split
    keep = before.numel() > 0
    launch(
        linear_act_pointers, (tiles,), x.device, x, weight, y, before if keep else None, residual, bias,
        rows, columns, depth, *x.stride(), *weight.stride(), residual.stride(0) if residual is not None else 0,
        WIDE=any(_reach(t, tile.depth) >= 1 << 31 for t in (x, weight)),
        **_constants(tile, split, x, bias, activation, residual, keep, rounded),
    )  # fmt: skip


_RUN = {"descriptors": _with_descriptors, "single": _with_single_tiles, "pointers": _with_pointers}


def _reach(t: Tensor, beyond: int) -> int:
    """An upper bound of the offsets, in elements from the start of the matrix, that a kernel computes. A tile may reach
    up to `beyond` columns past the end of the last row.
    """
    return (t.shape[0] - 1) * t.stride(0) + (t.shape[1] + beyond) * t.stride(1)


def _constants(
    tile: Tile,
    split: int,
    x: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    keep: bool,
    rounded: bool,
) -> dict[str, int | bool | str]:
    return {
        "ACTIVATION": ACTIVATIONS.index(activation),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "KEEP": keep,
        "ROUNDED": keep and rounded,
        "PRECISION": "tf32" if matrix_precision(x) == "tf32" else "ieee",
        "WIDEN": INTERPRETED,
        "HALF": x.dtype in HALVES,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "SPLIT": split,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def finish(
    sums: Tensor, split: int, padded_rows: int, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, rounded: bool = False,
) -> None:  # fmt: skip
    """Compute y = activation(total + bias) + residual, where total adds the `split` parts of `sums`."""
    from rooftop.kernels.matmuls.triton_kernels import linear_act_finish

    rows, columns = y.shape
    residual_row = residual.stride(0) if residual is not None else 0
    group = unit(columns, residual_row, sums.stride(0), y.stride(0))
    block = min(FINISH_COLUMNS, power_of_two(columns))
    height = FINISH_ELEMENTS // block
    keep = before.numel() > 0
    launch(
        linear_act_finish, (-(-rows // height), -(-columns // block)), y.device,
        sums, bias, residual, y, before if keep else None, rows, columns // group, padded_rows,
        sums.stride(0) // group, y.stride(0) // group, residual_row // group,
        ACTIVATION=ACTIVATIONS.index(activation), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        KEEP=keep, ROUNDED=keep and rounded, SPLIT=split, UNIT=group, ROWS=height, COLUMNS=block,
        HALF=y.dtype in HALVES, num_warps=FINISH_WARPS,
    )  # fmt: skip


def activate(before: Tensor, activation: str) -> Tensor:
    """activation(before) for a matrix that is not empty."""
    y = torch.empty(before.shape, dtype=before.dtype, device=before.device)
    finish(before.contiguous(), 1, before.shape[0], None, activation, None, y, before.new_empty(0))
    return y


def backward(dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool) -> tuple[Tensor, Tensor]:
    """Compute (dz, the column sums of dz). If there is no activation, dz is empty. The sums are empty unless `sums`."""
    dz = dy.new_empty(dy.shape if activation != "none" else 0)
    total = dy.new_empty(dy.shape[1] if sums else 0)
    if dy.numel() == 0:
        return dz, total.zero_()
    require_triton()
    from rooftop.kernels.matmuls.triton_kernels import add_column_sums, linear_act_backward

    dy, saved = unit_columns(dy), saved.contiguous()
    rows, columns = dy.shape
    group = unit(columns, dy.stride(0))
    block = min(BACKWARD_COLUMNS, power_of_two(columns))
    blocks = -(-columns // block)
    wanted = max(1, BACKWARD_PROGRAMS_PER_SM * processors(dy) // blocks)
    # half as many rows in float32, so that registers do not spill
    height = BACKWARD_ROWS * 2 // dy.element_size()
    rows_of_chunk = -(-rows // (wanted * height)) * height
    chunks = -(-rows // rows_of_chunk)
    partial = torch.empty((chunks if sums else 0, columns), dtype=torch.float32, device=dy.device)
    launch(
        linear_act_backward, (blocks, chunks), dy.device,
        dy, saved, dz, partial, rows, columns // group, dy.stride(0) // group, rows_of_chunk,
        ACTIVATION=ACTIVATIONS.index(activation), OF_OUTPUT=of_output, SUM=sums, UNIT=group,
        ROWS=height, COLUMNS=block, HALF=dy.dtype in HALVES, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    if sums:
        grid = (-(-columns // SUM_OF_CHUNKS["COLUMNS"]),)
        launch(
            add_column_sums, grid, dy.device, partial, total, chunks, columns, HALF=dy.dtype in HALVES, **SUM_OF_CHUNKS
        )
    return dz, total


def _described_or_copied(t: Tensor, rows_only: bool = False) -> Tensor:
    """The matrix (M, N) itself if a tensor descriptor can describe it, else a copy. `rows_only`: also copy a matrix of
    which only the columns are contiguous.
    """
    if describable(t) and not (rows_only and t.stride(1) != 1):
        return t
    more = -t.shape[1] % (16 // t.element_size())
    return padded(t, columns=more)[:, : t.shape[1]] if more else t.clone(memory_format=torch.contiguous_format)


def _aligned_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """Allocate a matrix (rows, columns) whose rows begin at multiples of 16 bytes."""
    group = 16 // like.element_size()
    return like.new_empty((rows, -(-columns // group) * group))[:, :columns]
