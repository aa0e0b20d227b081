"""Softmax and its logarithm along one dimension, of x * scale + mask.

y = exp(s - max s) / sum(exp(s - max s)), s = x * scale + mask. Long rows use an online maximum and sum (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"). Softmax is bound by memory at every size: forward reads x
(and the mask) and writes y; backward reads dy and y, and writes dx. A program reads a row once if the row fits in the
program's registers. A program reads a longer row twice. The second read is from L2, if the rows that all programs
process at a time fit in L2. Clusters of blocks read some long rows once (clusters.py). No kernel uses atomics, so
results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_dtype, check_finite, check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, HALVES, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.operands.strided_rows import rows_of
from rooftop.kernels.softmaxes import launches
from rooftop.kernels.softmaxes.plans import Direction, SoftmaxPlan, choose, forward_problem, gradient_of
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs for a softmax in `dtype`. For a numeric mask, only shape and dtype are kept."""

    y: Tensor
    boolean_mask: Tensor | None
    scale: float
    log: bool
    dtype: torch.dtype
    added: tuple[torch.Size, torch.dtype] | None


class Softmax(NamedTuple):
    """Softmax of x (..., N) in `dtype`, or its logarithm if `log`; the mask is broadcastable to x."""

    x: Tensor
    mask: Tensor | None
    scale: float
    log: bool
    dtype: torch.dtype

    def run(self) -> Tensor:
        return self.in_pytorch() if by_reference(self.x) else launches.forward(*self)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape, dtype=self.dtype)

    def in_pytorch(self) -> Tensor:
        """Compute the softmax in float32, or in float64 for float64 rows."""
        scores, mask = self.x.to(accumulator_dtype(self.x.dtype)) * self.scale, self.mask
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return (scores.log_softmax(-1) if self.log else scores.softmax(-1)).to(self.dtype)

    def formula(self) -> Tensor:
        return self.in_pytorch()

    def keep(self, made: Tensor) -> Kept:
        x, mask, scale, log, _ = self
        boolean = mask if mask is not None and mask.dtype == torch.bool else None
        added = (mask.shape, mask.dtype) if mask is not None and mask.is_floating_point() else None
        return Kept(made, boolean, scale, log, x.dtype, added)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor, Tensor | None]:
        y, mask, scale, log, dtype, added = kept
        if not wanted[1]:
            return _softmax_backward(dy, y, mask, scale, log, dtype), None
        # The gradient of a numeric mask is the gradient of the scores, summed over the mask's broadcast dimensions.
        dscores = _softmax_backward(dy, y, None, 1.0, log, accumulator_dtype(dtype))
        assert added is not None
        return (dscores * scale).to(dtype), dscores.sum_to_size(added[0]).to(added[1])

    def cost(self, made: Tensor) -> Cost:
        """Flops per element: 5 for maximum, subtraction, exponential, sum and division (for the logarithm, a second
        subtraction instead of the division). Scale and mask add 1 each.
        """
        flops = (5 + (self.scale != 1.0) + (self.mask is not None)) * self.x.numel()
        read = distinct_bytes([self.x, self.mask])
        return Cost(read, distinct_bytes([made]), {precision_of(self.x.dtype): flops})


class SoftmaxBackward(NamedTuple):
    """The gradient dx of `Softmax`, in `dtype`. `mask` is given only if it is boolean; elements where the mask is False
    get no gradient.
    """

    dy: Tensor
    y: Tensor
    mask: Tensor | None
    scale: float
    log: bool
    dtype: torch.dtype

    def run(self) -> Tensor:
        return self.formula() if by_reference(self.y) else launches.backward(*self)

    def fake(self) -> Tensor:
        return self.y.new_empty(self.y.shape, dtype=self.dtype)

    def formula(self) -> Tensor:
        inside = accumulator_dtype(self.y.dtype)
        of_rows = torch.ops.aten._log_softmax_backward_data if self.log else torch.ops.aten._softmax_backward_data
        dx: Tensor = of_rows(self.dy.to(inside), self.y.to(inside), -1, inside) * self.scale
        return (dx if self.mask is None else dx.masked_fill(~self.mask, 0.0)).to(self.dtype)

    def cost(self, made: Tensor) -> Cost:
        """Flops per element: four, for a product, a sum, a difference and a second product. For the logarithm, an
        exponential replaces the first product. Scale and mask add 1 each.
        """
        flops = (4 + (self.scale != 1.0) + (self.mask is not None)) * self.y.numel()
        read = distinct_bytes([self.dy, self.y, self.mask])
        return Cost(read, distinct_bytes([made]), {precision_of(self.y.dtype): flops})


_softmax = declare("softmax", Softmax, known=True)
_softmax_backward = declare("softmax_backward", SoftmaxBackward, known=True)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """softmax(input * scale + mask) along `dim`. The arguments are those of `torch.nn.functional.softmax`, and also
    `mask` and `scale`.

    Args:
        input: any shape, bfloat16, float16, float32 or float64.
        dim: the dimension along which the results sum to one. If `dim` is not the last dimension, `input` is transposed
            and copied, so `dim` is the contiguous dimension of the result.
        dtype: `input` is first cast to this dtype. A cast from half to single precision is part of the kernel.
        mask: broadcastable to `input`, on the device of `input`. A numeric mask is added; in a boolean mask, False
            excludes an element (as in `torch.nn.functional.scaled_dot_product_attention`). The gradient of a numeric
            mask takes up to three more passes over tensors of the size of `input`: a product with `scale`, a cast to
            half precision, and a sum over the dimensions along which the mask is broadcast.
        scale: a finite number.

    Returns:
        Like input. As in PyTorch, a row of the result is NaN if the row of the input contains NaN, or if all elements
        of the row are -inf or excluded. Maximum, sum and exponentials are float32 (float64 for float64). Under a GPU's
        autocast the result is float32 unless `dtype` is given, as in PyTorch.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: dimensions, shapes or devices do not match, or the scale is not finite.
    """
    return _along("softmax", input, dim, dtype, mask, scale)


@repeated
@recorded_whole
def log_softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The logarithm of `softmax`, with the same arguments, results and errors as `softmax`. Excluded elements
    are -inf.
    """
    return _along("log_softmax", input, dim, dtype, mask, scale)


def softmax_plan(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    direction: Direction = "forward",
) -> SoftmaxPlan:
    """Return the kernel that would compute `softmax` with these arguments, and the reason for the choice, without
    launching the kernel. `log_softmax` uses the same plan.

    Args:
        input, dim, dtype, mask, scale: as in `softmax`.
        direction: "forward", or "backward" for the plan of the gradient of input, from a contiguous gradient of the
            result.

    Raises:
        TypeError, ValueError: as in `softmax`, or the direction is unknown.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"softmax_plan: direction must be 'forward' or 'backward', got {direction!r}")
    x, mask, dtype = _prepared("softmax_plan", input, dim, dtype, mask, scale)
    problem = forward_problem(rows_of(x), mask, scale, False, dtype)
    return choose(problem if direction == "forward" else gradient_of(problem))


def _along(name: str, x: Tensor, dim: int, dtype: torch.dtype | None, mask: Tensor | None, scale: float) -> Tensor:
    rows, mask, dtype = _prepared(name, x, dim, dtype, mask, scale)
    y = _softmax(rows, mask, float(scale), name == "log_softmax", dtype)
    if x.dim() == 0:
        return y.reshape(())
    return y if dim in (-1, x.dim() - 1) else y.transpose(dim, -1)


def _prepared(
    name: str, x: Tensor, dim: int, dtype: torch.dtype | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Return x and mask with `dim` as their last dimension, and the dtype of the result. Raise TypeError or ValueError
    if the arguments are wrong.
    """
    _check(name, x, dim, dtype, mask, scale)
    if dtype is not None and not (dtype == torch.float32 and x.dtype in HALVES):
        x = x.to(dtype)
    if dtype is None:
        dtype = result_dtype("softmax" if name == "softmax_plan" else name, x)
    if x.dim() == 0:
        return x.reshape(1), None if mask is None else mask.reshape(1), dtype
    if dim not in (-1, x.dim() - 1):
        return x.transpose(dim, -1), None if mask is None else mask.expand(x.shape).transpose(dim, -1), dtype
    return x, mask, dtype


def _check(name: str, x: Tensor, dim: int, dtype: torch.dtype | None, mask: Tensor | None, scale: float) -> None:
    check_tensors(name, None, ("mask",), input=x, mask=mask)
    if dtype is not None:
        check_dtype(name, "dtype", dtype, FLOATS)
    else:
        check_dtype(name, "input", x.dtype, FLOATS, "; or give dtype")
    if not is_integer(dim):
        raise TypeError(f"{name}: dim must be an int, got {dim!r}")
    if not -max(1, x.dim()) <= dim < max(1, x.dim()):
        raise ValueError(f"{name}: dim {dim} is out of range for an input of shape {tuple(x.shape)}")
    check_finite(name, "scale", scale)
    if mask is None:
        return
    if mask.dtype not in (*FLOATS, torch.bool):
        raise TypeError(f"{name}: mask must be boolean or floating point, got {mask.dtype}")
    if mask.dim() > x.dim() or any(m != 1 and m != n for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"{name}: a mask of shape {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
