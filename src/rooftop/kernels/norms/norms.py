"""Layer norm and RMS norm over the last dimensions.

y = (x - mean) / sqrt(var + eps) * weight + bias (Ba, Kiros and Hinton 2016, "Layer Normalization") and
y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"). Norms are
bound by memory at every size: forward reads x and writes y, backward reads dy and x and writes dx. The backward kernel
sums the gradients of weight and bias in the same pass, in float32 registers of persistent programs. The programs'
partial sums are added in a fixed order, without atomics, so results are deterministic. `sum_norms.py` has the layer
norm and the RMS norm of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.norms import launches
from rooftop.kernels.norms.plans import without_kernels
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_shape, check_tensors, finite_number
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import device_facts
from rooftop.kernels.operands.strided_rows import unit_columns
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------

Gradients = tuple[Tensor | None, ...]


class Statistics(NamedTuple):
    """The values that backward needs for rows x (M, N); `mean` is None for an RMS norm."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor

    def gradients(self, dy: Tensor, dtotal: Tensor | None, mask: list[bool]) -> Gradients:
        """(dx, dweight, dbias); see `NormBackward`."""
        dx, *parameters = norm_backward(dy, dtotal, *self, mask)
        return (dx, *(t if wanted else None for t, wanted in zip(parameters, mask, strict=True)))


class LayerNorm(NamedTuple):
    """Layer norm of rows x (M, N): returns (y, mean, rstd), y in `dtype`. The statistics are float32, or float64 for
    float64 input.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, eps, dtype = self
        x, weight, bias = unit_columns(x), contiguous(weight), contiguous(bias)
        if runs_reference(x):
            return LayerNorm(x, weight, bias, eps, dtype).in_pytorch()
        y, _, mean, rstd = launches.forward(x, None, None, weight, bias, eps, rms=False, dtype=dtype)
        assert mean is not None
        return y, mean, rstd

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        statistics = self.x.new_empty(self.x.shape[0], dtype=accumulator_dtype(self.x.dtype))
        return self.x.new_empty(self.x.shape, dtype=self.dtype), statistics, torch.empty_like(statistics)

    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor]:
        inside, columns = accumulator_dtype(self.x.dtype), self.x.shape[1]
        x = self.x.to(self.dtype)
        weight = _alike(x, self.weight, inside)
        bias = None if self.bias is None else self.bias.to(inside)
        y, mean, rstd = torch.native_layer_norm(x, [columns], weight, bias, self.eps)
        return y, mean.to(inside).reshape(-1), rstd.to(inside).reshape(-1)

    def formula(self) -> tuple[Tensor, None, None]:
        """The formula does not call PyTorch's layer norm, because that function's third derivatives are wrong in
        PyTorch 2.13.
        """
        values = self.x.to(accumulator_dtype(self.x.dtype))
        centred = values - values.mean(1, keepdim=True)
        y = centred * (centred.square().mean(1, keepdim=True) + self.eps).rsqrt()
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(self.dtype), None, None

    def keep(self, made: tuple[Tensor, Tensor, Tensor]) -> Statistics:
        return Statistics(self.x, self.weight, self.bias, made[1], made[2])

    @staticmethod
    def gradients(kept: Statistics, wanted: Sequence[bool], dy: Tensor) -> Gradients:
        return kept.gradients(dy, None, list(wanted[1:3]))

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops per element: 3 for the statistics, 2 for centring and scaling, 1 each for weight and bias."""
        flops = (5 + (self.weight is not None) + (self.bias is not None)) * self.x.numel()
        read = distinct_bytes([self.x, self.weight, self.bias])
        return Cost(read, distinct_bytes(made), {precision_of(self.x.dtype): flops})


class RmsNorm(NamedTuple):
    """RMS norm of rows x (M, N): returns (y, rstd), y in `dtype`. rstd is float32, or float64 for float64 input."""

    x: Tensor
    weight: Tensor | None
    eps: float
    dtype: torch.dtype

    def run(self) -> tuple[Tensor, Tensor]:
        x, weight, eps, dtype = self
        x, weight = unit_columns(x), contiguous(weight)
        if runs_reference(x):
            return RmsNorm(x, weight, eps, dtype).in_pytorch()
        y, _, _, rstd = launches.forward(x, None, None, weight, None, eps, rms=True, dtype=dtype)
        return y, rstd

    def fake(self) -> tuple[Tensor, Tensor]:
        rstd = self.x.new_empty(self.x.shape[0], dtype=accumulator_dtype(self.x.dtype))
        return self.x.new_empty(self.x.shape, dtype=self.dtype), rstd

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        """Compute the norm in PyTorch's order of operations."""
        values = self.x.to(accumulator_dtype(self.x.dtype))
        rstd = (values.square().mean(1, keepdim=True) + self.eps).rsqrt()
        y = values * rstd
        return (y if self.weight is None else y * self.weight).to(self.dtype), rstd.squeeze(1)

    def formula(self) -> tuple[Tensor, None]:
        inside = accumulator_dtype(self.x.dtype)
        weight = None if self.weight is None else self.weight.to(inside)
        y = torch.nn.functional.rms_norm(self.x.to(inside), self.x.shape[1:], weight, self.eps)
        return y.to(self.dtype), None

    def keep(self, made: tuple[Tensor, Tensor]) -> Statistics:
        return Statistics(self.x, self.weight, None, None, made[1])

    @staticmethod
    def gradients(kept: Statistics, wanted: Sequence[bool], dy: Tensor) -> Gradients:
        return kept.gradients(dy, None, [wanted[1], False])[:2]

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops per element: 2 for the squares and their sum, 1 for scaling, 1 for the weight."""
        flops = (3 + (self.weight is not None)) * self.x.numel()
        return Cost(distinct_bytes([self.x, self.weight]), distinct_bytes(made), {precision_of(self.x.dtype): flops})


class NormBackward(NamedTuple):
    """The gradients (dx, dweight, dbias) of a layer norm or an RMS norm. `mask`: whether weight and bias need a
    gradient; a gradient that is not needed is empty. `dtotal`: a gradient of x from another use of x, which is added to
    dx. `mean`: None for an RMS norm.
    """

    dy: Tensor
    dtotal: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    mask: list[bool]

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        dy, dtotal, x, weight, bias, mean, rstd, mask = self
        dweight, dbias = self._parameter_gradients()
        dy, x, weight = unit_columns(dy), unit_columns(x), contiguous(weight)
        dtotal = None if dtotal is None else unit_columns(dtotal)
        if runs_reference(x):
            dx, *sums = NormBackward(dy, dtotal, x, weight, bias, mean, rstd, mask).reference()
            dweight, dbias = (t if s is None else s.to(t.dtype) for s, t in zip(sums, (dweight, dbias), strict=True))
            return dx, dweight, dbias
        wanted = (dweight if mask[0] else None, dbias if mask[1] else None)
        dx = launches.backward(dy, dtotal, x, weight, mean, rstd, *wanted)
        return dx, dweight, dbias

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x.new_empty(self.x.shape), *self._parameter_gradients()

    def _parameter_gradients(self) -> tuple[Tensor, Tensor]:
        """Allocate the gradients of weight and bias. A gradient that is not needed is an empty tensor."""
        dweight, dbias = (
            self.x.new_empty(t.shape, dtype=t.dtype) if t is not None and wanted else self.x.new_empty(0)
            for t, wanted in zip((self.weight, self.bias), self.mask, strict=True)
        )
        return dweight, dbias

    def reference(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute (dx, dweight, dbias) in plain PyTorch. dweight and dbias have the statistics' dtype, and are None if
        not needed.
        """
        dy, dtotal, x, weight, _, mean, rstd, mask = self
        if mean is None:
            dx, dweight = _rms_norm_gradients(dy.to(rstd.dtype), x.to(rstd.dtype), weight, rstd[:, None])
            dbias = None
        elif x.dtype == rstd.dtype:
            scale = None if weight is None else weight.to(x.dtype)
            beside = (mean[:, None], rstd[:, None], scale, x.new_empty(x.shape[1]), [True, mask[0], mask[1]])
            dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dy.to(x.dtype), x, [x.shape[1]], *beside)
        else:
            dx, dweight, dbias = _layer_norm_gradients(dy.to(rstd.dtype), x.to(rstd.dtype), weight, mean, rstd[:, None])
        dx = (dx if dtotal is None else dx + dtotal).to(x.dtype)
        return dx, dweight if mask[0] else None, dbias if mask[1] else None

    def formula(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the gradients by a formula that is differentiable in dy, x and weight. The formula recomputes the
        statistics, because they depend on x.
        """
        dy, dtotal, x, weight, bias, mean, rstd, mask = self
        slope, values = dy.to(rstd.dtype), x.to(rstd.dtype)
        centred = values if mean is None else values - values.mean(1, keepdim=True)
        square = centred.square().mean(1, keepdim=True)
        rate = (square - square.detach() + rstd.detach()[:, None].pow(-2)).rsqrt()  # rstd, differentiable in x
        normal = centred * rate
        dweight = (slope * normal).sum(0).to(weight.dtype) if weight is not None and mask[0] else None
        dbias = slope.sum(0).to(bias.dtype) if bias is not None and mask[1] else None
        weighted = slope if weight is None else slope * weight
        along = 0.0 if mean is None else weighted.mean(1, keepdim=True)
        dx = (weighted - along - normal * (weighted * normal).mean(1, keepdim=True)) * rate
        return (dx if dtotal is None else dx + dtotal).to(x.dtype), dweight, dbias

    def cost(self, made: tuple[Tensor, Tensor, Tensor]) -> Cost:
        """Flops per element: 2 for normalizing (1 for RMS), 7 for dx (5 for RMS), 1 for the weight and 1 for dtotal.
        The gradient of the weight adds 2, and the gradient of the bias 1.
        """
        dy, dtotal, x, weight, _, mean, rstd, mask = self
        per_element = 9 if mean is not None else 6
        per_element += (weight is not None) + (dtotal is not None) + 2 * mask[0] + mask[1]
        written = [made[0], *(t for t, wanted in zip(made[1:], mask, strict=True) if wanted)]
        read = distinct_bytes([dy, dtotal, x, weight, mean, rstd])
        return Cost(read, distinct_bytes(written), {precision_of(x.dtype): per_element * x.numel()})


_layer_norm = declare("layer_norm", LayerNorm, slopes=1, known=True)
_rms_norm = declare("rms_norm", RmsNorm, slopes=1, known=True)
norm_backward = declare("norm_backward", NormBackward, known=True)


def runs_reference(x: Tensor) -> bool:
    """Whether plain PyTorch computes the norm instead of a kernel; always true for rows without elements."""
    return without_kernels(x.dtype, x.shape[1], device_facts(x.device).triton) is not None


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """Return the parameter, copied if it is not contiguous; None stays None."""
    return parameter.contiguous() if parameter is not None else None


def _alike(x: Tensor, weight: Tensor | None, inside: torch.dtype) -> Tensor | None:
    """The weight in the dtype of the statistics. If x is in half precision and there is no weight, return a weight of
    ones, because without a weight PyTorch would round the statistics.
    """
    if weight is None and x.dtype != inside:
        return torch.ones(x.shape[1], dtype=inside, device=x.device)
    return None if weight is None else weight.to(inside)


def _layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dx, dweight, dbias) in the dtype of the statistics, which dy, x and mean have. The terms of dx nearly
    cancel each other, so the function subtracts them before it multiplies by rstd. PyTorch's operator multiplies first.
    """
    centred = x - mean[:, None]
    normal = (centred - centred.mean(1, keepdim=True)) * rstd  # corrects the rounding error of the mean
    gradient = dy if weight is None else dy * weight
    projected = normal * (gradient * normal).mean(1, keepdim=True)
    return (gradient - gradient.mean(1, keepdim=True) - projected) * rstd, (dy * normal).sum(0), dy.sum(0)


def _rms_norm_gradients(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (dx, dweight), with products and sums in the order that autograd uses for PyTorch's operator."""
    dweight = (dy * (x * rstd)).sum(0)
    gradient = dy if weight is None else dy * weight
    dmean = (gradient * x).sum(1, keepdim=True) * -0.5 * rstd.pow(3) / x.shape[1]  # gradient of sum(x^2)
    return gradient * rstd + dmean * (2 * x), dweight


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the last dimensions, with the arguments of `torch.nn.functional.layer_norm`.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        normalized_shape: the dimensions that are normalized together; one int is one dimension.
        weight, bias: (*normalized_shape) on the device of input, of any dtype that input may have.
        eps: added to the variance.

    Returns:
        Like input; under a GPU's autocast float32, as in PyTorch. Statistics are float32 (float64 for float64).

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, its dtype is not floating point, or eps is not a number.
        ValueError: shapes or devices do not match, or eps is not finite.
    """
    shape = check_norm("layer_norm", normalized_shape, input, None, weight=weight, bias=bias)
    eps = finite_number("layer_norm", "eps", eps)
    dtype = result_dtype("layer_norm", input)
    y = _layer_norm(norm_rows(input, shape), one_row(weight), one_row(bias), eps, dtype)[0]
    return shaped(y, input)


@repeated
@recorded_whole
def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMS norm over the last dimensions, with the arguments of `torch.nn.functional.rms_norm`.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        normalized_shape: the dimensions that are normalized together; one int is one dimension.
        weight: (*normalized_shape) on the device of input, of any dtype that input may have.
        eps: added to the mean square. None: the machine epsilon of float32 (float64 for float64), as in PyTorch's
            kernels.

    Returns:
        Like input; under a GPU's autocast float32, as in PyTorch. Statistics are float32 (float64 for float64).

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, its dtype is not floating point, or eps is not a number.
        ValueError: shapes or devices do not match, or eps is not finite.
    """
    shape = check_norm("rms_norm", normalized_shape, input, None, weight=weight)
    eps, dtype = rms_eps("rms_norm", input, eps), result_dtype("rms_norm", input)
    return shaped(_rms_norm(norm_rows(input, shape), one_row(weight), eps, dtype)[0], input)


# ---- checks and conversions of arguments, for all norms ------------------------------------------------------------


def rms_eps(name: str, x: Tensor, eps: float | None) -> float:
    """`eps`, or PyTorch's default if `eps` is None: the machine epsilon of the statistics' dtype. Raise TypeError or
    ValueError if `eps` is not a finite number.
    """
    if eps is None:
        return torch.finfo(accumulator_dtype(x.dtype)).eps
    return finite_number(name, "eps", eps, "a number or None")  # type: ignore[no-any-return]


def norm_rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x (..., *shape) as (M, N). If x already is (M, N), return x itself, so that autograd records no view."""
    if x.dim() == 2 and len(shape) == 1:
        return x
    return x.reshape(math.prod(x.shape[: x.dim() - len(shape)]), math.prod(shape))


def one_row(parameter: Tensor | None) -> Tensor | None:
    """View a parameter as (N,); None stays None."""
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


def shaped(y: Tensor, like: Tensor) -> Tensor:
    """View y (M, N) in the shape of the tensor `like`."""
    return y if like.dim() == 2 and y.shape == like.shape else y.reshape(like.shape)


def check_norm(
    name: str,
    normalized_shape: int | Sequence[int],
    input: Tensor,
    residual: Tensor | None,
    **parameters: Tensor | None,
) -> tuple[int, ...]:
    """Return normalized_shape as a tuple. Raise TypeError or ValueError if the arguments of the norm `name` are
    wrong."""
    shape = _shape(name, normalized_shape)
    check_tensors(name, FLOATS, ("residual", *parameters), input=input, residual=residual, **parameters)
    if tuple(input.shape[-len(shape) :]) != shape or input.dim() < len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected input of shape (..., {expected}), got {tuple(input.shape)}")
    for argument, tensor in parameters.items():
        check_shape(name, argument, tensor, shape)
    if residual is not None and residual.dtype != input.dtype:
        raise TypeError(f"{name}: expected residual of {input.dtype}, like input, got {residual.dtype}")
    if residual is not None and residual.shape != input.shape:
        like, got = tuple(input.shape), tuple(residual.shape)
        raise ValueError(f"{name}: expected residual of shape {like}, like input, got {got}")
    return shape


def _shape(name: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes: Any = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"{name}: normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}")
    shape: tuple[int, ...] = tuple(sizes)
    if not shape:
        raise ValueError(f"{name}: normalized_shape must name at least one dimension, got {shape}")
    return shape
