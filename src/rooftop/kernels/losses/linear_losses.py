"""Cross entropy of hidden states and a weight, without the logits.

The logits of a chunk of rows at a time are made, turned into their gradient in place, and multiplied by weight and
hidden at once (as in Hsu et al. 2024, "Liger Kernel"), all in the forward pass; backward only scales the gradients.
Bound by its three matrix products. The loss of a row is that of `losses.py`. Deterministic: chunks are added up in
their order, and their size depends on nothing but the shapes.

In float16 the gradient of the logits is not divided by the rows before the products: it would underflow before a loss
scale can help. That factor is applied in backward, where the gradient of the weight is still float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.losses.formulas import (
    cross_entropy_gradient_reference,
    cross_entropy_reference,
    inverse_by_formula,
    loss_formula,
    reduced_gradient_formula,
    reference_dtype,
)
from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.losses.losses import (
    LogitsShape,
    check_arguments,
    check_index,
    check_targets,
    inverse_dtype,
    inverse_of_targets,
    losses_of_rows,
    row_flops,
    scaled,
    total_of,
)
from rooftop.kernels.operands.autocasting import result_dtype, under_autocast
from rooftop.kernels.operands.checks import check_dtype, check_same_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.padded_rows import missing_columns, padded
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    in_pytorch,
    keeps_for_backward,
    operator,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole

# ---- chunks ----------------------------------------------------------------------------------------------------

MOST_CHUNK_ROWS = 8192  # more add nothing to the speed of the matrix products
LEAST_CHUNK_ROWS = 2048  # fewer take from it, and add passes over the weight's gradient
# So few logits are one chunk: they take no memory to speak of. PyTorch multiplies few rows in another order than many
# on a CPU, so that of two chunks of 3 and 2 rows half of all draws of 5 x 768 were beyond the numerics gate.
ONE_CHUNK_LOGITS = 1 << 20


def chunk_rows(rows: int, features: int, classes: int) -> int:
    """Rows whose logits are made at a time: they take as much memory as the weight (V, H), within the limits above.

    More logits than `ONE_CHUNK_LOGITS` are at least two chunks, all of about the same size.
    """
    if rows * classes <= ONE_CHUNK_LOGITS:
        return max(1, rows)
    most = min(max(features, LEAST_CHUNK_ROWS), MOST_CHUNK_ROWS)
    count = max(2, -(-rows // most))
    return max(1, -(-rows // count))


# ---- implementation ---------------------------------------------------------------------------------------------


def _linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: Terms, mean: bool, chunk: int,
    wanted: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, dhidden, dweight, dbias, factor): gradients still have to be multiplied by `factor`."""
    check_targets(target, weight.shape[0], terms.ignore_index)
    rows, classes, wide = hidden.shape[0], weight.shape[0], accumulator_dtype(hidden.dtype)
    inverse = inverse_of_targets(target, classes, terms, inverse_dtype(hidden)) if mean else None
    within = None if _scaled_late(hidden) else inverse  # what the gradient of the logits is multiplied with
    shapes = (hidden, weight, bias)
    weight, bias = _of_aligned_classes(weight, bias)
    dhidden, dweight, dbias = (
        torch.zeros(t.shape, dtype=hidden.dtype if i == 0 else wide, device=t.device) if t is not None and w else None
        for i, (t, w) in enumerate(zip((hidden, weight, bias), wanted, strict=True))
    )
    losses = torch.empty(rows, dtype=reference_dtype(hidden.dtype), device=hidden.device)
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        part = hidden[start:stop]  # (chunk, H)
        logits = torch.mm(part, weight.t()) if bias is None else torch.addmm(bias, part, weight.t())  # (chunk, V)
        real = logits[:, :classes]
        gradient = real if any(wanted) else None
        losses[start:stop] = losses_of_rows(real, target[start:stop], terms, within, gradient)[0]
        logits[:, classes:] = 0.0  # what a row of hidden that is not finite left there
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[start:stop])
        if dweight is not None:
            _add_product(dweight, logits.t(), part)
        if dbias is not None:
            dbias += logits.sum(0, dtype=wide)
        del logits, real, gradient  # before the next are made
    factor = inverse.clone() if inverse is not None and within is None else losses.new_ones(())
    loss, factor = total_of(losses, inverse, hidden), factor.to(wide)
    dweight, dbias = (t[:classes] if t is not None else None for t in (dweight, dbias))
    made = [
        hidden.new_empty(0) if d is None else d if _scaled_late(hidden) else d.to(t.dtype)  # type: ignore[union-attr]
        for d, t in zip((dhidden, dweight, dbias), shapes, strict=True)
    ]
    return loss, made[0], made[1], made[2], factor


def _of_aligned_classes(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """With zeros for as many more classes as make the rows of the logits aligned."""
    more = missing_columns(weight.shape[0], weight)
    if more == 0:
        return weight, bias
    return padded(weight, rows=more), functional.pad(bias, (0, more)) if bias is not None else None


def _scaled_late(hidden: Tensor) -> bool:
    """In float16, 1 / rows would make the gradient of the logits underflow before a loss scale can help."""
    return hidden.dtype == torch.float16


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the dtype of `total`: float32 also for half precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += a @ b


# ---- registration ----------------------------------------------------------------------------


@operator("linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, mean: bool, chunk: int, wanted: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss (), gradients of hidden, weight and bias as `wanted` says, what they are still to be multiplied with)."""
    terms = Terms(class_weight, ignore_index, label_smoothing, z_loss)
    return _linear(hidden, weight, bias, target, terms, mean, chunk, wanted)


@torch.library.register_fake("rooftop::linear_cross_entropy")
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, mean: bool, chunk: int, wanted: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = accumulator_dtype(hidden.dtype)
    dhidden, dweight, dbias = (
        hidden.new_empty(t.shape, dtype=wide if _scaled_late(hidden) and i else t.dtype)
        if t is not None and w
        else hidden.new_empty(0)
        for i, (t, w) in enumerate(zip((hidden, weight, bias), wanted, strict=True))
    )
    return hidden.new_empty((), dtype=wide), dhidden, dweight, dbias, hidden.new_empty((), dtype=wide)


def _save_gradients(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    needed = [int(each) for each in ctx.needs_input_grad[:3]]  # type: ignore[attr-defined]
    wanted = inputs[-1]
    again = any(need and not made for need, made in zip(needed, wanted, strict=True))  # of a traced program
    ctx.save_for_backward(*inputs[:5], *([] if again else output[1:]))
    ctx.terms, ctx.mean = inputs[5:8], inputs[8]  # type: ignore[attr-defined]
    ctx.rest = (*inputs[5:-1], needed) if again else None  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the gradients
    ctx.dtypes = [t.dtype if t is not None else None for t in inputs[:3]]  # type: ignore[attr-defined]
    ctx.wanted = needed if again else wanted  # type: ignore[attr-defined]


def _scale_gradients(
    ctx: torch.autograd.function.FunctionCtx, dloss: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 11
    hidden, weight, bias, target, class_weight, *made = ctx.saved_tensors  # type: ignore[attr-defined]
    if torch.is_grad_enabled():  # create_graph: what forward made does not know how it depends on hidden and weight
        terms = Terms(class_weight, *ctx.terms)  # type: ignore[attr-defined]
        slopes = _gradients_formula(dloss, hidden, weight, bias, target, terms, ctx.mean)  # type: ignore[attr-defined]
        return (*(t if w else None for t, w in zip(slopes, ctx.wanted, strict=True)), *[None] * 8)  # type: ignore[attr-defined]
    if ctx.rest is not None:  # type: ignore[attr-defined]
        made = _linear_cross_entropy(hidden, weight, bias, target, class_weight, *ctx.rest)[1:]  # type: ignore[attr-defined]
    *gradients, factor = made
    factor = factor * dloss
    found = [
        scaled(gradient, factor).to(dtype) if wanted and dtype is not None else None
        for gradient, wanted, dtype in zip(gradients, ctx.wanted, ctx.dtypes, strict=True)  # type: ignore[attr-defined]
    ]
    return (*found, *[None] * 8)


@without_autocast
def _gradients_formula(
    dloss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: Terms, mean: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of hidden, weight and bias by PyTorch's operators, with all the logits."""
    slope = reduced_gradient_formula(dloss, functional.linear(hidden, weight, bias), target, terms, mean)  # (N, V)
    return slope @ weight, slope.t() @ hidden, None if bias is None else slope.sum(0)


def _formula(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, mean: bool, chunk: int, wanted: list[bool],
) -> tuple[Tensor, None, None, None, None]:  # fmt: skip
    terms = Terms(class_weight, ignore_index, label_smoothing, z_loss)
    logits = functional.linear(hidden, weight, bias)
    return loss_formula(logits, target, terms, "mean" if mean else "sum"), None, None, None, None


@without_autocast
def _decomposed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, mean: bool, chunk: int, wanted: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_linear`, in PyTorch's operators and with all the logits."""
    terms, wide = Terms(class_weight, ignore_index, label_smoothing, z_loss), accumulator_dtype(hidden.dtype)
    logits = functional.linear(hidden, weight, bias)
    losses, _ = cross_entropy_reference(logits, target, terms)
    inverse = inverse_by_formula(target, logits, terms) if mean else losses.new_ones(())
    late = _scaled_late(hidden)
    factor = losses.new_ones(()) if late else inverse
    slope = cross_entropy_gradient_reference(factor, logits, target, terms)  # (N, V)
    makers = (lambda: slope @ weight, lambda: slope.t().to(wide) @ hidden.to(wide), lambda: slope.sum(0, dtype=wide))
    made = [
        make().to(t.dtype if i == 0 or not late else wide) if w and t is not None else hidden.new_empty(0)
        for i, (make, t, w) in enumerate(zip(makers, (hidden, weight, bias), wanted, strict=True))
    ]
    rest = (inverse if late else losses.new_ones(())).to(wide)
    return (losses.sum() * inverse).to(wide), made[0], made[1], made[2], rest


in_pytorch("linear_cross_entropy", _decomposed)
by_formula("linear_cross_entropy", _formula)
differentiable("linear_cross_entropy", _scale_gradients, _save_gradients)


@cost_of("rooftop::linear_cross_entropy")
def _linear_cost(call: Call) -> Cost:
    """A matrix product for the logits and one for each gradient of hidden and weight; no logits are moved."""
    hidden, weight, bias = call["hidden"], call["weight"], call["bias"]
    logits = hidden.shape[0] * weight.shape[0]
    wanted = call["wanted"]
    matrix = 2 * logits * hidden.shape[1] * (1 + wanted[0] + wanted[1])
    pointwise = row_flops(call) + (bias is not None) + wanted[2] + any(wanted) * (1 + (call["label_smoothing"] > 0))
    flops: dict[str, int] = {matrix_precision(hidden): matrix}
    precision = precision_of(hidden.dtype)
    flops[precision] = flops.get(precision, 0) + pointwise * logits
    return Cost(
        distinct_bytes([hidden, weight, bias, call["target"], call["class_weight"]]), distinct_bytes(call.out), flops
    )


# ---- public -----------------------------------------------------------------------------------------------------


@recorded_whole
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, target) without ever holding all the logits.

    The forward pass makes the gradients too, chunk by chunk; backward only scales them. The gradient of the weight is
    added up in float32.

    Args:
        hidden: (..., H), bfloat16, float16, float32 or float64; under autocast cast to its dtype, as are weight and
            bias.
        weight: (V, H), as of `torch.nn.Linear`; same dtype.
        target: class indices (...), int64.
        bias: (V,), same dtype.
        class_weight, ignore_index, label_smoothing, z_loss: as of `cross_entropy`.
        reduction: "mean" or "sum".
        chunk_size: rows whose logits are made at a time; None: so many that the logits take as much memory as the
            weight, and 2048 to 8192; all of up to 2^20 logits.

    Returns:
        () in the dtype of hidden, float32 under autocast.

    Raises:
        TypeError, ValueError: as `cross_entropy`.
    """
    check_tensors("linear_cross_entropy", None, ("bias",), hidden=hidden, weight=weight, bias=bias)
    check_tensors("linear_cross_entropy", target=target)
    dtype = result_dtype("cross_entropy", hidden)
    if under_autocast(hidden):
        narrow = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = (t.to(narrow) if t is not None else None for t in (hidden, weight, bias))  # type: ignore[assignment]
    _check_linear(hidden, weight, bias, target)
    rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0)  # (N, H)
    logits = LogitsShape((rows.shape[0], weight.shape[0]), hidden.dtype, hidden.device)
    indices = target.reshape(-1)
    check_arguments("linear_cross_entropy", logits, indices, class_weight, reduction, label_smoothing, z_loss)
    check_index("linear_cross_entropy", ignore_index)
    if reduction == "none":
        raise ValueError("linear_cross_entropy: reduction must be 'mean' or 'sum': gradients are made in forward")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"linear_cross_entropy: chunk_size must be a positive int, got {chunk_size!r}")
    wanted = [int(keeps_for_backward(t)) for t in (hidden, weight, bias)]  # torch.jit.trace takes no list of bools
    chunk = chunk_size or chunk_rows(rows.shape[0], rows.shape[1], weight.shape[0])
    class_weight = class_weight.detach() if class_weight is not None else None
    numbers = (ignore_index, float(label_smoothing), float(z_loss))
    loss, *_ = _linear_cross_entropy(
        rows, weight, bias, indices, class_weight, *numbers, reduction == "mean", chunk, wanted
    )
    return loss.to(dtype)


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    name = "linear_cross_entropy"
    check_dtype(name, "hidden", hidden.dtype, FLOATS)
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected hidden (..., H) and weight (V, H), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    check_shape(name, "target", target, tuple(hidden.shape[:-1]))
    check_same_dtype(name, "hidden", hidden, "cast one, or use autocast", weight=weight, bias=bias)
    check_shape(name, "bias", bias, (weight.shape[0],))
