"""Convolutions with what follows them: y = activation(conv2d(x, weight, bias) + residual).

What a network consists of once its batch norms are folded (He et al. 2016, "Deep Residual Learning": the sum with the
shortcut comes before the activation). Bound by the tensor cores where windows are 3 x 3, by memory where they are
1 x 1: there a pass of its own for bias, sum and activation moves more bytes than the convolution. Here they are applied
to the float32 sums before they are stored, in an implicit product of matrices (Chetlur et al. 2014, "cuDNN", section
3): channels last and half precision. Deterministic: no atomics touch a sum.

`tables.py` chooses by the shape which kernel with which parameters, or cuDNN or cuBLAS, and `conv_act_plan`
says what is taken and why; `launches.py` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.convolutions.launches import forward, plan_of
from rooftop.kernels.convolutions.tables import ConvPlan, Geometry
from rooftop.kernels.operands.activations import (
    ACTIVATIONS,
    FORWARD_FLOPS,
    OF_OUTPUT,
    activated,
    activation_backward_reference,
)
from rooftop.kernels.operands.autocasting import under_autocast
from rooftop.kernels.operands.checks import check_choice, check_same_dtype, check_shape, check_tensors, two_integers
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.launch.operators import (
    differentiable,
    in_pytorch,
    keeps_for_backward,
    no_tangents,
    operator,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole

Pair = int | Sequence[int]

# ---- reference -------------------------------------------------------------------------------------------------


def conv_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry, activation: str
) -> tuple[Tensor, Tensor]:
    """(y, what was activated) in plain PyTorch; what follows the convolution is float32, or float64 for float64."""
    g = geometry
    values = functional.conv2d(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)
    values = values.to(accumulator_dtype(x.dtype))
    if residual is not None:
        values = values + residual
    return activated(values, activation).to(x.dtype), values.to(x.dtype)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("conv_act")
def _conv_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    plan = plan_of(x, weight, bias, residual, geometry, activation, keep)
    if plan.backend == "reference":
        return _by_reference(x, weight, bias, residual, stride, padding, dilation, groups, activation, keep)
    y, before = forward(plan, x, weight, bias, residual, geometry, activation, keep)
    return _in_format(y, before, x, weight, keep)


def _by_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    y, before = conv_act_reference(x, weight, bias, residual, geometry, activation)
    return _in_format(y, before.clone() if before is y else before, x, weight, keep)


def _in_format(y: Tensor, before: Tensor, x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    memory_format = _format_of(x, weight)
    return (
        y.contiguous(memory_format=memory_format),
        before.contiguous(memory_format=memory_format) if keep else x.new_empty(0),
    )


@torch.library.register_fake("rooftop::conv_act")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    shape = (x.shape[0], weight.shape[0], *geometry.out)
    y = x.new_empty(shape).to(memory_format=_format_of(x, weight))
    return y, torch.empty_like(y) if keep else x.new_empty(0)


in_pytorch("conv_act", _by_reference)


def _format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Of the result: channels last if that of x or of the weights is, and could be another."""
    for t in (x, weight):
        if t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def _geometry(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    batch, channels, height, width = x.shape
    kernel = (weight.shape[2], weight.shape[3])
    (down, right), (lines, pixels), (apart, along) = stride, padding, dilation
    return Geometry(
        batch, channels, height, width, weight.shape[0], kernel, (down, right), (lines, pixels), (apart, along), groups
    )


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, residual, stride, padding, dilation, groups, activation, keep = inputs
    y, before = output
    ctx.options = (stride, padding, dilation, groups)  # type: ignore[attr-defined]
    needed = activation not in OF_OUTPUT
    ctx.activation, ctx.of_output = activation, not needed and not keep  # type: ignore[attr-defined]
    again = needed and not keep  # of a traced program
    ctx.biased = None if bias is None else [weight.shape[0]]  # type: ignore[attr-defined]
    saved = None if activation == "none" or again else before if keep else y
    ctx.save_for_backward(x, weight, saved, *((bias, residual) if again else (None, None)))  # type: ignore[arg-type]
    ctx.mark_non_differentiable(before)
    ctx.set_materialize_grads(False)  # no zeros for what was activated


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor | None, _before: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    if torch.is_grad_enabled():  # create_graph: what was saved does not know how it depends on x
        raise NotImplementedError(
            "conv_act has no second derivative: for one, use torch.nn.functional.conv2d in the part that is "
            "differentiated twice"
        )
    x, weight, saved, bias, residual = ctx.saved_tensors  # type: ignore[attr-defined]
    for_x, for_weight, for_bias, for_residual, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
    dz = dy
    if ctx.activation != "none":  # type: ignore[attr-defined]
        if saved is None:
            saved = _activated(x, weight, bias, residual, *ctx.options)  # type: ignore[attr-defined]
        dz = activation_backward_reference(dy, saved, ctx.activation, ctx.of_output).to(dy.dtype)  # type: ignore[attr-defined]
    dx = dweight = dbias = None
    if for_x or for_weight or for_bias:
        stride, padding, dilation, groups = ctx.options  # type: ignore[attr-defined]
        dx, dweight, dbias = torch.ops.aten.convolution_backward(
            dz, x, weight, ctx.biased, stride, padding, dilation, False, [0, 0], groups,  # type: ignore[attr-defined]
            [for_x, for_weight, for_bias],
        )  # fmt: skip
    return dx, dweight, dbias, dz if for_residual else None, *(None,) * 6


@without_autocast
def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *options: Any) -> Tensor:
    """What is activated."""
    stride, padding, dilation, groups = options
    before = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return before if residual is None else before + residual


differentiable("conv_act", _differentiate, _save)


@cost_of("rooftop::conv_act")
def _cost(call: Call) -> Cost:
    """The convolution, and for each result bias, residual and activation. Reads what windows touch."""
    from rooftop.cost.formulas.windows import touched_bytes

    x, weight, bias, residual = call["x"], call["weight"], call["bias"], call["residual"]
    y: Tensor = call.results[0]
    each = FORWARD_FLOPS[call["activation"]] + (bias is not None) + (residual is not None)
    product = matrix_precision(x, convolution=True)
    flops: dict[str, int] = {product: 2 * y.numel() * (weight.numel() // max(weight.shape[0], 1))}
    precision = precision_of(x.dtype)
    flops[precision] = flops.get(precision, 0) + each * y.numel()
    windows = (y.shape[2:], weight.shape[2:], call["stride"], call["padding"], call["dilation"])
    read = touched_bytes(x, *windows) + distinct_bytes([weight, bias, residual])
    return Cost(read, distinct_bytes(call.out), flops)


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def conv_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """activation(conv2d(input, weight, bias) + residual); arguments as of `torch.nn.functional.conv2d`.

    Fastest where input and weight are channels last in half precision, as `.to(memory_format=torch.channels_last)`
    makes them.

    Args:
        input: (N, C, H, W), bfloat16, float16, float32 or float64.
        weight: (O, C / groups, KH, KW), same dtype.
        bias: (O,), same dtype.
        residual: (N, O, OH, OW), the result's shape, same dtype; under autocast of any of these dtypes.
        stride, padding, dilation: a number, or one for lines and one for pixels of a line.
        groups: of channels that do not see each other.
        activation: None (or "none"), "relu", "gelu", "gelu_tanh" (as `gelu(approximate="tanh")`), "silu" or "sigmoid".

    Returns:
        (N, O, OH, OW), channels last if input or weight is. Bias, residual and activation are float32 (float64 for
        float64); under autocast the operands are cast as `conv2d`'s.

    Raises:
        TypeError: no dense tensors, dtypes that do not fit, or sizes that are no integers.
        ValueError: shapes, sizes or devices that do not fit, or an unknown activation.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    prepared = _prepared("conv_act", input, weight, bias, residual, stride, padding, dilation, groups, activation)
    x, weight, bias, residual, later, geometry, after = prepared
    tensors = (x, weight, bias, residual)
    no_tangents("conv_act", *tensors, instead="torch.nn.functional.conv2d")
    g, now = geometry, after if later is None else "none"
    y = _conv_act(*tensors, g.stride, g.padding, g.dilation, g.groups, now, _keeps(now, tensors))[0]
    return y if later is None else activated(y + later, after)


def conv_act_plan(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str | None = None,
) -> ConvPlan:
    """How `conv_act` with these arguments is computed, and why; arguments and errors are the same.

    Nothing is computed. As in the call, it matters whether a gradient will be needed.
    """
    prepared = _prepared("conv_act_plan", input, weight, bias, residual, stride, padding, dilation, groups, activation)
    x, weight, bias, residual, later, geometry, after = prepared
    now = after if later is None else "none"
    return plan_of(x, weight, bias, residual, geometry, now, _keeps(now, (x, weight, bias, residual)))


def _keeps(activation: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether backward will need what is activated, and not only the result."""
    return activation not in OF_OUTPUT and keeps_for_backward(*tensors)


Prepared = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Geometry, str]


def _prepared(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Pair, padding: Pair,
    dilation: Pair, groups: int, activation: str | None,
) -> Prepared:  # fmt: skip
    """The arguments, checked and cast as autocast says; a residual that is to be added later, since under autocast one
    of another dtype makes the sum wider, as in PyTorch; the shapes; the activation's name."""
    check_tensors(name, FLOATS, ("bias", "residual"), input=x, weight=weight, bias=bias, residual=residual)
    after = "none" if activation is None else activation
    check_choice(name, "activation", after, ACTIVATIONS, "None or ")
    strides, dilations = two_integers(name, "stride", stride, 1), two_integers(name, "dilation", dilation, 1)
    paddings = two_integers(name, "padding", padding, 0)
    if type(groups) is not int or groups < 1:
        raise ValueError(f"{name}: groups must be an integer of at least 1, got {groups!r}")
    shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"{name}: expected input (N, C, H, W) and weight (O, C / groups, KH, KW), got {shapes} with groups={groups}"
        )
    if min(*weight.shape, *x.shape[2:]) < 1:
        raise ValueError(f"{name}: expected pixels, channels and a window of at least 1, got {shapes}")
    geometry = _geometry(x, weight, strides, paddings, dilations, groups)
    if min(geometry.out) < 1:
        raise ValueError(
            f"{name}: the window does not fit into the input, {shapes} with padding={paddings}, dilation={dilations}: "
            "pad the input"
        )
    check_shape(name, "bias", bias, (weight.shape[0],))
    check_shape(name, "residual", residual, (x.shape[0], weight.shape[0], *geometry.out), ": use .expand()")
    later = None
    if under_autocast(x):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (t.to(narrow) if t is not None else None for t in (x, weight, bias))  # type: ignore[assignment]
        if residual is not None and residual.dtype != narrow:
            residual, later = None, residual
    check_same_dtype(name, "input", x, "cast one, or use autocast", weight=weight, bias=bias, residual=residual)
    return x, weight, bias, residual, later, geometry, after
