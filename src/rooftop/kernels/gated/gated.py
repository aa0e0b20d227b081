"""SwiGLU: silu(gate) * up, the activation of the feed-forward layers of Llama and most models after it.

Shazeer 2020, "GLU Variants Improve Transformer". The operator is bound by memory: forward reads two tensors and writes
one; backward reads three and writes two. Backward recomputes the sigmoid, which takes no additional time, so only the
inputs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.gated import launches
from rooftop.kernels.operands.checks import check_dtype, check_same_dtype, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------


class Swiglu(NamedTuple):
    """silu(gate) * up (..., N), contiguous. If `up` is None, gate contains both tensors: (..., 2 N)."""

    gate: Tensor
    up: Tensor | None

    def run(self) -> Tensor:
        return self.in_pytorch().contiguous() if by_reference(self.gate) else launches.forward(*_halves(*self))

    def fake(self) -> Tensor:
        return self.gate.new_empty(_halves(*self)[0].shape)

    def in_pytorch(self) -> Tensor:
        """Compute the result in plain PyTorch, with arithmetic in float32 (float64 for float64). The result need not be
        contiguous: its dimensions have the same order in memory as those of gate."""
        gate, up = _halves(*self)
        inside = accumulator_dtype(gate.dtype)
        return (torch.nn.functional.silu(gate.to(inside)) * up.to(inside)).to(gate.dtype)

    def formula(self) -> Tensor:
        return self.in_pytorch()

    @staticmethod
    def gradients(kept: Swiglu, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor, Tensor | None]:
        dgate, dup = _swiglu_backward(dy, *kept)
        return dgate, None if kept.up is None else dup

    def cost(self, made: Tensor) -> Cost:
        """Flops: four for the sigmoid (negation, exponential, sum and division), and two products."""
        return Cost(distinct_bytes(self), distinct_bytes([made]), {precision_of(made.dtype): 6 * made.numel()})


class SwigluBackward(NamedTuple):
    """The gradients (dgate, dup) of `Swiglu`, contiguous; dup is empty if gate contains both tensors."""

    dy: Tensor
    gate: Tensor
    up: Tensor | None

    def run(self) -> tuple[Tensor, Tensor]:
        dy, gate, up = self
        dgate, dup = self.fake()
        if not by_reference(gate):
            launches.backward(dy, *_halves(gate, up), *_halves(dgate, None if up is None else dup))
            return dgate, dup
        for target, value in zip((dgate, dup), self.formula(), strict=True):
            if value is not None:
                target.copy_(value)
        return dgate, dup

    def fake(self) -> tuple[Tensor, Tensor]:
        return self.gate.new_empty(self.gate.shape), self.gate.new_empty(0 if self.up is None else self.up.shape)

    def formula(self) -> tuple[Tensor, Tensor | None]:
        dtype = self.gate.dtype
        dy, gate, up = (t.to(accumulator_dtype(dtype)) for t in (self.dy, *_halves(self.gate, self.up)))
        sigmoid = gate.sigmoid()
        dgate = (dy * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype)
        dup = (dy * gate * sigmoid).to(dtype)
        return (torch.cat((dgate, dup), -1), None) if self.up is None else (dgate, dup)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops: the sigmoid, three operations for the derivative of silu, and five products."""
        written = distinct_bytes(made if self.up is not None else made[:1])
        return Cost(distinct_bytes(self), written, {precision_of(self.dy.dtype): 12 * self.dy.numel()})


_swiglu = declare("swiglu", Swiglu, known=True)
_swiglu_backward = declare("swiglu_backward", SwigluBackward, known=True)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up), or the halves of a packed tensor (..., 2 N)."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: (..., N), bfloat16, float16, float32 or float64; or gate and up in one tensor (..., 2 N), the gate first,
            as one matrix product returns them.
        up: like gate; None: gate contains both tensors.

    Returns:
        (..., N), contiguous, of the inputs' dtype. The arithmetic is float32 (float64 for float64).

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match.
    """
    _check(gate, up)
    return _swiglu(gate, up)


def _check(gate: Tensor, up: Tensor | None) -> None:
    check_tensors("swiglu", None, ("up",), gate=gate, up=up)
    check_dtype("swiglu", "gate", gate.dtype, FLOATS)
    if gate.dim() == 0:
        raise ValueError("swiglu: gate must have a dimension")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"swiglu: a packed tensor must be (..., 2 N), got {tuple(gate.shape)}")
        return
    check_same_dtype("swiglu", "gate", gate, "convert one of them", up=up)
    if up.shape != gate.shape:
        raise ValueError(f"swiglu: expected up of gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
