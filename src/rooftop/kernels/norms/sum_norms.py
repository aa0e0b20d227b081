"""Layer norm and RMS norm of a sum, as between the sublayers of a transformer. The sum is returned as well.

total = x + input_bias + residual, y = norm(total). One pass adds the bias of the last linear layer and the residual,
and computes the norm. The operators are bound by memory: forward reads x and residual once, and writes y and total
once. Backward reads dy, total and the gradient of total, and writes one gradient, which is the gradient of both x and
residual. The sum is computed in float32 and rounded once. The norm uses the rounded sum, so y is exactly the norm of
the returned total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.norms import launches
from rooftop.kernels.norms.norms import (
    Gradients,
    LayerNorm,
    RmsNorm,
    Statistics,
    check_norm,
    contiguous,
    norm_rows,
    one_row,
    rms_eps,
    runs_reference,
    shaped,
)
from rooftop.kernels.norms.plans import NormPlan, choose_backward, choose_forward, forward_call, gradients_of
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import finite_number
from rooftop.kernels.operands.dtypes import accumulator_dtype
from rooftop.kernels.operands.strided_rows import unit_columns
from rooftop.launch.fast_path import computed_on_cpu
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED

# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs: statistics of the norm, whether anything was added, and the dtype of the input
    bias.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    adds: bool
    input_bias_dtype: torch.dtype | None

    def gradients(
        self, wanted: Sequence[bool], dy: Tensor | None, dtotal: Tensor | None, mask: list[bool]
    ) -> Gradients:
        """The gradients of x, residual, input_bias, weight and bias."""
        dtotal = dtotal if self.adds else None  # if nothing is added, total is x itself
        dx, dweight, dbias = dtotal, None, None
        if dy is not None:
            dx, dweight, dbias = Statistics(*self[:5]).gradients(dy, dtotal, mask)
        dinput_bias = None
        if wanted[2] and dx is not None:
            dinput_bias = dx.sum(0, dtype=accumulator_dtype(dx.dtype)).to(self.input_bias_dtype)
        return dx if wanted[0] else None, dx if wanted[1] else None, dinput_bias, dweight, dbias


class AddLayerNorm(NamedTuple):
    """Layer norm of a sum of rows (M, N): returns (y, total, mean, rstd), y in `dtype`. total is empty if nothing is
    added.
    """

    x: Tensor
    residual: Tensor | None
    input_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, residual, input_bias, weight, bias, eps, dtype = self
        if runs_reference(x):
            return self.in_pytorch()
        residual = unit_columns(residual) if residual is not None else None
        parameters = contiguous(input_bias), contiguous(weight), contiguous(bias)
        y, total, mean, rstd = launches.forward(unit_columns(x), residual, *parameters, eps, False, dtype)
        assert mean is not None
        return y, x.new_empty(0) if total is None else total, mean, rstd

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, mean, rstd = LayerNorm(self.x, self.weight, self.bias, self.eps, self.dtype).fake()
        total = self.x.new_empty(self.x.shape if adds(self.residual, self.input_bias) else 0)
        return y, total, mean, rstd

    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = add_reference(self.x, self.residual, self.input_bias)
        y, mean, rstd = LayerNorm(total, *self[3:]).in_pytorch()
        return y, total if adds(self.residual, self.input_bias) else self.x.new_empty(0), mean, rstd

    def formula(self) -> tuple[Tensor, Tensor, None, None]:
        total = add_reference(self.x, self.residual, self.input_bias)
        return LayerNorm(total, *self[3:]).formula()[0], total, None, None

    def keep(self, made: tuple[Tensor, Tensor, Tensor, Tensor]) -> Kept:
        return _kept(self.x, self.residual, self.input_bias, self.weight, self.bias, made[1], *made[2:])

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor | None, dtotal: Tensor | None) -> Gradients:
        return kept.gradients(wanted, dy, dtotal, list(wanted[3:5]))

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops per element: 1 each for residual, input bias, weight and bias if given, and 5 for the layer norm."""
        return _cost(5, self[:5], made)


class AddRmsNorm(NamedTuple):
    """RMS norm of a sum of rows (M, N): returns (y, total, rstd), y in `dtype`. total is empty if nothing is added."""

    x: Tensor
    residual: Tensor | None
    input_bias: Tensor | None
    weight: Tensor | None
    eps: float
    dtype: torch.dtype

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        x, residual, input_bias, weight, eps, dtype = self
        if runs_reference(x):
            return self.in_pytorch()
        residual = unit_columns(residual) if residual is not None else None
        parameters = contiguous(input_bias), contiguous(weight), None
        y, total, _, rstd = launches.forward(unit_columns(x), residual, *parameters, eps, True, dtype)
        return y, x.new_empty(0) if total is None else total, rstd

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd = RmsNorm(self.x, self.weight, self.eps, self.dtype).fake()
        return y, self.x.new_empty(self.x.shape if adds(self.residual, self.input_bias) else 0), rstd

    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor]:
        total = add_reference(self.x, self.residual, self.input_bias)
        y, rstd = RmsNorm(total, *self[3:]).in_pytorch()
        return y, total if adds(self.residual, self.input_bias) else self.x.new_empty(0), rstd

    def formula(self) -> tuple[Tensor, Tensor, None]:
        total = add_reference(self.x, self.residual, self.input_bias)
        return RmsNorm(total, *self[3:]).formula()[0], total, None

    def keep(self, made: tuple[Tensor, Tensor, Tensor]) -> Kept:
        return _kept(self.x, self.residual, self.input_bias, self.weight, None, made[1], None, made[2])

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor | None, dtotal: Tensor | None) -> Gradients:
        return kept.gradients(wanted, dy, dtotal, [wanted[3], False])[:4]

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops per element: 1 each for residual, input bias and weight if given, and 3 for the RMS norm."""
        return _cost(3, self[:4], made)


_add_layer_norm = declare("add_layer_norm", AddLayerNorm, slopes=2, known=True)
_add_rms_norm = declare("add_rms_norm", AddRmsNorm, slopes=2, known=True)


def add_reference(x: Tensor, residual: Tensor | None, input_bias: Tensor | None) -> Tensor:
    """x + input_bias + residual, added in float32 (float64 for float64) and rounded once to the dtype of x."""
    total = x.to(accumulator_dtype(x.dtype))
    for term in (input_bias, residual):
        total = total if term is None else total + term
    return total.to(x.dtype)


def adds(residual: Tensor | None, input_bias: Tensor | None) -> bool:
    """Whether a residual or an input bias is added, so that the sum is a new tensor instead of x itself."""
    return residual is not None or input_bias is not None


def _kept(
    x: Tensor, residual: Tensor | None, input_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    total: Tensor, mean: Tensor | None, rstd: Tensor,
) -> Kept:  # fmt: skip
    summed = adds(residual, input_bias)
    dtype = input_bias.dtype if input_bias is not None else None
    return Kept(total if summed else x, weight, bias, mean, rstd, summed, dtype)


def _cost(flops: int, read: Sequence[Tensor | None], made: Sequence[Tensor]) -> Cost:
    x, *terms = read
    assert x is not None
    flops += sum(t is not None for t in terms)
    return Cost(distinct_bytes(read), distinct_bytes(made), {precision_of(x.dtype): flops * x.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
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
    """Layer norm over the last dimensions of the sum input + input_bias + residual, and the sum itself.

    Args:
        input: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        residual: like input; None adds nothing.
        normalized_shape, weight, bias, eps: as in `torch.nn.functional.layer_norm`.
        input_bias: (*normalized_shape), added to each row of input.

    Returns:
        (y, total), both like input. total is the sum, rounded once, and y is the norm of total. If nothing is added,
        total is input itself. Under a GPU's autocast y is float32, like the results of PyTorch's norms, and total has
        the dtype of input, like the results of PyTorch's sums.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, a dtype is not floating point, the dtypes of residual and
            input differ, or eps is not a number.
        ValueError: shapes or devices do not match, or eps is not finite.
    """
    eps = finite_number("add_layer_norm", "eps", eps)
    if _is_plain_sum(input, residual, normalized_shape, weight, bias, input_bias):
        total = add_reference(input, residual, input_bias)
        y = torch.nn.functional.layer_norm(total, input.shape[-1:], weight, bias, eps)
        return y, total if adds(residual, input_bias) else input
    name, parameters = "add_layer_norm", {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = check_norm(name, normalized_shape, input, residual, **parameters)
    flat, (added, of_input, scale, shift) = flat_arguments(shape, input, residual, input_bias, weight, bias)
    dtype = result_dtype("layer_norm", input)
    y, total, _, _ = _add_layer_norm(flat, added, of_input, scale, shift, eps, dtype)
    return shaped(y, input), shaped(total, input) if adds(residual, input_bias) else input


@repeated
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
    """RMS norm over the last dimensions of the sum input + input_bias + residual, and the sum itself.

    Arguments, results and errors are those of `add_layer_norm`; weight and eps are those of
    `torch.nn.functional.rms_norm`.
    """
    name, parameters = "add_rms_norm", {"weight": weight, "input_bias": input_bias}
    shape = check_norm(name, normalized_shape, input, residual, **parameters)
    flat, (added, of_input, scale) = flat_arguments(shape, input, residual, input_bias, weight)
    eps, dtype = rms_eps(name, input, eps), result_dtype("rms_norm", input)
    y, total, _ = _add_rms_norm(flat, added, of_input, scale, eps, dtype)
    return shaped(y, input), shaped(total, input) if adds(residual, input_bias) else input


def layer_norm_plan(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    input_bias: Tensor | None = None,
    rms: bool = False,
    direction: Literal["forward", "backward"] = "forward",
) -> NormPlan:
    """Return the kernels that would compute a norm with these arguments, and the reason for the choice, without
    computing the norm.

    Args:
        input, normalized_shape, weight, bias: as in `layer_norm`.
        residual, input_bias: as in `add_layer_norm`, if given.
        rms: return the plan of `rms_norm` or `add_rms_norm`, which have no bias.
        direction: "forward", or "backward" for the plan that computes the gradients of input and of all given
            parameters, from contiguous gradients of the results.

    Raises:
        TypeError, ValueError: as in the norms, or a bias is given for an RMS norm, or the direction is unknown.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"layer_norm_plan: direction must be 'forward' or 'backward', got {direction!r}")
    if rms and bias is not None:
        raise ValueError("layer_norm_plan: an RMS norm has no bias: leave out bias or rms")
    parameters = {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = check_norm("layer_norm_plan", normalized_shape, input, residual, **parameters)
    flat, (added, of_input, scale, shift) = flat_arguments(shape, input, residual, input_bias, weight, bias)
    x, added = unit_columns(flat), unit_columns(added) if added is not None else None
    dtype = result_dtype("rms_norm" if rms else "layer_norm", input)
    call = forward_call(x, added, of_input, scale, shift, rms, dtype)
    return choose_forward(call) if direction == "forward" else choose_backward(gradients_of(call))


def _is_plain_sum(
    x: Tensor, residual: Tensor | None, normalized_shape: int | Sequence[int], *parameters: Tensor | None
) -> bool:
    """Whether all tensors are float32 on the CPU and have matching shapes, so that PyTorch's layer norm computes the
    result with less overhead.
    """
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
) -> tuple[Tensor, list[Tensor | None]]:
    """Input and residual as (M, N), and parameters as (N,)."""
    others = [None if residual is None else norm_rows(residual, shape), *map(one_row, parameters)]
    return norm_rows(input, shape), others
