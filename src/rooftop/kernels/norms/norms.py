"""Layer norm and RMS norm over the last dimensions.

y = (x - mean) / sqrt(var + eps) * weight + bias (Ba, Kiros and Hinton 2016, "Layer Normalization") and
y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"). Bound by
memory at every size: forward reads x and writes y, backward reads dy and x and writes dx. The backward kernel sums the
gradients of weight and bias in the same pass, in float32 registers of persistent programs, and adds the programs'
partial sums in a fixed order: no atomics, the same bits each time. `sum_norms.py` has both norms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.norms import launches
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.operands.strided_rows import unit_columns
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    operator,
)
from rooftop.launch.symbolic import recorded_whole

# ---- reference -------------------------------------------------------------------------------------------------


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of rows x (M, N) by PyTorch's operator, y in `dtype`; statistics float32, of float64 float64."""
    inside, columns = accumulator_dtype(x.dtype), x.shape[1]
    x = x.to(dtype)
    weight, bias = _alike(x, weight, inside), None if bias is None else bias.to(inside)
    y, mean, rstd = torch.native_layer_norm(x, [columns], weight, bias, eps)
    return y, mean.to(inside).reshape(-1), rstd.to(inside).reshape(-1)


def _alike(x: Tensor, weight: Tensor | None, inside: torch.dtype) -> Tensor | None:
    """The weight in the statistics' dtype; beside half precision there is one, else PyTorch rounds the statistics."""
    if weight is None and x.dtype != inside:
        return torch.ones(x.shape[1], dtype=inside, device=x.device)
    return None if weight is None else weight.to(inside)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(y, rstd), likewise, in the order in which PyTorch computes it."""
    values = x.to(accumulator_dtype(x.dtype))
    rstd = (values.square().mean(1, keepdim=True) + eps).rsqrt()
    y = values * rstd
    return (y if weight is None else y * weight).to(dtype), rstd.squeeze(1)


def norm_backward_reference(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx + dtotal, dweight, dbias), the latter two of (N,) in the statistics' dtype and None where `mask` is False.

    mean: None of an RMS norm.
    """
    if mean is None:
        dx, dweight = _rms_norm_gradients(dy.to(rstd.dtype), x.to(rstd.dtype), weight, rstd[:, None])
        dbias = None
    elif x.dtype == rstd.dtype:
        beside = (mean[:, None], rstd[:, None], None if weight is None else weight.to(x.dtype), x.new_empty(x.shape[1]))
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.to(x.dtype), x, [x.shape[1]], *beside, [True, mask[0], mask[1]]
        )
    else:
        dx, dweight, dbias = _layer_norm_gradients(dy.to(rstd.dtype), x.to(rstd.dtype), weight, mean, rstd[:, None])
    return (dx if dtotal is None else dx + dtotal).to(x.dtype), dweight if mask[0] else None, dbias if mask[1] else None


def _layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), not rounded to half precision; what cancels in PyTorch's operator is subtracted first."""
    centred = x - mean[:, None]
    normal = (centred - centred.mean(1, keepdim=True)) * rstd  # the mean is rounded: the rest of it is corrected
    gradient = dy if weight is None else dy * weight
    projected = normal * (gradient * normal).mean(1, keepdim=True)
    return (gradient - gradient.mean(1, keepdim=True) - projected) * rstd, (dy * normal).sum(0), dy.sum(0)


def _rms_norm_gradients(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight), products and sums in the order in which autograd takes those of PyTorch's."""
    dweight = (dy * (x * rstd)).sum(0)
    gradient = dy if weight is None else dy * weight
    dmean = (gradient * x).sum(1, keepdim=True) * -0.5 * rstd.pow(3) / x.shape[1]  # of the mean square
    return gradient * rstd + dmean * (2 * x), dweight


def runs_reference(x: Tensor) -> bool:
    """Whether plain PyTorch computes it, and no kernel: also rows of no elements, which have nothing to launch for."""
    return x.dtype == torch.float64 or x.shape[1] == 0 or without_kernels(x.device)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("layer_norm")
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = unit_columns(x), contiguous(weight), contiguous(bias)
    if runs_reference(x):
        return layer_norm_reference(x, weight, bias, eps, dtype)
    y, _, mean, rstd = launches.forward(x, None, None, weight, bias, eps, rms=False, dtype=dtype)
    assert mean is not None
    return y, mean, rstd


@torch.library.register_fake("rooftop::layer_norm")
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=dtype), statistics, torch.empty_like(statistics)


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = unit_columns(x), contiguous(weight)
    if runs_reference(x):
        return rms_norm_reference(x, weight, eps, dtype)
    y, _, _, rstd = launches.forward(x, None, None, weight, None, eps, rms=True, dtype=dtype)
    return y, rstd


@torch.library.register_fake("rooftop::rms_norm")
def _(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))


in_pytorch("layer_norm", layer_norm_reference)
in_pytorch("rms_norm", rms_norm_reference)


@operator("norm_backward")
def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of all the norms; `mask`: which of weight and bias need a gradient, the others are empty.

    dtotal: a gradient that flows to x past the norm. mean: None of an RMS norm.
    """
    dweight, dbias = _parameter_gradients(x, weight, bias, mask)
    dy, x, weight = unit_columns(dy), unit_columns(x), contiguous(weight)
    dtotal = None if dtotal is None else unit_columns(dtotal)
    if runs_reference(x):
        dx, *sums = norm_backward_reference(dy, dtotal, x, weight, mean, rstd, mask)
        dweight, dbias = (t if s is None else s.to(t.dtype) for s, t in zip(sums, (dweight, dbias), strict=True))
        return dx, dweight, dbias
    wanted = (dweight if mask[0] else None, dbias if mask[1] else None)
    dx = launches.backward(dy, dtotal, x, weight, mean, rstd, *wanted)
    return dx, dweight, dbias


@torch.library.register_fake("rooftop::norm_backward")
def _(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = _parameter_gradients(x, weight, bias, mask)
    return x.new_empty(x.shape), dweight, dbias


def _parameter_gradients(x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients of weight and bias; nothing where none is wanted."""
    wanted = [t if needed else None for t, needed in zip((weight, bias), mask, strict=True)]
    return [x.new_empty(0) if t is None else x.new_empty(t.shape, dtype=t.dtype) for t in wanted]


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """The parameter, copied where it has gaps; None stays None."""
    return parameter.contiguous() if parameter is not None else None


Context = torch.autograd.function.FunctionCtx


def _save_layer_norm(ctx: Context, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, *_ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # statistics have no gradient: no zeros for them


def _differentiate_layer_norm(
    ctx: Context, dy: Tensor | None, _mean: Tensor | None, _rstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
    if dy is None:
        return (None,) * 5
    mask = list(ctx.needs_input_grad[1:3])  # type: ignore[attr-defined]
    dx, dweight, dbias = norm_backward(dy, None, x, weight, bias, mean, rstd, mask)
    return dx, dweight if mask[0] else None, dbias if mask[1] else None, None, None


def _save_rms_norm(ctx: Context, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, *_ = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx: Context, dy: Tensor | None, _rstd: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
    if dy is None:
        return (None,) * 4
    mask = [ctx.needs_input_grad[1], False]  # type: ignore[attr-defined]
    dx, dweight, _ = norm_backward(dy, None, x, weight, None, None, rstd, mask)
    return dx, dweight if mask[0] else None, None, None


differentiable("layer_norm", _differentiate_layer_norm, _save_layer_norm)
differentiable("rms_norm", _differentiate_rms_norm, _save_rms_norm)


def layer_norm_formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, None, None]:
    """The operator written out, without statistics: the third derivatives of PyTorch's function are wrong (2.13)."""
    values = x.to(accumulator_dtype(x.dtype))
    centred = values - values.mean(1, keepdim=True)
    y = centred * (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype), None, None


def rms_norm_formula(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, None]:
    """Likewise."""
    inside = accumulator_dtype(x.dtype)
    weight = None if weight is None else weight.to(inside)
    return torch.nn.functional.rms_norm(x.to(inside), x.shape[1:], weight, eps).to(dtype), None


def _backward_formula(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight and dbias as functions of dy, x and weight: of x also through the statistics."""
    slope, values = dy.to(rstd.dtype), x.to(rstd.dtype)
    centred = values if mean is None else values - values.mean(1, keepdim=True)
    square = centred.square().mean(1, keepdim=True)
    rate = (square - square.detach() + rstd.detach()[:, None].pow(-2)).rsqrt()  # rstd, and how it depends on x
    normal = centred * rate
    dweight = (slope * normal).sum(0).to(weight.dtype) if weight is not None and mask[0] else None
    dbias = slope.sum(0).to(bias.dtype) if bias is not None and mask[1] else None
    weighted = slope if weight is None else slope * weight
    along = 0.0 if mean is None else weighted.mean(1, keepdim=True)
    dx = (weighted - along - normal * (weighted * normal).mean(1, keepdim=True)) * rate
    return (dx if dtotal is None else dx + dtotal).to(x.dtype), dweight, dbias


by_formula("layer_norm", layer_norm_formula)
by_formula("rms_norm", rms_norm_formula)
differentiable_by_formula("norm_backward", _backward_formula)


@cost_of("rooftop::layer_norm")
def _layer_norm_cost(call: Call) -> Cost:
    """Statistics 3 an element, centring and scaling 2, weight and bias 1 each."""
    x, weight, bias = call["x"], call["weight"], call["bias"]
    flops = (5 + (weight is not None) + (bias is not None)) * x.numel()
    return Cost(distinct_bytes([x, weight, bias]), distinct_bytes(call.out), {precision_of(x.dtype): flops})


@cost_of("rooftop::rms_norm")
def _rms_norm_cost(call: Call) -> Cost:
    """Squares and their sum 2 an element, scaling 1, weight 1."""
    x, weight = call["x"], call["weight"]
    flops = (3 + (weight is not None)) * x.numel()
    return Cost(distinct_bytes([x, weight]), distinct_bytes(call.out), {precision_of(x.dtype): flops})


@cost_of("rooftop::norm_backward")
def _backward_cost(call: Call) -> Cost:
    """Normalizing 2 an element (RMS: 1), dx 7 (5), weight 1, dtotal 1, 2 and 1 for the sums of weight and bias."""
    x, weight, mask = call["x"], call["weight"], call["mask"]
    per_element = 9 if call["mean"] is not None else 6
    per_element += (weight is not None) + (call["dtotal"] is not None) + 2 * mask[0] + mask[1]
    read = [call["dy"], call["dtotal"], x, weight, call["mean"], call["rstd"]]
    written = [call.out[0], *(t for t, wanted in zip(call.out[1:], mask, strict=True) if wanted)]
    return Cost(distinct_bytes(read), distinct_bytes(written), {precision_of(x.dtype): per_element * x.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the last dimensions; arguments as of `torch.nn.functional.layer_norm`.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        normalized_shape: the dimensions that are normalized together; one int is one dimension.
        weight, bias: (*normalized_shape) on the same device, of any of these dtypes.
        eps: added to the variance.

    Returns:
        Like input; under a GPU's autocast float32, as PyTorch's. Statistics are float32 (float64 for float64).

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
    """
    shape = check_norm("layer_norm", normalized_shape, input, None, weight=weight, bias=bias)
    dtype = result_dtype("layer_norm", input)
    if input.dim() == 2 and len(shape) == 1:
        return _layer_norm(input, weight, bias, eps, dtype)[0]  # type: ignore[no-any-return]
    rows, columns = sizes_of(input, shape)
    weight, bias = (t.reshape(columns) if t is not None else None for t in (weight, bias))
    y, _, _ = _layer_norm(input.reshape(rows, columns), weight, bias, eps, dtype)
    return y.reshape(input.shape)  # type: ignore[no-any-return]


@recorded_whole
def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMS norm over the last dimensions; arguments as of `torch.nn.functional.rms_norm`.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        normalized_shape: the dimensions that are normalized together; one int is one dimension.
        weight: (*normalized_shape) on the same device, of any of these dtypes.
        eps: added to the mean square; None is that of float32 (float64 for float64), as PyTorch's kernels take.

    Returns:
        Like input; under a GPU's autocast float32, as PyTorch's. Statistics are float32 (float64 for float64).

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
    """
    shape = check_norm("rms_norm", normalized_shape, input, None, weight=weight)
    eps, dtype = rms_eps(input, eps), result_dtype("rms_norm", input)
    if input.dim() == 2 and len(shape) == 1:
        return _rms_norm(input, weight, eps, dtype)[0]  # type: ignore[no-any-return]
    rows, columns = sizes_of(input, shape)
    weight = weight.reshape(columns) if weight is not None else None
    y, _ = _rms_norm(input.reshape(rows, columns), weight, eps, dtype)
    return y.reshape(input.shape)  # type: ignore[no-any-return]


# ---- what all norms check and do with their arguments ------------------------------------------------------------


def rms_eps(x: Tensor, eps: float | None) -> float:
    """`eps`, or PyTorch's default: the machine epsilon of the statistics' dtype."""
    return torch.finfo(accumulator_dtype(x.dtype)).eps if eps is None else eps


def sizes_of(x: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of x."""
    return math.prod(x.shape[: x.dim() - len(shape)]), math.prod(shape)


def check_norm(
    name: str,
    normalized_shape: int | Sequence[int],
    input: Tensor,
    residual: Tensor | None,
    **parameters: Tensor | None,
) -> tuple[int, ...]:
    """normalized_shape as a tuple, if the arguments of the norm `name` fit; TypeError or ValueError if not."""
    shape = _shape(name, normalized_shape)
    check_tensors(name, FLOATS, ("residual", *parameters), input=input, residual=residual, **parameters)
    if tuple(input.shape[-len(shape) :]) != shape or input.dim() < len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected input of shape (..., {expected}), got {tuple(input.shape)}")
    for argument, tensor in parameters.items():
        check_shape(name, argument, tensor, shape)
    if residual is not None and residual.dtype != input.dtype:
        raise TypeError(f"{name}: expected residual of {input.dtype} as input, got {residual.dtype}")
    if residual is not None and residual.shape != input.shape:
        like, got = tuple(input.shape), tuple(residual.shape)
        raise ValueError(f"{name}: expected residual of shape {like} as input, got {got}")
    return shape


def _shape(name: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes: Any = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"{name}: normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}")
    shape: tuple[int, ...] = tuple(sizes)
    if not shape:
        raise ValueError(f"{name}: normalized_shape must name at least one dimension, got {shape}")
    return shape
