"""Launch the kernels of layer norm and RMS norm that the plans of `plans.py` select.

`forward` and `backward` compute layer norm and RMS norm, of x or of a sum. `norms.py` and `sum_norms.py` have the
operators.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.norms import clusters
from rooftop.kernels.norms.plans import backward_call, choose_backward, choose_forward, forward_call
from rooftop.launch.triton_launch import launch, require_triton


@cache
def _kernel(name: str) -> Any:
    """The Triton kernel with this name. Calls after the first call only look up the kernel in a dictionary."""
    require_triton()
    from rooftop.kernels.norms.triton_kernels import long_norms, norms

    return getattr(norms, name, None) or getattr(long_norms, name)


def _rows(start: int, stop: int, tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The rows from `start` to `stop` of each tensor; None stays None."""
    return [t[start:stop] if t is not None else None for t in tensors]


def forward(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute (y, total, mean, rstd) with the kernels that the plan selects; y has the dtype `dtype`.

    total is None if nothing is added; mean is None for an RMS norm. x and residual (M, N) must have unit column stride,
    and the parameters (N,) must be contiguous.
    """
    call = forward_call(x, residual, input_bias, weight, bias, rms, dtype)
    plan = choose_forward(call)
    assert plan.backend != "reference"
    rows, device = call.rows, x.device
    shape = (rows, call.columns)
    y = torch.empty(shape, dtype=dtype, device=device)
    total = torch.empty(shape, dtype=call.dtype, device=device) if call.adds else None
    mean = None if rms else torch.empty(rows, dtype=torch.float32, device=device)
    rstd = torch.empty(rows, dtype=torch.float32, device=device)
    tensors: Any = (x, residual, y, total, mean, rstd)
    for step in plan.launches:
        whole = step.stop - step.start == rows
        xs, residuals, ys, totals, means, rstds = tensors if whole else _rows(step.start, step.stop, tensors)
        if step.staged is not None:
            clusters.launch(step.staged, device, xs, weight, bias, ys, means, rstds, *step.sizes, eps)
        else:
            arguments = (xs, residuals, input_bias, weight, bias, ys, totals, means, rstds, *step.sizes, eps)
            launch(_kernel(step.kernel), step.grid, device, *arguments, **step.constants)
    return y, total, mean, rstd


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> Tensor:
    """Compute dx, the gradient of x, including `dtotal`. The kernels also fill dweight and dbias, unless these are
    None.

    dy, dtotal and x (M, N) must have unit column stride, and weight (N,) must be contiguous. `mean` is None for an RMS
    norm.
    """
    device, sums = x.device, (dweight is not None, dbias is not None)
    call = backward_call(dy, dtotal, x, weight, mean is None, sums)
    plan = choose_backward(call)
    assert plan.backend != "reference"
    launches, rows, columns = plan.launches, call.rows, call.columns
    dx = torch.empty((rows, columns), dtype=call.dtype, device=device)
    slots = [clusters.ready(step.staged, device)[1] if step.staged else step.slots for step in launches]
    partial = torch.empty((sum(slots), 2, columns), dtype=torch.float32, device=device)
    tensors: Any = (dy, dtotal, x, mean, rstd, dx)
    done = 0
    for step, written in zip(launches, slots, strict=True):
        whole = step.stop - step.start == rows
        dys, dtotals, xs, means, rstds, dxs = tensors if whole else _rows(step.start, step.stop, tensors)
        sums_here = partial[done:] if done else partial
        arguments: tuple[Any, ...] = (dys, dtotals, xs, weight, means, rstds, dxs, sums_here)
        if step.kernel == "norm_row_sums":
            row_sums = torch.empty((3, step.stop - step.start), dtype=torch.float32, device=device)
            arguments = (dys, xs, weight, means, rstds, row_sums)
        elif step.kernel == "norm_backward_long":
            arguments = (dys, dtotals, xs, weight, means, rstds, row_sums, dxs, sums_here)
        elif step.kernel == "add_partial_sums":
            arguments = (partial, dweight, dbias, done, columns)
        if step.staged is not None:
            clusters.launch(step.staged, device, dys, xs, weight, means, rstds, dxs, sums_here, *step.sizes)
        else:
            launch(_kernel(step.kernel), step.grid, device, *arguments, *step.sizes, **step.constants)
        done += written
    return dx
