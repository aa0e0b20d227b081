"""Launch the kernels of reductions that the plans of `plans.py` select.

`forward` and `backward` serve the operators in `reductions.py`. `reduce_into` adds up the elements or partial sums
that kernels of fused expressions have stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.reductions.plans import PLACES, Direction, ReductionPlan, choose
from rooftop.launch.counters import counters
from rooftop.launch.strides import same_layout
from rooftop.launch.triton_launch import launch, launches_early, processors, require_triton


def plan_of(
    x: Tensor, kind: str, dims: Sequence[int], result: torch.dtype, direction: Direction = "forward",
    counted: bool = True,
) -> ReductionPlan:  # fmt: skip
    """The plan that `choose` returns for x: the tensor to reduce or, in backward, the gradient to compute."""
    return choose(
        kind, direction, x.shape, x.stride(), tuple(dims), x.dtype, result,
        None if without_kernels(x.device) else processors(x), launches_early(x.device), counted,
    )  # fmt: skip


def forward(
    plan: ReductionPlan, out: Tensor, x: Tensor, kind: str, dims: Sequence[int], reference: Tensor | None = None
) -> None:
    """Write the reduction of x over `dims` to `out`, which must be contiguous. If `kind` counts the elements that equal
    a maximum or minimum, `reference` contains the maxima or minima.
    """
    require_triton()
    from rooftop.kernels.reductions import triton_kernels as kernels

    counter = None
    if plan.backend == "last_combines":
        counter = counters(x.device, plan.launches[0].grid[0])
        if counter is None:
            plan = plan_of(x, kind, dims, out.dtype, counted=False)
    x, out = _bytes_of(_as_matrix(x, dims) if plan.copied else x), _bytes_of(out)
    tiles, *combination = plan.launches
    partials, places = out, out
    if plan.backend != "whole":
        shape = (tiles.grid[1], out.numel())
        partials = torch.empty(shape, dtype=plan.accumulator, device=x.device)
        places = torch.empty(shape, dtype=torch.int64, device=x.device) if kind in PLACES else out
    accumulator = kernels.ACCUMULATORS[plan.accumulator]
    memory = (x, out if reference is None else reference, out, partials, places, out if counter is None else counter)
    launch(
        kernels.reduce_tiles, tiles.grid, x.device, *memory, *tiles.numbers, ACCUMULATOR=accumulator, **tiles.constants
    )
    for each in combination:
        parts = (partials, places, out)
        launch(
            kernels.combine_partials, each.grid, x.device, *parts, *each.numbers,
            ACCUMULATOR=accumulator, **each.constants,
        )  # fmt: skip


def reduce_into(out: Tensor, x: Tensor, kind: str, dims: Sequence[int]) -> None:
    """Write the reduction of x over `dims` to `out`, which must be contiguous."""
    forward(plan_of(x, kind, dims, out.dtype), out, x, kind, dims)


def backward(plan: ReductionPlan, dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: Sequence[int]) -> None:
    """Compute the gradient into `dx`, whose previous contents are not read. The memory of dx must have no gaps."""
    require_triton()
    x = x if same_layout(x, dx) else torch.empty_like(dx).copy_(x)
    dy, y = dy.contiguous(), y.contiguous()
    if not plan.copied:
        _spread(plan, dx, dy, x, y, kind, dims)
        return
    matrix = _as_matrix(x, dims)
    gradient = torch.empty_like(matrix)
    _spread(plan, gradient, dy, matrix, y, kind, (1,))
    order = _matrix_order(x, dims)
    dx.permute(order).copy_(gradient.view([x.shape[dim] for dim in order]))


def _spread(plan: ReductionPlan, dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: Sequence[int]) -> None:
    """Write the gradient to dx, by the kernels of the plan. dx and x have the same memory layout."""
    from rooftop.kernels.reductions import triton_kernels as kernels

    (last,) = plan.launches
    if plan.backend == "share":
        launch(kernels.share_gradient, last.grid, x.device, x, y, dy, dx, *last.numbers, **last.constants)
        return
    ties = y
    if plan.ties is not None:
        ties = torch.empty(y.shape, dtype=torch.float32, device=x.device)
        forward(plan.ties, ties, x, "absolute_ties" if kind == "norm_inf" else "ties", dims, reference=y)
    launch(kernels.spread_gradient, last.grid, x.device, x, y, dy, ties, dx, *last.numbers, **last.constants)


def _bytes_of(x: Tensor) -> Tensor:
    """View a boolean tensor as bytes, which kernels can load. Return other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _as_matrix(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Copy a tensor to a matrix (kept, reduced)."""
    columns = math.prod(x.shape[dim] for dim in dims)
    return x.permute(_matrix_order(x, dims)).contiguous().reshape(-1, columns)


def _matrix_order(x: Tensor, dims: Sequence[int]) -> list[int]:
    """All dimensions of x: the kept dimensions, followed by the reduced dimensions."""
    return [dim for dim in range(x.dim()) if dim not in dims] + list(dims)
