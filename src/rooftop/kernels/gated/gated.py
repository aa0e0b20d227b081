"""SwiGLU: silu(gate) * up, the activation of the feed-forward layers of Llama and most models after it.

Shazeer 2020, "GLU Variants Improve Transformer". Bound by memory: forward reads two tensors and writes one, backward
reads three and writes two. The sigmoid is computed again in backward, which is free: nothing but the inputs is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.gated import launches
from rooftop.kernels.operands.checks import check_dtype, check_same_dtype, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    operator,
)
from rooftop.launch.symbolic import recorded_whole

# ---- reference -------------------------------------------------------------------------------------------------


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of the same shape; float32 inside, or float64 for float64."""
    gates, ups = gate.to(accumulator_dtype(gate.dtype)), up.to(accumulator_dtype(gate.dtype))
    return (torch.nn.functional.silu(gates) * ups).to(gate.dtype)


def swiglu_backward_reference(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    gradient, gates, ups = (t.to(accumulator_dtype(gate.dtype)) for t in (dy, gate, up))
    sigmoid = gates.sigmoid()
    dgate = gradient * ups * sigmoid * (1 + gates * (1 - sigmoid))
    return dgate.to(gate.dtype), (gradient * gates * sigmoid).to(up.dtype)


# ---- implementations -------------------------------------------------------------------------------------------


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up); of a packed tensor (..., 2 N) the halves."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up (..., N)."""
    if by_reference(gate):
        return swiglu_reference(gate, up).contiguous()
    return launches.forward(gate, up)


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Fills dgate and dup, (..., N) with one stride of rows."""
    if not by_reference(gate):
        launches.backward(dy, gate, up, dgate, dup)
        return
    for target, value in zip((dgate, dup), swiglu_backward_reference(dy, gate, up), strict=True):
        target.copy_(value)


def _gradients(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory for the gradients: of both inputs, or of a packed one and nothing."""
    return gate.new_empty(gate.shape), gate.new_empty(up.shape if up is not None else 0)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("swiglu")
def _swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _forward(*_halves(gate, up))


@torch.library.register_fake("rooftop::swiglu")
def _(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate.new_empty(_halves(gate, up)[0].shape)


in_pytorch("swiglu", lambda gate, up: swiglu_reference(*_halves(gate, up)))


@operator("swiglu_backward")
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    dgate, dup = _gradients(gate, up)
    _backward(dy, *_halves(gate, up), *_halves(dgate, None if up is None else dup))
    return dgate, dup


@torch.library.register_fake("rooftop::swiglu_backward")
def _(dy: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return _gradients(gate, up)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    gate, up = ctx.saved_tensors  # type: ignore[attr-defined]
    dgate, dup = _swiglu_backward(dy, gate, up)
    return dgate, dup if up is not None else None


differentiable("swiglu", _differentiate, _save)


def _formula(gate: Tensor, up: Tensor | None) -> Tensor:
    return swiglu_reference(*_halves(gate, up))


def _backward_formula(dy: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dgate, dup = swiglu_backward_reference(dy, *_halves(gate, up))
    return (dgate, dup) if up is not None else (torch.cat((dgate, dup), -1), None)


by_formula("swiglu", _formula)
differentiable_by_formula("swiglu_backward", _backward_formula)


@cost_of("rooftop::swiglu")
def _forward_cost(call: Call) -> Cost:
    """Negation, exponential, sum and division of the sigmoid, and two products."""
    read = distinct_bytes([call["gate"], call["up"]])
    return Cost(read, distinct_bytes([call.out]), {precision_of(call.out.dtype): 6 * call.out.numel()})


@cost_of("rooftop::swiglu_backward")
def _backward_cost(call: Call) -> Cost:
    """The sigmoid, three more operations for silu' and five products."""
    dy, written = call["dy"], [call.out[0], call.out[1] if call["up"] is not None else None]
    read = distinct_bytes([dy, call["gate"], call["up"]])
    return Cost(read, distinct_bytes(written), {precision_of(dy.dtype): 12 * dy.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: (..., N), bfloat16, float16, float32 or float64; or both in one tensor (..., 2 N), the gate first, as one
            matrix product gives them.
        up: like gate; None: packed.

    Returns:
        (..., N), contiguous, of the inputs' dtype. The arithmetic is float32 (float64 for float64).

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit.
    """
    _check(gate, up)
    result: Tensor = _swiglu(gate, up)
    return result


def _check(gate: Tensor, up: Tensor | None) -> None:
    check_tensors("swiglu", None, ("up",), gate=gate, up=up)
    check_dtype("swiglu", "gate", gate.dtype, FLOATS)
    if gate.dim() == 0:
        raise ValueError("swiglu: gate must have a dimension")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"swiglu: a packed tensor must be (..., 2 N), got {tuple(gate.shape)}")
        return
    check_same_dtype("swiglu", "gate", gate, "give both one dtype", up=up)
    if up.shape != gate.shape:
        raise ValueError(f"swiglu: expected up of gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
