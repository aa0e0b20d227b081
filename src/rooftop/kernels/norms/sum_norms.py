"""Layer norm and RMS norm of a sum, and the sum: what stands between the sublayers of a transformer.

total = x + input_bias + residual, y = norm(total): the bias of the last linear layer, the residual connection and the
norm in one pass. Bound by memory: x and residual are read once, y and total written once; backward reads dy, total and
the gradient that flows on past the norm, and writes the one gradient that x and residual share. The sum is taken in
float32 and rounded once; what is normalized is the rounded sum, so y is exactly the norm of the total that is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.norms import launches
from rooftop.kernels.norms.norms import (
    check_norm,
    contiguous,
    layer_norm_formula,
    layer_norm_reference,
    norm_backward,
    rms_eps,
    rms_norm_formula,
    rms_norm_reference,
    runs_reference,
    sizes_of,
)
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.dtypes import accumulator_dtype
from rooftop.kernels.operands.strided_rows import unit_columns
from rooftop.launch.operators import by_formula, computed_on_cpu, differentiable, in_pytorch, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED

# ---- reference -------------------------------------------------------------------------------------------------


def add_reference(x: Tensor, residual: Tensor | None, input_bias: Tensor | None) -> Tensor:
    """x + input_bias + residual in float32 (float64), rounded once to the dtype of x."""
    total = x.to(accumulator_dtype(x.dtype))
    for term in (input_bias, residual):
        total = total if term is None else total + term
    return total.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd) of rows x (M, N) in plain PyTorch; total is empty where nothing is added."""
    total = add_reference(x, residual, input_bias)
    y, mean, rstd = layer_norm_reference(total, weight, bias, eps, dtype)
    return y, total if adds(residual, input_bias) else x.new_empty(0), mean, rstd


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, total, rstd), likewise."""
    total = add_reference(x, residual, input_bias)
    y, rstd = rms_norm_reference(total, weight, eps, dtype)
    return y, total if adds(residual, input_bias) else x.new_empty(0), rstd


# ---- registration ----------------------------------------------------------------------------------------------


def adds(residual: Tensor | None, input_bias: Tensor | None) -> bool:
    """Whether the sum is another tensor than x."""
    return residual is not None or input_bias is not None


@operator("add_layer_norm")
def _add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd); total is empty where nothing is added."""
    if runs_reference(x):
        return add_layer_norm_reference(x, residual, input_bias, weight, bias, eps, dtype)
    residual = unit_columns(residual) if residual is not None else None
    parameters = contiguous(input_bias), contiguous(weight), contiguous(bias)
    y, written, average, rstd = launches.forward(unit_columns(x), residual, *parameters, eps, False, dtype)
    assert average is not None
    return y, x.new_empty(0) if written is None else written, average, rstd


@torch.library.register_fake("rooftop::add_layer_norm")
def fake_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Also of the twin in CUDA C++."""
    statistics = x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))
    total = x.new_empty(x.shape if adds(residual, input_bias) else 0)
    return x.new_empty(x.shape, dtype=dtype), total, statistics, torch.empty_like(statistics)


@operator("add_rms_norm")
def _add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, total, rstd), likewise."""
    if runs_reference(x):
        return add_rms_norm_reference(x, residual, input_bias, weight, eps, dtype)
    residual = unit_columns(residual) if residual is not None else None
    parameters = contiguous(input_bias), contiguous(weight), None
    y, written, _, rstd = launches.forward(unit_columns(x), residual, *parameters, eps, True, dtype)
    return y, x.new_empty(0) if written is None else written, rstd


@torch.library.register_fake("rooftop::add_rms_norm")
def _(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape if adds(residual, input_bias) else 0)
    return x.new_empty(x.shape, dtype=dtype), total, x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))


in_pytorch("add_layer_norm", add_layer_norm_reference)
in_pytorch("add_rms_norm", add_rms_norm_reference)


def save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Also of the twin in CUDA C++."""
    x, residual, input_bias, weight, bias, *_ = inputs
    _, total, mean, rstd = output
    _save(ctx, adds(residual, input_bias), input_bias)
    ctx.save_for_backward(total if ctx.adds else x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, input_bias, weight, *_ = inputs
    _, total, rstd = output
    _save(ctx, adds(residual, input_bias), input_bias)
    ctx.save_for_backward(total if ctx.adds else x, weight, None, None, rstd)
    ctx.mark_non_differentiable(rstd)


def _save(ctx: Any, adds: bool, input_bias: Tensor | None) -> None:
    ctx.adds = adds
    ctx.input_bias_dtype = input_bias.dtype if input_bias is not None else None
    ctx.set_materialize_grads(False)  # a total that is not used further must not cost a pass over zeros


def differentiate_layer_norm(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Also of the twin in CUDA C++."""
    wants = ctx.needs_input_grad  # x, residual, input_bias, weight, bias, eps, dtype
    return (*_gradients(ctx, dy, dtotal, [wants[3], wants[4]]), None, None)


def _differentiate_rms_norm(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    return (*_gradients(ctx, dy, dtotal, [ctx.needs_input_grad[3], False])[:4], None, None)


def _gradients(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Of x, residual, input_bias, weight, bias."""
    total, weight, bias, mean, rstd = ctx.saved_tensors
    wants = ctx.needs_input_grad
    dtotal = dtotal if ctx.adds else None  # what nothing was added to is given back by the caller, not by the operator
    dx, dweight, dbias = dtotal, None, None
    if dy is not None:
        dx, *dparameters = norm_backward(dy, dtotal, total, weight, bias, mean, rstd, mask)
        dweight, dbias = (t if wanted else None for t, wanted in zip(dparameters, mask, strict=True))
    dinput_bias = None
    if wants[2] and dx is not None:
        dinput_bias = dx.sum(0, dtype=accumulator_dtype(dx.dtype)).to(ctx.input_bias_dtype)
    return dx if wants[0] else None, dx if wants[1] else None, dinput_bias, dweight, dbias


def add_layer_norm_formula(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, None, None]:
    """Also of the twin in CUDA C++."""
    total = add_reference(x, residual, input_bias)
    return layer_norm_formula(total, weight, bias, eps, dtype)[0], total, None, None


def _add_rms_norm_formula(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, None]:
    total = add_reference(x, residual, input_bias)
    return rms_norm_formula(total, weight, eps, dtype)[0], total, None


by_formula("add_layer_norm", add_layer_norm_formula)
by_formula("add_rms_norm", _add_rms_norm_formula)
differentiable("add_layer_norm", differentiate_layer_norm, save_layer_norm)
differentiable("add_rms_norm", _differentiate_rms_norm, _save_rms_norm)


@cost_of("rooftop::add_layer_norm", "rooftop::add_layer_norm_cuda", "rooftop::add_rms_norm")
def _cost(call: Call) -> Cost:
    """1 an element for each term and for weight and bias, 5 for the layer norm or 3 for the RMS norm."""
    layer = "bias" in call
    terms = [call[name] for name in ("residual", "input_bias", "weight", *(("bias",) if layer else ()))]
    flops = (5 if layer else 3) + sum(t is not None for t in terms)
    x = call["x"]
    read = distinct_bytes([x, *terms])
    return Cost(read, distinct_bytes(call.out), {precision_of(x.dtype): flops * x.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def add_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer norm over the last dimensions of input + input_bias + residual, and that sum.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        residual: like input; None adds nothing.
        normalized_shape, weight, bias, eps: as of `torch.nn.functional.layer_norm`.
        input_bias: (*normalized_shape), added to each row of input.

    Returns:
        (y, total), both like input. total is rounded once, and y is its norm; it is input itself where nothing is
        added. Under a GPU's autocast y is float32, as PyTorch's norms, and total keeps the dtype of input, as its sums.

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point, or residual of another dtype than input.
        ValueError: shapes or devices that do not fit.
    """
    if _is_plain_sum(input, residual, normalized_shape, weight, bias, input_bias):
        total = add_reference(input, residual, input_bias)
        y = torch.nn.functional.layer_norm(total, input.shape[-1:], weight, bias, eps)
        return y, total if adds(residual, input_bias) else input
    name, parameters = "add_layer_norm", {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = check_norm(name, normalized_shape, input, residual, **parameters)
    flat, *terms = flat_arguments(shape, input, residual, input_bias, weight, bias)
    y, total, _, _ = _add_layer_norm(flat, *terms, eps, result_dtype("layer_norm", input))
    return y.reshape(input.shape), total.reshape(input.shape) if adds(residual, input_bias) else input


@recorded_whole
def add_rms_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dimensions of input + input_bias + residual, and that sum.

    Arguments, results and errors as of `add_layer_norm`; weight and eps as of `torch.nn.functional.rms_norm`.
    """
    name, parameters = "add_rms_norm", {"weight": weight, "input_bias": input_bias}
    shape = check_norm(name, normalized_shape, input, residual, **parameters)
    flat, *terms = flat_arguments(shape, input, residual, input_bias, weight)
    y, total, _ = _add_rms_norm(flat, *terms, rms_eps(input, eps), result_dtype("rms_norm", input))
    return y.reshape(input.shape), total.reshape(input.shape) if adds(residual, input_bias) else input


def _is_plain_sum(
    x: Tensor, residual: Tensor | None, normalized_shape: int | Sequence[int], *parameters: Tensor | None
) -> bool:
    """Whether all are float32 on the CPU and fit, so that PyTorch's layer norm does the same with less ado."""
    if INTERPRETED or x is None or not computed_on_cpu(x, residual, *parameters) or x.dim() == 0:
        return False
    last = x.shape[-1:]
    return (
        (normalized_shape == last[0] or normalized_shape == tuple(last))
        and x.dtype == torch.float32
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape))
        and all(t is None or (t.dtype == x.dtype and t.shape == last) for t in parameters)
    )


def flat_arguments(
    shape: tuple[int, ...], input: Tensor, residual: Tensor | None, *parameters: Tensor | None
) -> list[Tensor | None]:
    """input and residual as (M, N), parameters as (N,)."""
    rows, columns = sizes_of(input, shape)
    flat = [t.reshape(rows, columns) if t is not None else None for t in (input, residual)]
    return [*flat, *(t.reshape(columns) if t is not None else None for t in parameters)]
