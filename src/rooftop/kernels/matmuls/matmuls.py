"""Matrix products with what follows them: y = activation(x @ weight.T + bias) + residual.

Bound by the tensor cores from a few hundred rows on, below by reading the weight. A library's product alone reaches the
roof, and a pass of its own for the activation then costs two more trips through memory: here bias, activation and
residual are applied to the float32 sums before they are written. Tiles in bands that share operands in L2, and
persistent programs with tensor descriptors: Tillet, Kung and Cox 2019, "Triton", and its tutorial on persistent
products. Deterministic: no atomics.

`tables.py` chooses by the shape which kernel with which parameters, or the library (cuBLAS, and one pass for the
rest), and `linear_act_plan` says what is taken and why; `launches.py` does it.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.matmuls.launches import backward, finish, forward
from rooftop.kernels.matmuls.tables import LinearPlan, plan_of
from rooftop.kernels.operands.activations import (
    ACTIVATIONS,
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    OF_OUTPUT,
    activated,
    activation_backward_reference,
)
from rooftop.kernels.operands.autocasting import under_autocast
from rooftop.kernels.operands.checks import check_choice, check_same_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.padded_rows import LEAST_PADDED, missing_columns, padded
from rooftop.launch.fast_path import computed_on_cpu, unwatched
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
from rooftop.launch.triton_launch import INTERPRETED

# ---- reference -------------------------------------------------------------------------------------------------


def linear_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y, what was activated) of x (..., K) and weight (N, K) in plain PyTorch; what follows the product is float32, or
    float64 for float64."""
    before = functional.linear(x, weight, bias)
    values = activated(before.to(accumulator_dtype(x.dtype)), activation)
    if residual is not None:
        values = values + residual
    return values.to(x.dtype), before


def activation_reference(before: Tensor, activation: str) -> Tensor:
    """activation(before), float32 inside, or float64 for float64."""
    return activated(before.to(accumulator_dtype(before.dtype)), activation).to(before.dtype)


# ---- registration ----------------------------------------------------------------------------------------------


def _by_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    y, before = linear_act_reference(x, weight, bias, activation, residual)
    return y, (before.clone() if before is y else before) if keep else x.new_empty(0)


@operator("linear_act")
def _linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    plan = plan_of(x, weight, bias, activation, residual, keep)
    if plan.backend == "reference":
        return _by_reference(x, weight, bias, activation, residual, keep)
    return forward(plan, x, weight, bias, activation, residual, keep, rounded)


@torch.library.register_fake("rooftop::linear_act")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if keep else 0)


in_pytorch("linear_act", _by_reference)


@operator("linear_act_backward")
def _linear_act_backward(
    dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    if dy.dtype != torch.float64 and (dy.device.type == "cuda" or INTERPRETED):
        return backward(dy, saved, activation, of_output, sums)
    dz = activation_backward_reference(dy, saved, activation, of_output)
    nothing, total = dy.new_empty(0), dz.sum(0).to(dy.dtype) if sums else dy.new_empty(0)
    return dz.to(dy.dtype) if activation != "none" else nothing, total


@torch.library.register_fake("rooftop::linear_act_backward")
def _(dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape if activation != "none" else 0), dy.new_empty(dy.shape[1] if sums else 0)


@operator("activation")
def _activation(before: Tensor, activation: str) -> Tensor:
    if before.dtype != torch.float64 and before.numel() and (before.device.type == "cuda" or INTERPRETED):
        y = torch.empty(before.shape, dtype=before.dtype, device=before.device)
        finish(before.contiguous(), 1, before.shape[0], None, activation, None, y, before.new_empty(0))
        return y
    return activation_reference(before, activation).clone(memory_format=torch.contiguous_format)


@torch.library.register_fake("rooftop::activation")
def _(before: Tensor, activation: str) -> Tensor:
    return before.new_empty(before.shape)


in_pytorch("activation", activation_reference)


def _keeps(activation: str, residual: Tensor | None) -> bool:
    """Whether backward needs what was activated, and not only the result."""
    return activation != "none" and (activation not in OF_OUTPUT or residual is not None)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, activation, residual, keep, *_ = inputs
    y, before = output
    needed = _keeps(activation, residual)
    ctx.activation, ctx.of_output = activation, not needed and not keep  # type: ignore[attr-defined]
    saved = None if activation == "none" or (needed and not keep) else before if keep else y
    ctx.save_for_backward(x, weight, bias, saved)  # type: ignore[arg-type]
    ctx.mark_non_differentiable(before)
    ctx.set_materialize_grads(False)  # no zeros for what was activated


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor | None, _before: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, weight, bias, saved = ctx.saved_tensors  # type: ignore[attr-defined]
    for_x, for_weight, for_bias, _, for_residual = ctx.needs_input_grad[:5]  # type: ignore[attr-defined]
    activation, of_output = ctx.activation, ctx.of_output  # type: ignore[attr-defined]
    dz, dbias = dy, None
    if torch.is_grad_enabled():  # create_graph: what was saved does not know how it depends on x
        if activation != "none":
            before = _product(x, weight, bias)
            dz = activation_backward_reference(dy, before, activation, of_output=False).to(dy.dtype)
        dbias = dz.sum(0) if for_bias else None
    elif for_bias or (activation != "none" and (for_x or for_weight)):
        if activation == "none":
            saved = dy
        elif saved is None:  # of a traced program
            saved = _product(x, weight, bias)
        made, dbias = _linear_act_backward(dy, saved, activation, of_output, for_bias)
        dz = made if activation != "none" else dy
    dx, dweight = _products(dz, x if for_weight else None, weight if for_x else None)
    return dx, dweight, dbias if for_bias else None, None, dy if for_residual else None, None, None


@without_autocast
def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What is activated."""
    return functional.linear(x, weight, bias)


def _products(dz: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(dz @ weight, dz^T @ x) of dz (M, N), weight (N, K) and x (M, K), each where it is given."""
    columns = dz.shape[1]
    more = missing_columns(columns, dz)
    if more and dz.numel() >= LEAST_PADDED and not torch.is_grad_enabled():
        dz, weight = padded(dz, columns=more), padded(weight, rows=more) if weight is not None else None
    dx = dz @ weight if weight is not None else None
    return dx, (dz.t() @ x)[:columns] if x is not None else None


differentiable("linear_act", _differentiate, _save)


def _formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, None]:
    return linear_act_reference(x, weight, bias, activation, residual)[0], None


def _backward_formula(
    dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool
) -> tuple[Tensor | None, Tensor | None]:
    dz = activation_backward_reference(dy, saved, activation, of_output)
    return dz.to(dy.dtype) if activation != "none" else None, dz.sum(0).to(dy.dtype) if sums else None


by_formula("linear_act", _formula)
differentiable_by_formula("linear_act_backward", _backward_formula)


@cost_of("rooftop::linear_act")
def _forward_cost(call: Call) -> Cost:
    """The product, and for each result bias, activation and residual."""
    x, weight, bias, residual = call["x"], call["weight"], call["bias"], call["residual"]
    results = x.shape[0] * weight.shape[0]
    each = FORWARD_FLOPS[call["activation"]] + (bias is not None) + (residual is not None)
    flops: dict[str, int] = {matrix_precision(x): 2 * results * x.shape[1]}
    precision = precision_of(x.dtype)
    flops[precision] = flops.get(precision, 0) + each * results
    return Cost(distinct_bytes([x, weight, bias, residual]), distinct_bytes(call.out), flops)


@cost_of("rooftop::activation")
def _activation_cost(call: Call) -> Cost:
    before = call["before"]
    flops = {precision_of(before.dtype): FORWARD_FLOPS[call["activation"]] * before.numel()}
    return Cost(distinct_bytes([before]), distinct_bytes([call.out]), flops)


@cost_of("rooftop::linear_act_backward")
def _backward_cost(call: Call) -> Cost:
    dy, saved, activation = call["dy"], call["saved"], call["activation"]
    each = BACKWARD_FLOPS[activation] + call["sums"]
    read = [dy] if activation == "none" else [dy, saved]
    return Cost(distinct_bytes(read), distinct_bytes(call.out), {precision_of(dy.dtype): each * dy.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(input @ weight.T + bias) + residual; the first arguments as of `torch.nn.functional.linear`.

    Args:
        input: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), same dtype.
        bias: (N,), same dtype.
        activation: "none", "relu", "gelu", "gelu_tanh" (as `gelu(approximate="tanh")`), "silu" or "sigmoid".
        residual: (..., N), same dtype; under autocast of any of these dtypes.

    Returns:
        (..., N). Sums, bias, activation and residual are float32 (float64 for float64) and rounded once; TF32 is used
        for float32 only where torch is allowed to. Under autocast the operands are cast as `linear`'s.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, or an unknown activation.
        NotImplementedError: forward-mode differentiation.
    """
    if activation == "none" and residual is None and _is_torchs(input, weight, bias):
        return functional.linear(input, weight, bias)
    return _linear_act_of(input, weight, bias, activation, residual)[0]


def linear_act_and_before(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu"
) -> tuple[Tensor, Tensor]:
    """`linear_act`, and what was activated, without a gradient: `activation_of` makes the result of it again.

    So what is activated is rounded before, as PyTorch does, and as what is kept for backward: in half precision the
    result has two roundings. Arguments and errors as of `linear_act`; the activation is one whose backward needs what
    was activated.

    Returns:
        (y, before), (..., N) both.

    Raises:
        ValueError: also another activation.
    """
    if not _keeps(activation, None):
        raise ValueError(
            f"linear_act_and_before: backward does not keep what {activation!r} activates: use gelu, gelu_tanh or silu"
        )
    y, before = _linear_act_of(input, weight, bias, activation, None, again=True)
    return y, before.detach().view(y.shape)


def activation_of(before: Tensor, activation: str) -> Tensor:
    """The result of `linear_act` of what it kept, bit for bit; without a gradient.

    Args:
        before: (..., N), what was activated.
        activation: as of `linear_act`.

    Raises:
        ValueError: an unknown activation.
    """
    check_choice("activation_of", "activation", activation, ACTIVATIONS)
    y: Tensor = _activation(before.detach().reshape(-1, before.shape[-1]), activation)
    return y.view(before.shape)


def _linear_act_of(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y (..., N), what was activated, (M, N) or (..., N); nothing, where it is neither needed nor asked for).

    again: whether it is asked for, so that y can be made of it again.
    """
    if _is_plain(input, weight, bias, activation, residual):
        return linear_act_reference(input, weight, bias, activation, residual)
    x, weight, bias, residual, later = _prepared("linear_act", input, weight, bias, activation, residual)
    columns = weight.shape[0]
    tensors = (x, weight, bias, residual)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    added = residual.reshape(rows.shape[0], columns) if residual is not None else None
    keep = again or (_keeps(activation, residual) and keeps_for_backward(*tensors))
    y, before = _linear_act(rows, weight, bias, activation, added, keep, again)
    y = y.reshape(*x.shape[:-1], columns)
    return y if later is None else y + later, before


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> bool:
    """Whether all lie on the CPU and fit, so that PyTorch's own functions do it with less ado. Nothing is refused
    here."""
    if INTERPRETED or x is None or weight is None or not computed_on_cpu(x, weight, bias, residual):
        return False
    return (
        activation in ACTIVATIONS
        and x.dtype in FLOATS
        and all(t is None or t.dtype == x.dtype for t in (weight, bias, residual))
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
        and (residual is None or residual.shape == (*x.shape[:-1], weight.shape[0]))
    )


_known_products: dict[tuple[Any, ...], bool] = {}
MOST_KNOWN = 4096


def _is_torchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `torch.nn.functional.linear` does all of it, and the host with less ado: a product for the library, whose
    rows are aligned, and no bias whose gradient a kernel sums faster. Nothing is refused here."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if INTERPRETED or not all(isinstance(t, Tensor) and t.is_cuda and t.layout == torch.strided for t in tensors):
        return False
    if not unwatched(*tensors) or not x.is_contiguous() or torch.is_autocast_enabled("cuda"):
        return False
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return False
    places = ((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors)
    key = tuple(chain.from_iterable(places))
    found = _known_products.get(key)
    if found is None:
        by_library = linear_act_plan(x, weight, bias).backend == "library"
        found = by_library and not any(missing_columns(size, x) for size in weight.shape)
        if len(_known_products) >= MOST_KNOWN:
            _known_products.clear()
        _known_products[key] = found
    return found


@recorded_whole
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """input @ other; shapes, broadcasting and results as of `torch.matmul`.

    Args:
        input: (K,), (M, K) or (..., M, K), bfloat16, float16, float32 or float64.
        other: (K,), (K, N) or (..., K, N), same dtype. Where it has more than two dimensions the products are
            `torch.matmul`'s, which batches them.

    Returns:
        As `torch.matmul`, with float32 sums (float64 for float64).

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_act`.
    """
    check_tensors("matmul", FLOATS, input=input, other=other)
    if not under_autocast(input):
        check_same_dtype("matmul", "input", input, "cast one, or use autocast", other=other)
    if input.dim() == 0 or other.dim() == 0:
        raise ValueError(f"matmul: a number is no matrix: input {tuple(input.shape)}, other {tuple(other.shape)}")
    if other.dim() > 2:
        if input.shape[-1] != other.shape[-2] or not _broadcast(input.shape[:-2], other.shape[:-2]):
            shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
            raise ValueError(f"matmul: input and other, {shapes} do not fit: expected (..., M, K), (..., K, N)")
        return torch.matmul(input, other)
    weight = other[None] if other.dim() == 1 else other.t()
    if input.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
        raise ValueError(f"matmul: input and other, {shapes} do not fit: expected (..., K), (K, N)")
    x, weight, *_ = _prepared("matmul", input, weight, None, "none", None)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _linear_act(rows, weight, None, "none", None, False)[0]
    return y.reshape(x.shape[:-1]) if other.dim() == 1 else y.reshape(*x.shape[:-1], weight.shape[0])


def linear_act_plan(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> LinearPlan:
    """How `linear_act` with these arguments is computed, and why; arguments and errors are the same.

    Nothing is computed. As in the call, it matters whether a gradient will be needed.
    """
    x, weight, bias, residual, _ = _prepared("linear_act_plan", input, weight, bias, activation, residual)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    added = residual.reshape(rows.shape[0], weight.shape[0]) if residual is not None else None
    keep = _keeps(activation, residual) and keeps_for_backward(x, weight, bias, residual)
    return plan_of(rows, weight, bias, activation, added, keep)


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


Prepared = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _prepared(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Prepared:
    """The arguments, checked and cast as autocast says, and a residual that is to be added later: under autocast one
    of another dtype makes the sum wider, as in PyTorch."""
    check_tensors(name, FLOATS, ("bias", "residual"), input=x, weight=weight, bias=bias, residual=residual)
    check_choice(name, "activation", activation, ACTIVATIONS)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected input (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_shape(name, "bias", bias, (weight.shape[0],))
    check_shape(name, "residual", residual, (*x.shape[:-1], weight.shape[0]), ": use .expand()")
    later = None
    if under_autocast(x):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (t.to(narrow) if t is not None else None for t in (x, weight, bias))  # type: ignore[assignment]
        if residual is not None and residual.dtype != narrow:
            residual, later = None, residual
    check_same_dtype(name, "input", x, "cast one, or use autocast", weight=weight, bias=bias, residual=residual)
    return x, weight, bias, residual, later
