"""Cross entropy of logits and class indices, with label smoothing, class weights and z-loss.

loss of a row = w_t ((1 - e) (lse - x_t) + z lse^2) + e / V sum_c w_c (lse - x_c),   lse = log(sum_c exp(x_c))

t: target, w: class weights (1), e: label smoothing (Szegedy et al. 2016), z: z-loss (Chowdhery et al. 2022, section 5),
V: classes. "mean" divides the sum over rows by that of their w_t, as PyTorch does.

Bound by memory. Two forms: *separable* reads the logits, keeps two numbers a row (the maximum, and the sum of
exponentials relative to it: log-sum-exp would be rounded where logits are large), and reads the logits again in
backward to write the gradient. *Fused* writes the gradient in the forward pass: one read and one write in all while a
row in flight stays in registers or in L2; backward scales it in place by grad_output, or leaves it alone where that
is 1. float16 is separable unless asked otherwise: a gradient not yet multiplied by a loss scale would underflow.

Deterministic: no atomics; sums are added in a fixed order.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.losses import launches
from rooftop.kernels.losses.formulas import (
    cross_entropy_gradient_reference,
    cross_entropy_reference,
    inverse_by_formula,
    inverse_of_count,
    loss_formula,
    reduced_gradient_formula,
    reference_dtype,
)
from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference, without_kernels
from rooftop.launch.fast_path import transformed
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    keeps_for_backward,
    operator,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole

# ---- implementations -------------------------------------------------------------------------------------------


def inverse_dtype(x: Tensor) -> torch.dtype:
    """In what `inverse_of_targets` is, for logits x."""
    return reference_dtype(x.dtype) if by_reference(x) else torch.float32


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Targets that are no class: on the CPU at once, on a GPU with ROOFTOP_CHECK=1 (it waits for the GPU)."""
    if target.device.type != "cpu" and os.environ.get("ROOFTOP_CHECK") != "1":
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"cross_entropy: target {int(target[place])} at {place} is no class: expected 0 to {classes - 1}, or "
            f"ignore_index {ignore_index}"
        )


def inverse_of_targets(target: Tensor, classes: int, terms: Terms, dtype: torch.dtype) -> Tensor:
    """1 / sum of the weights of the targets that count, a tensor () of the dtype of statistics; 0 where none does."""
    if dtype == torch.float64 or without_kernels(target.device):
        counted = target[target != terms.ignore_index]
        if terms.weight is None:
            return inverse_of_count(target.new_tensor(counted.numel()), dtype)
        return inverse_of_count(terms.weight.to(dtype)[counted].sum(), dtype)
    return launches.inverse_of_targets(target, classes, terms)


def losses_of_rows(
    x: Tensor, target: Tensor, terms: Terms, inverse: Tensor | None, dx: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(losses (N,), statistics (2, N)); with `dx` (which may be x) fills that instead of the statistics, with the
    gradient times `inverse`."""
    if by_reference(x):
        return _losses_by_reference(x, target, terms, inverse, dx)
    return launches.losses_of_rows(x, target, terms, inverse, dx)


BLOCK = 1 << 20  # logits that PyTorch works on at a time: few enough to stay in cache in float64


def _blocks(x: Tensor) -> Iterator[slice]:
    """The rows of x, as many at a time as make a block."""
    step = max(1, BLOCK // x.shape[1])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def _losses_by_reference(
    x: Tensor, target: Tensor, terms: Terms, inverse: Tensor | None, dx: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    losses = x.new_empty(x.shape[0], dtype=reference_dtype(x.dtype))
    kept = x.new_empty((2, x.shape[0]), dtype=accumulator_dtype(x.dtype)) if dx is None else None
    factor = inverse if inverse is not None else losses.new_ones(())
    for rows in _blocks(x):
        losses[rows], statistics = cross_entropy_reference(x[rows], target[rows], terms)
        if dx is not None:
            dx[rows] = cross_entropy_gradient_reference(factor, x[rows], target[rows], terms)
        elif kept is not None:
            kept[:, rows] = statistics
    return losses, kept


def _gradient(
    dloss: Tensor, x: Tensor, target: Tensor, statistics: Tensor, terms: Terms, inverse: Tensor | None
) -> Tensor:
    """dx (N, V) from dloss (N,) or ()."""
    if by_reference(x):
        factor = dloss.to(reference_dtype(x.dtype)) * (inverse if inverse is not None else 1.0)
        factor, dx = factor.expand(x.shape[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows in _blocks(x):
            dx[rows] = cross_entropy_gradient_reference(factor[rows], x[rows], target[rows], terms)
        return dx
    return launches.gradient(dloss, x, target, statistics, terms, inverse)


def total_of(losses: Tensor, inverse: Tensor | None, x: Tensor) -> Tensor:
    """The reduced loss of logits x, a scalar: losses (N,) added up and multiplied by `inverse`, one over what a mean
    divides by."""
    dtype = accumulator_dtype(x.dtype)
    if by_reference(x):
        return (losses.sum() if inverse is None else losses.sum() * inverse).to(dtype)
    return launches.total_of(losses, inverse, dtype)


# ---- registration: separable -----------------------------------------------------------------------------------


@operator("cross_entropy")
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss () or (N,), statistics (2, N), inverse): `inverse` () of a mean, else empty."""
    check_targets(target, x.shape[1], ignore_index)
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    losses, statistics = losses_of_rows(x, target, terms, None, None)
    assert statistics is not None
    inverse = inverse_of_targets(target, x.shape[1], terms, inverse_dtype(x)) if reduction == "mean" else None
    loss = losses if reduction == "none" else total_of(losses, inverse, x)
    inverse = losses.new_empty(0) if inverse is None else inverse
    return loss.to(statistics.dtype), statistics, inverse.to(statistics.dtype)


@torch.library.register_fake("rooftop::cross_entropy")
def _(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, dtype = x.shape[0], accumulator_dtype(x.dtype)
    sizes = ((rows,) if reduction == "none" else (), (2, rows), () if reduction == "mean" else (0,))
    loss, statistics, inverse = (x.new_empty(size, dtype=dtype) for size in sizes)
    return loss, statistics, inverse


@operator("cross_entropy_backward")
def _cross_entropy_backward(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, inverse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    return _gradient(dloss, x, target, statistics, terms, inverse if inverse.numel() else None)


@torch.library.register_fake("rooftop::cross_entropy_backward")
def _(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, inverse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


Context = torch.autograd.function.FunctionCtx


def _save(ctx: Context, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, target, weight, *numbers, _ = inputs
    _, statistics, inverse = output
    ctx.save_for_backward(x, target, weight, statistics, inverse)
    ctx.mark_non_differentiable(statistics, inverse)
    ctx.set_materialize_grads(False)  # no zeros for statistics
    ctx.numbers = numbers  # type: ignore[attr-defined]


def _differentiate(
    ctx: Context, dloss: Tensor | None, _statistics: None, inverse_of_targets: None
) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 7
    dx = _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[attr-defined]
    return dx, None, None, None, None, None, None


differentiable("cross_entropy", _differentiate, _save)


def _formula(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str,
) -> tuple[Tensor, None, None]:  # fmt: skip
    return loss_formula(x, target, Terms(weight, ignore_index, label_smoothing, z_loss), reduction), None, None


def _backward_formula(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, inverse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    factor = dloss * inverse if inverse.numel() else dloss
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    return cross_entropy_gradient_reference(factor, x, target, terms)


@without_autocast
def _decomposed(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_cross_entropy`, in PyTorch's operators. Targets are not checked: one that is no class raises or is NaN."""
    terms, dtype = Terms(weight, ignore_index, label_smoothing, z_loss), accumulator_dtype(x.dtype)
    losses, statistics = cross_entropy_reference(x, target, terms)
    inverse = losses.new_empty(0)
    if reduction == "mean":
        inverse = inverse_by_formula(target, x, terms)
    loss = losses if reduction == "none" else losses.sum() * (inverse if reduction == "mean" else 1.0)
    return loss.to(dtype), statistics.to(dtype), inverse.to(dtype)


in_pytorch("cross_entropy", _decomposed)
by_formula("cross_entropy", _formula)
differentiable_by_formula("cross_entropy_backward", _backward_formula)

# ---- registration: fused ---------------------------------------------------------------------------------------


@operator("cross_entropy_with_gradient")
def _cross_entropy_with_gradient(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss (), its gradient (N, V))."""
    check_targets(target, x.shape[1], ignore_index)
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    inverse = inverse_of_targets(target, x.shape[1], terms, inverse_dtype(x)) if mean else None
    gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    losses, _ = losses_of_rows(x, target, terms, inverse, gradient)
    return total_of(losses, inverse, x), gradient


@torch.library.register_fake("rooftop::cross_entropy_with_gradient")
def _(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty((), dtype=accumulator_dtype(x.dtype)), x.new_empty(x.shape)


@without_autocast
def _decomposed_with_gradient(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    losses, _ = cross_entropy_reference(x, target, terms)
    factor = inverse_by_formula(target, x, terms) if mean else losses.new_ones(())
    gradient = cross_entropy_gradient_reference(factor, x, target, terms)
    return (losses.sum() * factor).to(accumulator_dtype(x.dtype)), gradient


in_pytorch("cross_entropy_with_gradient", _decomposed_with_gradient)


def _save_gradient(ctx: Context, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, target, weight, *numbers, mean = inputs
    kept = x if by_reference(x) else None
    ctx.save_for_backward(output[1], target, weight, kept)  # type: ignore[arg-type]
    # To keep the logits would cost the memory that the kernel saves. Who differentiates twice often still has them.
    ctx.logits, ctx.version = weakref.ref(x), x._version  # type: ignore[attr-defined]
    ctx.terms, ctx.mean = numbers, mean  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient, which take as long as to read the logits


def _scale_gradient(ctx: Context, dloss: Tensor | None, _gradient: None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 7
    gradient, target, weight, x = ctx.saved_tensors  # type: ignore[attr-defined]
    if not torch.is_grad_enabled():
        return (scaled(gradient, dloss), *(None,) * 6)
    # create_graph: the gradient made in forward does not know how it depends on the logits.
    x = ctx.logits() if x is None else x  # type: ignore[attr-defined]
    if x is None or x._version != ctx.version:  # type: ignore[attr-defined]
        raise NotImplementedError(
            "cross_entropy has no second derivative by its fused kernel where the logits (N, V) are gone or changed: "
            "keep them in a variable, or use fused=False"
        )
    terms = Terms(weight, *ctx.terms)  # type: ignore[attr-defined]
    return (reduced_gradient_formula(dloss, x, target, terms, ctx.mean), *(None,) * 6)  # type: ignore[attr-defined]


def _fused_formula(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    mean: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    terms = Terms(weight, ignore_index, label_smoothing, z_loss)
    return loss_formula(x, target, terms, "mean" if mean else "sum"), None


by_formula("cross_entropy_with_gradient", _fused_formula)
differentiable("cross_entropy_with_gradient", _scale_gradient, _save_gradient)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor: in place, unless it is needed again (retain_graph, a batch of factors) or the call is only
    being traced."""
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    if again or isinstance(gradient, FunctionalTensor) or transformed((factor,)):
        return _scale(gradient, factor)
    _scale_in_place(gradient, factor)
    return gradient


@operator("scale_gradient")
def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    result = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    _scale_into(gradient, factor, result)
    return result


@torch.library.register_fake("rooftop::scale_gradient")
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape)


by_formula("scale_gradient", lambda gradient, factor: (gradient * factor).to(gradient.dtype))


@operator("scale_gradient_", mutates=["gradient"])
def _scale_in_place(gradient: Tensor, factor: Tensor) -> None:
    _scale_into(gradient, factor, gradient)


@torch.library.register_fake("rooftop::scale_gradient_")
def _(gradient: Tensor, factor: Tensor) -> None:
    return None


def _scale_into(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """`gradient` and `result` are contiguous."""
    in_place = result is gradient
    if by_reference(gradient):
        if gradient.is_cuda:  # float64, as the factor is; the host need not wait for it
            torch.mul(gradient, factor, out=result)
        elif not in_place or float(factor) != 1.0:
            torch.mul(gradient, float(factor), out=result)
        return
    launches.scale(gradient, factor, result)


# ---- cost --------------------------------------------------------------------------------------------------------


def row_flops(call: Call, smoothing: str = "label_smoothing") -> int:
    """Of one logit: maximum, subtraction, exponential, sum; with smoothing one sum more, weighted one product more."""
    return 4 + (call[smoothing] > 0) * (1 + (call.get("class_weight", call.get("weight")) is not None))


@cost_of("rooftop::cross_entropy")
def _cost(call: Call) -> Cost:
    x = call["x"]
    read = distinct_bytes([x, call["target"], call["weight"]])
    return Cost(read, distinct_bytes(call.out), {precision_of(x.dtype): row_flops(call) * x.numel()})


@cost_of("rooftop::cross_entropy_backward")
def _backward_cost(call: Call) -> Cost:
    """Subtraction, exponential and product of each logit; with smoothing one subtraction more."""
    x = call["x"]
    read = [call["dloss"], x, call["target"], call["weight"], call["statistics"], call["inverse"]]
    flops = (3 + (call["label_smoothing"] > 0)) * x.numel()
    return Cost(distinct_bytes(read), distinct_bytes([call.out]), {precision_of(x.dtype): flops})


@cost_of("rooftop::cross_entropy_with_gradient")
def _fused_cost(call: Call) -> Cost:
    """Both; the exponential counts once, since that of the forward pass only has to be divided by the sum."""
    x = call["x"]
    read = distinct_bytes([x, call["target"], call["weight"]])
    flops = (row_flops(call) + 1 + (call["label_smoothing"] > 0)) * x.numel()
    return Cost(read, distinct_bytes(call.out), {precision_of(x.dtype): flops})


@cost_of("rooftop::scale_gradient")
def _scale_cost(call: Call) -> Cost:
    gradient = call["gradient"]
    read = distinct_bytes([gradient, call["factor"]])
    return Cost(read, distinct_bytes([call.out]), {precision_of(gradient.dtype): gradient.numel()})


@cost_of("rooftop::scale_gradient_")
def _scale_in_place_cost(call: Call) -> Cost:
    """Whether there is anything to do is a matter of the factor's value: the least is to read it."""
    return Cost(distinct_bytes([call["factor"]]))


# ---- public ----------------------------------------------------------------------------------------------------


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
    """Cross entropy of logits and class indices; arguments as of `torch.nn.functional.cross_entropy`, and two more.

    Args:
        input: logits (N, V), (V,) or (N, V, d1, ...), bfloat16, float16, float32 or float64; the last form is copied
            with V last.
        target: class indices, int64, of the shape of `input` without V; on the same device.
        weight: (V,), of each class, without gradient.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" (divided by the sum of the targets' weights), "sum" or "none".
        label_smoothing: from 0 to 1, the share that is spread over all classes.
        z_loss: what the squared log-sum-exp of each row is multiplied with; weighted as the row is.
        fused: make the gradient in the forward pass. None: where `input` needs one, the loss is reduced, and its dtype
            is not float16.

    Returns:
        () or the shape of `target`, in the dtype of `input`; float32 under autocast. Everything between is float32
        (float64 for float64). The mean is 0, and so is its gradient, where no target counts
        (PyTorch's is NaN there, which a sum over micro-batches keeps).

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit (class probabilities, too).
        ValueError: shapes, devices or numbers that do not fit; targets that are no class, on the CPU and, with
            ROOFTOP_CHECK=1 in the environment, on a GPU. Without it their rows, and a reduced loss, are NaN there; a
            mean is divided by what the other targets weigh, and their gradients are finite.
        NotImplementedError: a second derivative of the fused form on a GPU, where `input` is not (N, V), was changed in
            place or is not there any more: that form does not keep it.
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
        raise ValueError("cross_entropy: fused needs a reduction: the gradient of each row's loss is not known before")
    numbers = (ignore_index, float(label_smoothing), float(z_loss))
    indices = target.reshape(-1)
    weight = weight.detach() if weight is not None else None
    if fused and keeps_for_backward(input):
        return _cross_entropy_with_gradient(x, indices, weight, *numbers, reduction == "mean")[0].to(dtype)
    loss = _cross_entropy(x, indices, weight, *numbers, reduction)[0].to(dtype)
    return loss.reshape(target.shape) if reduction == "none" else loss


class LogitsShape(NamedTuple):
    """Logits that are never made, as far as checks look at them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)


def check_index(name: str, ignore_index: int) -> None:
    """TypeError where it is no int, which no target would be."""
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
        TypeError: what is no tensor, or of a dtype that the losses do not take.
        ValueError: shapes, devices or values that do not fit; the message names the argument.
    """
    if not isinstance(x, LogitsShape):
        check_tensors(name, FLOATS, input=x)
    check_tensors(name, None, ("weight",), ("input", x), target=target, weight=weight)
    if target.dtype != torch.int64:
        raise TypeError(
            f"{name}: target must be class indices of int64, got {target.dtype}; of class probabilities use "
            "torch.nn.functional.cross_entropy"
        )
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
    for argument, value in (("label_smoothing", smoothing), ("z_loss", z_loss)):
        if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{name}: {argument} must be a number, got {type(value).__name__}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {smoothing}")
    if not abs(z_loss) < math.inf:  # torch.compile has no isfinite of a number that it takes as a variable
        raise ValueError(f"{name}: z_loss must be finite, got {z_loss}")
