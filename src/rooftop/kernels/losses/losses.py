"""Cross entropy of logits and class indices, with label smoothing, class weights and z-loss.

loss of a row = w_t ((1 - e) (lse - x_t) + z lse^2) + e / V sum_c w_c (lse - x_c),   lse = log(sum_c exp(x_c))

t: target, w: class weights (default 1), e: label smoothing (Szegedy et al. 2016), z: z-loss (Chowdhery et al. 2022,
    section 5), V: number of classes. The reduction "mean" divides the sum of the rows' losses by the sum of the rows'
    w_t, as in PyTorch.

The loss is bound by memory, and has two forms. The *separable* form reads the logits in forward, and keeps two numbers
for each row: the maximum, and the sum of exponentials relative to the maximum (a log-sum-exp would lose accuracy for
large logits). Backward reads the logits again and writes the gradient. The *fused* form writes the gradient in the
forward pass. The fused form reads logits from memory once and writes gradients once, if the rows that all programs
process at a time fit in registers or in L2. Backward multiplies the gradient in place by grad_output, unless
grad_output is 1. float16 uses the separable form by default, because a gradient without the loss scale would underflow.

Results are deterministic: the kernels use no atomics, and add in a fixed order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.losses import launches
from rooftop.kernels.losses.formulas import (
    cross_entropy_gradient_reference,
    cross_entropy_reference,
    gradient_by_reference,
    inverse_by_formula,
    inverse_of_count,
    loss_formula,
    losses_by_reference,
    reduced_gradient_formula,
    reference_dtype,
)
from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_finite, check_number, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference, without_kernels
from rooftop.launch.fast_path import transformed
from rooftop.launch.operators import WeakTensor, declare, keeps_for_backward, without_autocast
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- implementations -------------------------------------------------------------------------------------------


def inverse_dtype(x: Tensor) -> torch.dtype:
    """The dtype of `inverse_of_targets` for logits x."""
    return reference_dtype(x.dtype) if by_reference(x) else torch.float32


def _checked(arguments: Sequence[Any]) -> str | None:
    """The state of ROOFTOP_CHECK, on which `check_targets` depends."""
    return os.environ.get("ROOFTOP_CHECK")


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Check that all targets are classes or `ignore_index`. On a CPU the check always runs; on a GPU the check runs
    only with ROOFTOP_CHECK=1, because the check waits for the GPU.
    """
    if target.device.type != "cpu" and os.environ.get("ROOFTOP_CHECK") != "1":
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"cross_entropy: target {int(target[place])} at index {place} is not a class: expected 0 to {classes - 1}, "
            f"or ignore_index {ignore_index}"
        )


def inverse_of_targets(target: Tensor, classes: int, terms: Terms, dtype: torch.dtype) -> Tensor:
    """Compute 1 / (sum of the valid targets' weights) as a tensor () of `dtype` (see `inverse_dtype`). The result is 0
    if no target is valid.
    """
    if dtype == torch.float64 or without_kernels(target.device):
        counted = target[target != terms.ignore_index]
        if terms.weight is None:
            return inverse_of_count(target.new_tensor(counted.numel()), dtype)
        return inverse_of_count(terms.weight.to(dtype)[counted].sum(), dtype)
    return launches.inverse_of_targets(target, classes, terms)


def losses_of_rows(
    x: Tensor, target: Tensor, terms: Terms, inverse: Tensor | None, dx: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute (losses (N,), statistics (2, N)). If `dx` is given, fill it with the gradient times `inverse`, and
    compute no statistics; dx may be x.
    """
    if by_reference(x):
        return losses_by_reference(x, target, terms, inverse, dx)
    return launches.losses_of_rows(x, target, terms, inverse, dx)


def total_of(losses: Tensor, inverse: Tensor | None, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The reduced loss of logits x, a scalar: the sum of losses (N,) times `inverse`, the reciprocal of the mean's
    divisor. The loss has the dtype `dtype`; if `dtype` is None, float32 (float64 for float64 logits).
    """
    wide = accumulator_dtype(x.dtype)
    if by_reference(x):
        return (losses.sum() if inverse is None else losses.sum() * inverse).to(wide).to(dtype or wide)
    return launches.total_of(losses, inverse, dtype or wide)


# ---- operators -------------------------------------------------------------------------------------------------

Kept = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, int, float, float]


class CrossEntropy(NamedTuple):
    """Cross entropy of logits x (N, V): returns (loss () or (N,), statistics (2, N), inverse). `inverse` is () for a
    mean, else empty. The loss has the dtype `dtype`; if `dtype` is None, float32 (float64 for float64 logits).
    """

    x: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    dtype: torch.dtype | None = None

    @property
    def terms(self) -> Terms:
        return Terms(*self[2:6])

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        x, target, terms = self.x, self.target, self.terms
        check_targets(target, x.shape[1], terms.ignore_index)
        losses, statistics = losses_of_rows(x, target, terms, None, None)
        assert statistics is not None
        inverse = inverse_of_targets(target, x.shape[1], terms, inverse_dtype(x)) if self.reduction == "mean" else None
        wide = statistics.dtype
        loss = losses.to(wide) if self.reduction == "none" else total_of(losses, inverse, x, self.dtype)
        inverse = losses.new_empty(0) if inverse is None else inverse
        return loss.to(self.dtype or wide), statistics, inverse.to(wide)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, dtype = self.x.shape[0], accumulator_dtype(self.x.dtype)
        sizes = ((rows,) if self.reduction == "none" else (), (2, rows), () if self.reduction == "mean" else (0,))
        loss, statistics, inverse = (self.x.new_empty(size, dtype=dtype) for size in sizes)
        return loss.to(self.dtype or dtype), statistics, inverse

    @without_autocast
    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Targets are not checked; a target that is not a class raises an error or makes the loss NaN."""
        dtype, mean = accumulator_dtype(self.x.dtype), self.reduction == "mean"
        losses, statistics = cross_entropy_reference(self.x, self.target, self.terms)
        inverse = inverse_by_formula(self.target, self.x, self.terms) if mean else losses.new_empty(0)
        loss = losses if self.reduction == "none" else losses.sum() * (inverse if mean else 1.0)
        return loss.to(dtype).to(self.dtype or dtype), statistics.to(dtype), inverse.to(dtype)

    def formula(self) -> tuple[Tensor, None, None]:
        loss = loss_formula(self.x, self.target, self.terms, self.reduction)
        return loss.to(self.dtype or loss.dtype), None, None

    def keep(self, made: tuple[Tensor, Tensor, Tensor]) -> Kept:
        return (*self[:3], *made[1:], *self[3:6])

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dloss: Tensor) -> tuple[Tensor]:
        return (_cross_entropy_backward(dloss, *kept),)

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        flops = row_flops(self.terms) * self.x.numel()
        return Cost(distinct_bytes(self[:3]), distinct_bytes(made), {precision_of(self.x.dtype): flops})


class CrossEntropyBackward(NamedTuple):
    """The gradient dx (N, V) of `CrossEntropy`, from dloss (N,) or ()."""

    dloss: Tensor
    x: Tensor
    target: Tensor
    weight: Tensor | None
    statistics: Tensor
    inverse: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def terms(self) -> Terms:
        return Terms(self.weight, *self[6:])

    def run(self) -> Tensor:
        dloss, x, target, _, statistics, inverse, *_ = self
        factor = inverse if inverse.numel() else None
        compute = launches.gradient if not by_reference(x) else gradient_by_reference
        return compute(dloss, x, target, statistics, self.terms, factor)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def formula(self) -> Tensor:
        dloss = self.dloss.to(accumulator_dtype(self.x.dtype))
        factor = dloss * self.inverse if self.inverse.numel() else dloss
        return cross_entropy_gradient_reference(factor, self.x, self.target, self.terms)

    def cost(self, made: Tensor) -> Cost:
        """Flops per logit: a subtraction, an exponential and a product. Label smoothing adds one subtraction."""
        flops = (3 + (self.label_smoothing > 0)) * self.x.numel()
        return Cost(distinct_bytes(self[:6]), distinct_bytes([made]), {precision_of(self.x.dtype): flops})


class KeptGradient(NamedTuple):
    """The values that backward needs if forward has computed the gradient. A second derivative also needs the logits.

    If a kernel computes the loss, only a weak reference to the logits is kept, because the fused kernel exists to save
    the memory of the logits. Callers that need a second derivative usually still have a reference to the logits.
    """

    gradient: Tensor
    target: Tensor
    x: Tensor | None  # the logits, if the reference computes the loss
    weight: Tensor | None
    numbers: tuple[int, float, float]  # the other terms
    mean: bool
    logits: WeakTensor


class CrossEntropyWithGradient(NamedTuple):
    """The fused form of the cross entropy, for a mean or a sum. The operator returns (loss (), gradient of the logits
    (N, V)), with the same loss as `CrossEntropy`.
    """

    x: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    mean: bool
    dtype: torch.dtype | None = None

    @property
    def terms(self) -> Terms:
        return Terms(*self[2:6])

    def run(self) -> tuple[Tensor, Tensor]:
        x, target, terms = self.x, self.target, self.terms
        check_targets(target, x.shape[1], terms.ignore_index)
        inverse = inverse_of_targets(target, x.shape[1], terms, inverse_dtype(x)) if self.mean else None
        gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        losses, _ = losses_of_rows(x, target, terms, inverse, gradient)
        return total_of(losses, inverse, x, self.dtype), gradient

    def fake(self) -> tuple[Tensor, Tensor]:
        dtype = self.dtype or accumulator_dtype(self.x.dtype)
        return self.x.new_empty((), dtype=dtype), self.x.new_empty(self.x.shape)

    @without_autocast
    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        losses, _ = cross_entropy_reference(self.x, self.target, self.terms)
        factor = inverse_by_formula(self.target, self.x, self.terms) if self.mean else losses.new_ones(())
        gradient = cross_entropy_gradient_reference(factor, self.x, self.target, self.terms)
        wide = accumulator_dtype(self.x.dtype)
        return (losses.sum() * factor).to(wide).to(self.dtype or wide), gradient

    def formula(self) -> tuple[Tensor, None]:
        loss = loss_formula(self.x, self.target, self.terms, "mean" if self.mean else "sum")
        return loss.to(self.dtype or loss.dtype), None

    def keep(self, made: tuple[Tensor, Tensor]) -> KeptGradient:
        x, target, weight, *_, mean, _ = self
        there = x if by_reference(x) else None
        return KeptGradient(made[1], target, there, weight, self[3:6], mean, WeakTensor(x))

    @staticmethod
    def gradients(kept: KeptGradient, wanted: Sequence[bool], dloss: Tensor) -> tuple[Tensor]:
        if not torch.is_grad_enabled():
            return (scaled(kept.gradient, dloss),)
        # create_graph: autograd does not know how the gradient saved by forward depends on the logits.
        x = kept.logits() if kept.x is None else kept.x
        if x is None:
            raise NotImplementedError(
                "cross_entropy: the fused kernel has no second derivative once the logits (N, V) are freed or "
                "changed: keep them in a variable, or use fused=False"
            )
        terms, dloss = Terms(kept.weight, *kept.numbers), dloss.to(accumulator_dtype(x.dtype))
        return (reduced_gradient_formula(dloss, x, kept.target, terms, kept.mean),)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops of the loss and its gradient. Each exponential counts once, because loss and gradient share it."""
        flops = (row_flops(self.terms) + 1 + (self.label_smoothing > 0)) * self.x.numel()
        return Cost(distinct_bytes(self[:3]), distinct_bytes(made), {precision_of(self.x.dtype): flops})


class ScaleGradient(NamedTuple):
    """gradient * factor."""

    gradient: Tensor
    factor: Tensor

    def run(self) -> Tensor:
        result = torch.empty(self.gradient.shape, dtype=self.gradient.dtype, device=self.gradient.device)
        _scale_into(*self, result)
        return result

    def fake(self) -> Tensor:
        return self.gradient.new_empty(self.gradient.shape)

    def formula(self) -> Tensor:
        return (self.gradient * self.factor).to(self.gradient.dtype)

    def cost(self, made: Tensor) -> Cost:
        return Cost(distinct_bytes(self), distinct_bytes([made]), {precision_of(made.dtype): made.numel()})


class ScaleGradientInPlace(NamedTuple):
    """gradient *= factor."""

    gradient: Tensor
    factor: Tensor

    def run(self) -> None:
        _scale_into(*self, self.gradient)

    def fake(self) -> None:
        return None

    def cost(self, made: None) -> Cost:
        """Only the factor counts as read, as if it were 1: the kernel then does not read or write the gradient."""
        return Cost(distinct_bytes([self.factor]))


_cross_entropy = declare("cross_entropy", CrossEntropy, slopes=1, known=_checked)
_cross_entropy_backward = declare("cross_entropy_backward", CrossEntropyBackward, known=True)
_cross_entropy_with_gradient = declare(
    "cross_entropy_with_gradient", CrossEntropyWithGradient, slopes=1, known=_checked
)
_scale = declare("scale_gradient", ScaleGradient, known=True)
_scale_in_place = declare("scale_gradient_", ScaleGradientInPlace, mutates=("gradient",), known=True)


def row_flops(terms: Terms) -> int:
    """Flops per logit: maximum, subtraction, exponential and sum. Label smoothing adds a sum. Label smoothing with
    class weights also adds a product.
    """
    return 4 + (terms.label_smoothing > 0) * (1 + (terms.weight is not None))


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Compute gradient * factor. The result replaces the gradient in memory, unless the gradient is needed again
    (retain_graph, a batch of factors) or the call is traced.
    """
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    if again or isinstance(gradient, FunctionalTensor) or transformed((factor,)):
        return _scale(gradient, factor)
    _scale_in_place(gradient, factor)
    return gradient


def _scale_into(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """Scale `gradient` into `result`; both are contiguous."""
    in_place = result is gradient
    if by_reference(gradient):
        if gradient.is_cuda:  # float64: multiply on the GPU, so that the host does not wait for the factor
            torch.mul(gradient, factor, out=result)
        elif not in_place or float(factor) != 1.0:
            torch.mul(gradient, float(factor), out=result)
        return
    launches.scale(gradient, factor, result)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    fused: bool | None = None,
) -> Tensor:
    """Cross entropy of logits and class indices, with the arguments of `torch.nn.functional.cross_entropy`, `z_loss`
    and `fused`.

    Args:
        input: logits (N, V), (V,) or (N, V, d1, ...), bfloat16, float16, float32 or float64. Logits (N, V, d1, ...) are
            copied so that V is the last dimension.
        target: class indices, int64, of the shape of `input` without V; on the device of `input`.
        weight: (V,), the weight of each class. `weight` gets no gradient.
        ignore_index: rows with this target are ignored.
        reduction: "mean" (divided by the sum of the targets' weights), "sum" or "none".
        label_smoothing: from 0 to 1, the fraction of the target's probability that is distributed evenly over all
            classes.
        z_loss: factor of each row's squared log-sum-exp, which is multiplied by the weight of the row's target.
        fused: compute the gradient in the forward pass. None: fused if `input` needs a gradient, the loss is reduced,
            and the dtype is not float16.

    Returns:
        The loss, in the dtype of `input` (float32 under autocast): a scalar, or with reduction="none" a tensor of the
        shape of `target`. The arithmetic is float32 or wider (float64 for float64). If all targets are ignored, the
        mean and its gradient are 0. PyTorch returns NaN if all targets are ignored, which would make a sum over
        micro-batches NaN.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong (class probabilities included).
        ValueError: a shape, device or number is wrong; or a target is not a class. Targets are always checked on the
            CPU, but on a GPU only with ROOFTOP_CHECK=1 in the environment. On a GPU without ROOFTOP_CHECK=1, the losses
            of rows whose target is not a class are NaN, and so is a reduced loss. The gradients of rows with valid
            targets stay finite, since a mean is divided by the weights of valid targets.
        NotImplementedError: a second derivative of the fused form on a GPU, if `input` is not (N, V), was changed in
            place or was freed, because the fused form does not keep the logits.
    """
    check_arguments("cross_entropy", input, target, weight, reduction, label_smoothing, z_loss)
    check_index("cross_entropy", ignore_index)
    dtype = result_dtype("cross_entropy", input)
    if input.dim() == 1:
        x = input.unsqueeze(0)
    else:
        x = input if input.dim() == 2 else input.movedim(1, -1).reshape(-1, input.shape[1])
    if fused is None:
        fused = reduction != "none" and input.dtype != torch.float16
    elif fused and reduction == "none":
        raise ValueError(
            "cross_entropy: fused needs a reduction, because forward does not know the incoming gradient of each row's "
            "loss: use fused=False"
        )
    numbers = (ignore_index, float(label_smoothing), float(z_loss))
    indices = target.reshape(-1)
    weight = weight.detach() if weight is not None else None
    rounded = None if dtype == accumulator_dtype(x.dtype) else dtype
    if fused and keeps_for_backward(input):
        return _cross_entropy_with_gradient(x, indices, weight, *numbers, reduction == "mean", rounded)[0]
    loss = _cross_entropy(x, indices, weight, *numbers, reduction, rounded)[0]
    return loss.reshape(target.shape) if reduction == "none" else loss


class LogitsShape(NamedTuple):
    """Shape, dtype and device of logits that are never computed, for the checks of arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)


def check_index(name: str, ignore_index: int) -> None:
    """Raise TypeError if `ignore_index` is not an int, because no target could equal a value of another type."""
    if not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"{name}: ignore_index must be an int, got {type(ignore_index).__name__}")


def check_arguments(
    name: str,
    x: Tensor | LogitsShape,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    smoothing: float,
    z_loss: float,
) -> None:
    """Refuse wrong arguments of `name` before anything is launched.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that the losses do not support.
        ValueError: a shape, device or value is wrong; the message names the argument.
    """
    if not isinstance(x, LogitsShape):
        check_tensors(name, FLOATS, input=x)
    check_tensors(name, None, ("weight",), ("input", x), target=target, weight=weight)
    if target.dtype != torch.int64:
        floats = target.dtype.is_floating_point
        remedy = "for class probabilities use torch.nn.functional.cross_entropy" if floats else "pass target.long()"
        raise TypeError(f"{name}: target must be class indices of int64, got {target.dtype}; {remedy}")
    if x.dim() == 0:
        raise ValueError(f"{name}: expected input of shape (N, V), got ()")
    classes_at = min(1, x.dim() - 1)
    classes = x.shape[classes_at]
    expected = tuple(n for i, n in enumerate(x.shape) if i != classes_at)
    if tuple(target.shape) != expected:
        raise ValueError(
            f"{name}: expected target of shape {expected} for an input of {tuple(x.shape)}, got {tuple(target.shape)}"
        )
    if classes == 0:
        raise ValueError(f"{name}: expected at least one class, got an input of shape {tuple(x.shape)}")
    if weight is not None and weight.dtype not in FLOATS:
        raise TypeError(f"{name}: class weights must be floating point, got {weight.dtype}")
    check_shape(name, "class weights", weight, (classes,))
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    check_number(name, "label_smoothing", smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {smoothing}")
    check_finite(name, "z_loss", z_loss)
