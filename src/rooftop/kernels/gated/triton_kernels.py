"""The Triton kernels of gated activations; `gated.py` has the operators.

`columns` and the row strides are given in units of UNIT elements, so that the compiler knows that they are multiples of
UNIT.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import tile_of_program


@triton.jit
def swiglu_forward(
    gate, up, y,  # shapes: (M, N), (M, N), (M, N) contiguous
    rows, columns, gate_stride, up_stride,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of one tile."""
    row, column, inside = tile_of_program(rows, columns * UNIT, ROWS, COLUMNS)
    gates = tl.load(gate + row * (gate_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * (up_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    result = gates * _sigmoid(gates) * ups
    tl.store(y + row * (columns * UNIT) + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    dy, gate, up, dgate, dup,  # (M, N) each
    rows, columns, dy_stride, gate_stride, up_stride, gradient_stride,  # gradient_stride: of dgate and of dup
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute both gradients of one tile, and recompute the sigmoid for them."""
    row, column, inside = tile_of_program(rows, columns * UNIT, ROWS, COLUMNS)
    gradient = tl.load(dy + row * (dy_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * (gate_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * (up_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gates)
    place = row * (gradient_stride * UNIT) + column
    to_gate = gradient * ups * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    tl.store(dgate + place, to_gate.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, (gradient * gates * sigmoid).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) for a tensor of any shape; the division is rounded correctly."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))
