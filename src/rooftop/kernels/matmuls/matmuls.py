"""Matrix products fused with the operations after them: y = activation(x @ weight.T + bias) + residual.

If x has a few hundred rows or more, a product is bound by the tensor cores; if x has fewer rows, the product is bound
by reading the weight. The product of cuBLAS reaches the hardware's limit, but a separate pass for the activation reads
and writes each element of the result once more. The kernels here apply bias, activation and residual to the float32
sums before writing them. Tiles of a band share operands in L2, and persistent programs use tensor descriptors, as in
Triton's tutorial on persistent matrix products (Tillet, Kung and Cox 2019, "Triton"). No sum uses atomics, so results
are deterministic.

For the shape of a call, `tables.py` chooses a kernel and its parameters, or cuBLAS and one pass for the operations
after it. `linear_act_plan` returns the choice and its reason; `launches.py` launches the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.matmuls import launches
from rooftop.kernels.matmuls.tables import LinearPlan, plan_of
from rooftop.kernels.operands.activations import (
    ACTIVATIONS,
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    OF_OUTPUT,
    activated,
    activation_backward_reference,
)
from rooftop.kernels.operands.autocasting import cast_beside_residual, under_autocast
from rooftop.kernels.operands.checks import check_choice, check_same_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.padded_rows import LEAST_PADDED, missing_columns, padded
from rooftop.launch.fast_path import computed_on_cpu, unwatched
from rooftop.launch.operators import declare, keeps_for_backward, without_autocast
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED

# ---- reference -------------------------------------------------------------------------------------------------


def linear_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute (y, input of the activation) of x (..., K) and weight (N, K) in plain PyTorch. The operations after the
    product are float32, or float64 for float64."""
    before = functional.linear(x, weight, bias)
    values = activated(before.to(accumulator_dtype(x.dtype)), activation)
    if residual is not None:
        values = values + residual
    return values.to(x.dtype), before


# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs. `saved` is the activation's result if `of_output`, else the activation's input.
    `saved` is None if there is no activation, and in a traced program.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    saved: Tensor | None
    activation: str
    of_output: bool


class LinearAct(NamedTuple):
    """A linear layer with its activation, for x (M, K) and weight (N, K): returns (y, input of the activation). The
    input of the activation is empty unless `keep_`.

    `rounded`: round the input of the activation to the result's dtype before the activation is applied.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str
    residual: Tensor | None
    keep_: bool
    rounded: bool = False

    def run(self) -> tuple[Tensor, Tensor]:
        plan = plan_of(*self[:6])
        return self.in_pytorch() if plan.backend == "reference" else launches.forward(plan, *self)

    def fake(self) -> tuple[Tensor, Tensor]:
        shape = (self.x.shape[0], self.weight.shape[0])
        return self.x.new_empty(shape), self.x.new_empty(shape if self.keep_ else 0)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        y, before = linear_act_reference(*self[:5])
        return y, (before.clone() if before is y else before) if self.keep_ else self.x.new_empty(0)

    def formula(self) -> tuple[Tensor, None]:
        return linear_act_reference(*self[:5])[0], None

    def keep(self, made: tuple[Tensor, Tensor]) -> Kept:
        y, before = made
        needed = _keeps(self.activation, self.residual)
        saved = None if self.activation == "none" or (needed and not self.keep_) else before if self.keep_ else y
        return Kept(*self[:3], saved, self.activation, not needed and not self.keep_)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, saved, activation, of_output = kept
        for_x, for_weight, for_bias, _, for_residual = wanted[:5]
        dz, dbias = dy, None
        if torch.is_grad_enabled():  # create_graph: autograd does not know how saved tensors depend on x
            if activation != "none":
                before = _product(x, weight, bias)
                dz = activation_backward_reference(dy, before, activation, of_output=False).to(dy.dtype)
            dbias = dz.sum(0) if for_bias else None
        elif for_bias or (activation != "none" and (for_x or for_weight)):
            if activation == "none":
                saved = dy
            elif saved is None:  # in a traced program
                saved = _product(x, weight, bias)
            made, dbias = _linear_act_backward(dy, saved, activation, of_output, for_bias)
            dz = made if activation != "none" else dy
        dx, dweight = _products(dz, x if for_weight else None, weight if for_x else None)
        return dx, dweight, dbias if for_bias else None, None, dy if for_residual else None

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops of the product, and of bias, activation and residual for each element of the result."""
        x, weight, bias, activation, residual, *_ = self
        results = x.shape[0] * weight.shape[0]
        each = FORWARD_FLOPS[activation] + (bias is not None) + (residual is not None)
        flops: dict[str, int] = {matrix_precision(x): 2 * results * x.shape[1]}
        precision = precision_of(x.dtype)
        flops[precision] = flops.get(precision, 0) + each * results
        return Cost(distinct_bytes([x, weight, bias, residual]), distinct_bytes(made), flops)


class LinearActBackward(NamedTuple):
    """Compute (dz, dbias): dz = dy * activation', and dbias is the column sums of dz. dz is empty if it equals dy;
    dbias is empty if it is not needed. `saved`: the activation's result if `of_output`, else the activation's input.
    """

    dy: Tensor
    saved: Tensor
    activation: str
    of_output: bool
    sums: bool

    def run(self) -> tuple[Tensor, Tensor]:
        if _has_kernel(self.dy):
            return launches.backward(*self)
        dz, dbias = self.formula()
        return self.dy.new_empty(0) if dz is None else dz, self.dy.new_empty(0) if dbias is None else dbias

    def fake(self) -> tuple[Tensor, Tensor]:
        dy = self.dy
        return dy.new_empty(dy.shape if self.activation != "none" else 0), dy.new_empty(dy.shape[1] if self.sums else 0)

    def formula(self) -> tuple[Tensor | None, Tensor | None]:
        dz, dtype = activation_backward_reference(*self[:4]), self.dy.dtype
        return dz.to(dtype) if self.activation != "none" else None, dz.sum(0).to(dtype) if self.sums else None

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        flops = (BACKWARD_FLOPS[self.activation] + self.sums) * self.dy.numel()
        read = distinct_bytes(self[:1] if self.activation == "none" else self[:2])
        return Cost(read, distinct_bytes(made), {precision_of(self.dy.dtype): flops})


class Activation(NamedTuple):
    """activation(before), contiguous."""

    before: Tensor
    activation: str

    def run(self) -> Tensor:
        if self.before.numel() and _has_kernel(self.before):
            return launches.activate(*self)
        return self.in_pytorch().clone(memory_format=torch.contiguous_format)

    def fake(self) -> Tensor:
        return self.before.new_empty(self.before.shape)

    def in_pytorch(self) -> Tensor:
        """Compute the activation in float32, or in float64 for float64."""
        before = self.before
        return activated(before.to(accumulator_dtype(before.dtype)), self.activation).to(before.dtype)

    def cost(self, made: Tensor) -> Cost:
        flops = {precision_of(made.dtype): FORWARD_FLOPS[self.activation] * made.numel()}
        return Cost(distinct_bytes([self.before]), distinct_bytes([made]), flops)


_linear_act = declare("linear_act", LinearAct, slopes=1, known="itself")
_linear_act_backward = declare("linear_act_backward", LinearActBackward, known=True)
_activation = declare("activation", Activation, known=True)


def _has_kernel(x: Tensor) -> bool:
    return x.dtype != torch.float64 and (x.device.type == "cuda" or INTERPRETED)


def _keeps(activation: str, residual: Tensor | None) -> bool:
    """Whether backward needs the input of the activation, not only its result."""
    return activation != "none" and (activation not in OF_OUTPUT or residual is not None)


@without_autocast
def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Recompute the input of the activation."""
    return functional.linear(x, weight, bias)


def _products(dz: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Compute (dz @ weight, dz^T @ x) of dz (M, N), weight (N, K) and x (M, K). A product is None if its second operand
    is None.
    """
    columns = dz.shape[1]
    more = missing_columns(columns, dz)
    if more and dz.numel() >= LEAST_PADDED and not torch.is_grad_enabled():
        dz, weight = padded(dz, columns=more), padded(weight, rows=more) if weight is not None else None
    dx = dz @ weight if weight is not None else None
    return dx, (dz.t() @ x)[:columns] if x is not None else None


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(input @ weight.T + bias) + residual, with the first arguments of `torch.nn.functional.linear`.

    Args:
        input: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), with input's dtype.
        bias: (N,), with input's dtype.
        activation: "none", "relu", "gelu", "gelu_tanh" (as `gelu(approximate="tanh")`), "silu", "sigmoid", "relu6",
            "hardswish" or "hardsigmoid".
        residual: (..., N), with input's dtype; under autocast, any dtype that input may have.

    Returns:
        (..., N). Sums, bias, activation and residual are float32 (float64 for float64) and rounded once. float32
        products use TF32 only if PyTorch's settings allow it. Autocast casts the operands as it casts those of
        `torch.nn.functional.linear`.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, or the activation is unknown.
        NotImplementedError: forward-mode differentiation.
    """
    if activation == "none" and residual is None and _is_torchs(input, weight, bias):
        return functional.linear(input, weight, bias)
    return _linear_act_of(input, weight, bias, activation, residual)[0]


def linear_act_and_before(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu"
) -> tuple[Tensor, Tensor]:
    """Compute `linear_act`, and also return the input of the activation. The returned input has no gradient;
    `activation_of` recomputes the result from it.

    The input of the activation is rounded before the activation is applied, as in PyTorch, so in half precision the
    result is rounded twice. Arguments and errors are as in `linear_act`. An activation is supported only if its
    backward needs its input.

    Returns:
        (y, before), both of shape (..., N).

    Raises:
        ValueError: as in `linear_act`, or the activation is "none", "relu" or "sigmoid", whose backward does not need
            the activation's input.
    """
    if not _keeps(activation, None):
        others = ", ".join(name for name in ACTIVATIONS if name not in OF_OUTPUT)
        raise ValueError(
            f"linear_act_and_before: backward of {activation!r} does not need its input: use one of {others}"
        )
    y, before = _linear_act_of(input, weight, bias, activation, None, again=True)
    return y, before.detach().view(y.shape)


def activation_of(before: Tensor, activation: str) -> Tensor:
    """Recompute y of `linear_act_and_before` bit for bit, without a gradient.

    Args:
        before: (..., N), the second result of `linear_act_and_before`.
        activation: as in `linear_act`.

    Raises:
        ValueError: the activation is unknown.
    """
    check_choice("activation_of", "activation", activation, ACTIVATIONS)
    return _activation(before.detach().reshape(-1, before.shape[-1]), activation).view(before.shape)


def _linear_act_of(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute (y (..., N), the activation's input (M, N) or (..., N)). The second result may be an empty tensor, unless
    backward needs the activation's input or `again` is set.

    `again`: whether the caller needs the activation's input, so that `activation_of` can recompute y from it later.
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
    """Whether all tensors are on the CPU and have matching shapes and dtypes, so that PyTorch's own functions compute
    the result with less overhead. The function never raises an error.
    """
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
    """Whether `torch.nn.functional.linear` computes the whole call with less work for the host. That is so if the plan
    is cuBLAS, rows are aligned, and no bias needs a gradient. (Rooftop's kernel sums the gradient of a bias faster.)
    This function raises the errors of `linear_act_plan`.
    """
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


@repeated
@recorded_whole
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """input @ other, with the shapes, broadcasting and results of `torch.matmul`.

    Args:
        input: (K,), (M, K) or (..., M, K), bfloat16, float16, float32 or float64.
        other: (K,), (K, N) or (..., K, N), with input's dtype. If other has more than two dimensions, `torch.matmul`
            computes the products in batches.

    Returns:
        The result of `torch.matmul`, with sums in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, NotImplementedError: as in `linear_act`.
    """
    check_tensors("matmul", FLOATS, input=input, other=other)
    if not under_autocast(input):
        check_same_dtype("matmul", "input", input, "cast one, or use autocast", other=other)
    if input.dim() == 0 or other.dim() == 0:
        shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
        raise ValueError(f"matmul: input and other must have at least one dimension, got shapes {shapes}")
    if other.dim() > 2:
        if input.shape[-1] != other.shape[-2] or not _broadcast(input.shape[:-2], other.shape[:-2]):
            shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
            raise ValueError(f"matmul: input and other, {shapes} do not match: expected (..., M, K), (..., K, N)")
        return torch.matmul(input, other)
    weight = other[None] if other.dim() == 1 else other.t()
    if input.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
        raise ValueError(f"matmul: input and other, {shapes} do not match: expected (..., K), (K, N)")
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
    """Return how `linear_act` would compute a call, and the reason, without computing it. Arguments and errors are
    those of `linear_act`. The plan, like the call, depends on whether a gradient will be needed.
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
    """Check the arguments. Return the results of `cast_beside_residual`, cast as autocast requires: (input, weight,
    bias, residual, later). If the residual's dtype differs from autocast's, it is `later`, which is added after the
    operator, and `residual` is None.
    """
    check_tensors(name, FLOATS, ("bias", "residual"), input=x, weight=weight, bias=bias, residual=residual)
    check_choice(name, "activation", activation, ACTIVATIONS)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected input (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_shape(name, "bias", bias, (weight.shape[0],))
    check_shape(name, "residual", residual, (*x.shape[:-1], weight.shape[0]), ": use .expand()")
    x, weight, bias, residual, later = cast_beside_residual(x, weight, bias, residual)
    check_same_dtype(name, "input", x, "cast one, or use autocast", weight=weight, bias=bias, residual=residual)
    return x, weight, bias, residual, later
