"""Convolutions fused with the operations that follow them: y = activation(conv2d(x, weight, bias) + residual).

After its batch norms are folded into the weights, a convolutional network consists of such operations (He et al. 2016,
"Deep Residual Learning": the sum with the shortcut comes before the activation). Convolutions with 3 x 3 windows are
bound by the tensor cores, and convolutions with 1 x 1 windows by memory. For 1 x 1, a separate pass for bias, sum and
activation would move more bytes than the convolution. The kernel is an implicit matrix product (Chetlur et al. 2014,
"cuDNN", section 3) for images that are channels last, in half precision. The kernel applies bias, residual and
activation to the float32 sums before it stores them. No sum uses atomics, so results are deterministic.

For the shape of a call, `tables.py` chooses a kernel and its parameters, or cuDNN, or cuBLAS. `conv_act_plan` returns
the choice and its reason; `launches.py` launches the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.convolutions.launches import forward, plan_of
from rooftop.kernels.convolutions.tables import ConvPlan, Geometry
from rooftop.kernels.operands.activations import (
    ACTIVATIONS,
    FORWARD_FLOPS,
    OF_OUTPUT,
    activated,
    activation_backward_reference,
)
from rooftop.kernels.operands.autocasting import cast_beside_residual
from rooftop.kernels.operands.checks import check_choice, check_same_dtype, check_shape, check_tensors, two_integers
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.launch.operators import (
    declare,
    keeps_for_backward,
    no_second_derivative,
    no_tangents,
    without_autocast,
)
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

Pair = int | Sequence[int]
Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups

# ---- reference -------------------------------------------------------------------------------------------------


def conv_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry, activation: str
) -> tuple[Tensor, Tensor]:
    """Compute (y, input of the activation) in plain PyTorch. The operations after the convolution are float32, or
    float64 for float64.
    """
    g = geometry
    values = functional.conv2d(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)
    values = values.to(accumulator_dtype(x.dtype))
    if residual is not None:
        values = values + residual
    return activated(values, activation).to(x.dtype), values.to(x.dtype)


# ---- operator --------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs. `saved` is the activation's result if `of_output`, else the activation's input.

    `saved` is None if there is no activation. `saved` is also None in a program that torch.jit.trace, torch.export or
    make_fx traces, if the activation's gradient needs the activation's input. Backward then computes this input again,
    and only then are bias and residual kept.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    saved: Tensor | None
    options: Options
    biased: list[int] | None  # the shape of the bias; None without a bias
    activation: str
    of_output: bool


class ConvAct(NamedTuple):
    """A fused convolution: returns (y, input of the activation). The input of the activation is empty unless
    `keep_`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    activation: str
    keep_: bool

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.x, self.weight, *self[4:8])

    def run(self) -> tuple[Tensor, Tensor]:
        tensors, geometry = self[:4], self.geometry
        plan = plan_of(*tensors, geometry, self.activation, self.keep_)
        if plan.backend == "reference":
            return self.in_pytorch()
        y, before = forward(plan, *tensors, geometry, self.activation, self.keep_)
        return _in_format(y, before, self.x, self.weight, self.keep_)

    def fake(self) -> tuple[Tensor, Tensor]:
        shape = (self.x.shape[0], self.weight.shape[0], *self.geometry.out)
        y = self.x.new_empty(shape).to(memory_format=_format_of(self.x, self.weight))
        return y, torch.empty_like(y) if self.keep_ else self.x.new_empty(0)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        y, before = conv_act_reference(*self[:4], self.geometry, self.activation)
        return _in_format(y, before.clone() if before is y else before, self.x, self.weight, self.keep_)

    def keep(self, made: tuple[Tensor, Tensor]) -> Kept:
        y, before = made
        needed = self.activation not in OF_OUTPUT
        again = needed and not self.keep_  # in a traced program
        saved = None if self.activation == "none" or again else before if self.keep_ else y
        bias, residual = (self.bias, self.residual) if again else (None, None)
        biased = None if self.bias is None else [self.weight.shape[0]]
        of_output = not needed and not self.keep_
        return Kept(self.x, self.weight, bias, residual, saved, self[4:8], biased, self.activation, of_output)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: autograd does not know how the saved tensor depends on x
            no_second_derivative("conv_act", "torch.nn.functional.conv2d")()
        x, weight, bias, residual, saved, options, biased, activation, of_output = kept
        dz = dy
        if activation != "none":
            saved = _activated(x, weight, bias, residual, *options) if saved is None else saved
            dz = activation_backward_reference(dy, saved, activation, of_output).to(dy.dtype)
        dx = dweight = dbias = None
        if any(wanted[:3]):
            stride, padding, dilation, groups = options
            dx, dweight, dbias = torch.ops.aten.convolution_backward(
                dz, x, weight, biased, stride, padding, dilation, False, [0, 0], groups, list(wanted[:3])
            )
        return dx, dweight, dbias, dz if wanted[3] else None

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops of the convolution, and of bias, residual and activation for each element of the result. Only pixels
        inside windows count as read.
        """
        from rooftop.cost.formulas.windows import touched_bytes

        (x, weight, bias, residual), y = self[:4], made[0]
        each = FORWARD_FLOPS[self.activation] + (bias is not None) + (residual is not None)
        product = matrix_precision(x, convolution=True)
        flops: dict[str, int] = {product: 2 * y.numel() * (weight.numel() // max(weight.shape[0], 1))}
        precision = precision_of(x.dtype)
        flops[precision] = flops.get(precision, 0) + each * y.numel()
        windows = (y.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation)
        read = touched_bytes(x, *windows) + distinct_bytes([weight, bias, residual])
        return Cost(read, distinct_bytes(made), flops)


def _without_cudnn(arguments: Sequence[Any]) -> str | None:
    """The PyTorch setting on which the plan depends: None if cuDNN is enabled, otherwise "without cuDNN"."""
    return None if torch.backends.cudnn.enabled else "without cuDNN"


_conv_act = declare("conv_act", ConvAct, slopes=1, known=_without_cudnn)


def _in_format(y: Tensor, before: Tensor, x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Return y and `before` in the memory format of the result; `before` is empty unless `keep`."""
    memory_format = _format_of(x, weight)
    before = before.contiguous(memory_format=memory_format) if keep else x.new_empty(0)
    return y.contiguous(memory_format=memory_format), before


def _format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format of the result: channels last if x or the weights are, and if the shape distinguishes the
    formats.
    """
    for t in (x, weight):
        if t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def geometry_of(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    """The `Geometry` of a convolution with the arguments of `torch.ops.aten.convolution`."""
    batch, channels, height, width = x.shape
    kernel = (weight.shape[2], weight.shape[3])
    (down, right), (lines, pixels), (apart, along) = stride, padding, dilation
    return Geometry(
        batch, channels, height, width, weight.shape[0], kernel, (down, right), (lines, pixels), (apart, along), groups
    )


@without_autocast
def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *options: Any) -> Tensor:
    """Recompute the input of the activation, from the inputs of the convolution."""
    stride, padding, dilation, groups = options
    before = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return before if residual is None else before + residual


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
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
    """activation(conv2d(input, weight, bias) + residual), with the arguments of `torch.nn.functional.conv2d`.

    The operator is fastest if input and weight are channels last (`.to(memory_format=torch.channels_last)`) in half
    precision.

    Args:
        input: (N, C, H, W), bfloat16, float16, float32 or float64.
        weight: (O, C / groups, KH, KW), with input's dtype.
        bias: (O,), with input's dtype.
        residual: (N, O, OH, OW), the result's shape, with input's dtype; under autocast, any dtype that input may have.
        stride, padding, dilation: a number, or a pair (vertical, horizontal).
        groups: number of channel groups, each convolved separately.
        activation: None (or "none"), "relu", "gelu", "gelu_tanh" (as `gelu(approximate="tanh")`), "silu", "sigmoid",
            "relu6", "hardswish" or "hardsigmoid".

    Returns:
        (N, O, OH, OW), channels last if input or weight is. Bias, residual and activation are computed in float32
        (float64 for float64). Autocast casts the operands as it casts those of `conv2d`.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, its dtype does not match, or a size is not an integer.
        ValueError: shapes, sizes or devices do not match, or the activation is unknown.
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
    """Return how `conv_act` would compute a call, and the reason, without computing it. Arguments and errors are those
    of `conv_act`, except for the errors about gradients. The plan, like the call, depends on whether a gradient will be
    needed.
    """
    prepared = _prepared("conv_act_plan", input, weight, bias, residual, stride, padding, dilation, groups, activation)
    x, weight, bias, residual, later, geometry, after = prepared
    now = after if later is None else "none"
    return plan_of(x, weight, bias, residual, geometry, now, _keeps(now, (x, weight, bias, residual)))


def _keeps(activation: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward must return the input of the activation as well, because backward will need it."""
    return activation not in OF_OUTPUT and keeps_for_backward(*tensors)


Prepared = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Geometry, str]


def _prepared(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Pair, padding: Pair,
    dilation: Pair, groups: int, activation: str | None,
) -> Prepared:  # fmt: skip
    """Check the arguments. Return x, weight, bias, the residual that the operator adds, the residual to add after the
    operator (at least one of both is None; see `cast_beside_residual`), the geometry and the activation's name.
    """
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
        raise ValueError(f"{name}: every size of input and weight except N must be at least 1, got {shapes}")
    geometry = geometry_of(x, weight, strides, paddings, dilations, groups)
    if min(geometry.out) < 1:
        raise ValueError(
            f"{name}: the window does not fit into the input, {shapes} with padding={paddings}, dilation={dilations}: "
            "pad the input"
        )
    check_shape(name, "bias", bias, (weight.shape[0],))
    check_shape(name, "residual", residual, (x.shape[0], weight.shape[0], *geometry.out), ": use .expand()")
    x, weight, bias, residual, later = cast_beside_residual(x, weight, bias, residual)
    check_same_dtype(name, "input", x, "cast one, or use autocast", weight=weight, bias=bias, residual=residual)
    return x, weight, bias, residual, later, geometry, after
