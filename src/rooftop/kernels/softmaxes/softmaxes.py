"""Softmax and its logarithm along one dimension, of x * scale + mask.

y = exp(s - max s) / sum(exp(s - max s)), s = x * scale + mask. Online maximum and sum of long rows: Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax". Bound by memory at every size: forward reads x (and the
mask) and writes y, backward reads dy and y and writes dx. Rows that a program's registers hold are read once; longer
ones are read twice, the second time from L2 for as long as the rows in flight fit there, or by clusters of blocks
(clusters.py). Deterministic: no atomics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_dtype, check_finite, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, HALVES, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.softmaxes import launches
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    operator,
)
from rooftop.launch.symbolic import recorded_whole

# ---- reference -------------------------------------------------------------------------------------------------


def softmax_reference(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """Softmax (log: its logarithm) of x (..., N) in plain PyTorch; float32 inside, or float64 for float64 rows."""
    scores = x.to(accumulator_dtype(x.dtype)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.log_softmax(-1) if log else scores.softmax(-1)).to(dtype)


def softmax_backward_reference(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype
) -> Tensor:
    """dx; `mask` only where it is boolean: no gradient passes where it is False."""
    inside = accumulator_dtype(y.dtype)
    gradient, value = dy.to(inside), y.to(inside)
    of_rows = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    dx = of_rows(gradient, value, -1, inside) * scale
    return (dx if mask is None else dx.masked_fill(~mask, 0.0)).to(dtype)


# ---- implementations -------------------------------------------------------------------------------------------


def _forward(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """x (..., N), mask broadcastable to it."""
    compute = softmax_reference if by_reference(x) else launches.forward
    return compute(x, mask, scale, log, dtype)


def _backward(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    """dy, y (..., N); a boolean mask or none."""
    compute = softmax_backward_reference if by_reference(y) else launches.backward
    return compute(dy, y, mask, scale, log, dtype)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("softmax")
def _softmax(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    return _forward(x, mask, scale, log, dtype)


@torch.library.register_fake("rooftop::softmax")
def _(x: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


in_pytorch("softmax", softmax_reference)


@operator("softmax_backward")
def _softmax_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype
) -> Tensor:
    return _backward(dy, y, mask, scale, log, dtype)


@torch.library.register_fake("rooftop::softmax_backward")
def _(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    x, mask, scale, log, _ = inputs
    kept = mask if mask is not None and mask.dtype == torch.bool else None
    ctx.save_for_backward(output, kept)  # type: ignore[arg-type]
    ctx.scale, ctx.log, ctx.x_dtype = scale, log, x.dtype  # type: ignore[attr-defined]
    ctx.added = (mask.shape, mask.dtype) if mask is not None and mask.is_floating_point() else None  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
    y, mask = ctx.saved_tensors  # type: ignore[attr-defined]
    scale, log, dtype = ctx.scale, ctx.log, ctx.x_dtype  # type: ignore[attr-defined]
    if not ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
        return _softmax_backward(dy, y, mask, scale, log, dtype), None, None, None, None
    # The gradient of the scores, in full, is what a mask of numbers gets where it was repeated.
    wide = accumulator_dtype(dtype)
    dscores = _softmax_backward(dy, y, None, 1.0, log, wide)
    shape, mask_dtype = ctx.added  # type: ignore[attr-defined]
    return (dscores * scale).to(dtype), dscores.sum_to_size(shape).to(mask_dtype), None, None, None


differentiable("softmax", _differentiate, _save)
by_formula("softmax", softmax_reference)
differentiable_by_formula("softmax_backward", softmax_backward_reference)


@cost_of("rooftop::softmax")
def _forward_cost(call: Call) -> Cost:
    """Maximum, subtraction, exponential, sum and division (of the logarithm: subtraction); scale and mask 1 each."""
    x, mask = call["x"], call["mask"]
    flops = (5 + (call["scale"] != 1.0) + (mask is not None)) * x.numel()
    return Cost(distinct_bytes([x, mask]), distinct_bytes([call.out]), {precision_of(x.dtype): flops})


@cost_of("rooftop::softmax_backward")
def _backward_cost(call: Call) -> Cost:
    """Product and sum, difference and product (of the logarithm: exponential too, but no product in the sum)."""
    dy, y, mask = call["dy"], call["y"], call["mask"]
    flops = (4 + (call["scale"] != 1.0) + (mask is not None)) * y.numel()
    return Cost(distinct_bytes([dy, y, mask]), distinct_bytes([call.out]), {precision_of(y.dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """softmax(input * scale + mask) along `dim`; arguments as of `torch.nn.functional.softmax`, and two more.

    Args:
        input: any shape, bfloat16, float16, float32 or float64.
        dim: along which the results sum to one. Any but the last costs a transposed copy of `input`, and gives a
            result whose memory is laid out with `dim` last.
        dtype: to which `input` is cast first (from half to single precision: within the kernel).
        mask: broadcastable to `input`, on the same device: numbers are added; of booleans, False excludes an element
            (as in `torch.nn.functional.scaled_dot_product_attention`). The gradient of a mask of numbers costs two more
            passes.
        scale: a finite number.

    Returns:
        Like input. Rows of -inf alone (or excluded as a whole) and rows with NaN are NaN, as PyTorch's. Maximum, sum
        and exponentials are float32 (float64 for float64). Under a GPU's autocast the result is float32, as
        PyTorch's.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: dimensions, shapes or devices that do not fit, a scale that is not finite.
    """
    return _along("softmax", input, dim, dtype, mask, scale)


@recorded_whole
def log_softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The logarithm of `softmax` with the same arguments, results and errors; excluded elements are -inf."""
    return _along("log_softmax", input, dim, dtype, mask, scale)


def _along(name: str, x: Tensor, dim: int, dtype: torch.dtype | None, mask: Tensor | None, scale: float) -> Tensor:
    _check(name, x, dim, dtype, mask, scale)
    if dtype is not None and not (dtype == torch.float32 and x.dtype in HALVES):
        x = x.to(dtype)
    if dtype is None:
        dtype = result_dtype(name, x)
    if x.dim() == 0:
        mask = None if mask is None else mask.reshape(1)
        return _softmax(x.reshape(1), mask, float(scale), name == "log_softmax", dtype).reshape(())
    if dim not in (-1, x.dim() - 1):
        mask = None if mask is None else mask.expand(x.shape).transpose(dim, -1)
        moved = x.transpose(dim, -1)
        return _softmax(moved, mask, float(scale), name == "log_softmax", dtype).transpose(dim, -1)
    return _softmax(x, mask, float(scale), name == "log_softmax", dtype)


def _check(name: str, x: Tensor, dim: int, dtype: torch.dtype | None, mask: Tensor | None, scale: float) -> None:
    check_tensors(name, None, ("mask",), input=x, mask=mask)
    if dtype is not None:
        check_dtype(name, "dtype", dtype, FLOATS)
    else:
        check_dtype(name, "input", x.dtype, FLOATS, "; or give dtype")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int, got {dim!r}")
    if not -max(1, x.dim()) <= dim < max(1, x.dim()):
        raise ValueError(f"{name}: dim {dim} is out of range for an input of shape {tuple(x.shape)}")
    check_finite(name, "scale", scale)
    if mask is None:
        return
    if mask.dtype not in (*FLOATS, torch.bool):
        raise TypeError(f"{name}: mask must be boolean or floating point, got {mask.dtype}")
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"{name}: a mask of shape {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
