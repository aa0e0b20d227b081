"""The Triton kernels of ConvLSTM gates; `conv_lstms.py` has the operators.

In both memory formats, the gates are (M, 4, K) in memory: rows with four gates side by side. For contiguous tensors, M
= N and K = F * H * W; for channels last, M = N * H * W and K = F. `columns` is K / UNIT, so that the compiler knows
that UNIT divides K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.rows import tile_of_program
from rooftop.kernels.operands.triton_kernels.scalars import hyperbolic_tangent, logistic

# The activations, in the order of conv_lstms.ACTIVATIONS.
TANH = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
HARD_SIGMOID = tl.constexpr(2)
HARD_SIGMOID_KERAS2 = tl.constexpr(3)
RELU = tl.constexpr(4)
LINEAR = tl.constexpr(5)


@triton.jit
def conv_lstm_forward(
    gates, added, bias, cell,  # gates, added (M, 4 K); bias (4 K / positions,); cell (M, K)
    hidden, next_cell, scores,  # shapes: (M, K), (M, K), (M, 4 K)
    rows, columns, positions,
    ACTIVATION: tl.constexpr, RECURRENT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    PRECISE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute hidden and next_cell of one tile. KEEP: also store the pre-activations of the four gates in `scores`.
    next_cell may be cell.
    """
    size = tl.full((), UNIT, tl.int64) * columns
    row, column, inside = tile_of_program(rows, size, ROWS, COLUMNS)
    four, one = row * (4 * size) + column, row * size + column
    scores_i, scores_f, scores_c, scores_o = _scores(gates, added, four, size, inside, ADD)
    if BIAS:
        of_gate, place = size // positions, bias + column // positions
        scores_i += tl.load(place, mask=column < size, other=0.0).to(tl.float32)
        scores_f += tl.load(place + of_gate, mask=column < size, other=0.0).to(tl.float32)
        scores_c += tl.load(place + 2 * of_gate, mask=column < size, other=0.0).to(tl.float32)
        scores_o += tl.load(place + 3 * of_gate, mask=column < size, other=0.0).to(tl.float32)
    if KEEP:
        kind = scores.dtype.element_ty
        tl.store(scores + four, scores_i.to(kind), mask=inside)
        tl.store(scores + four + size, scores_f.to(kind), mask=inside)
        tl.store(scores + four + 2 * size, scores_c.to(kind), mask=inside)
        tl.store(scores + four + 3 * size, scores_o.to(kind), mask=inside)
    state = tl.load(cell + one, mask=inside, other=0.0).to(tl.float32)
    kept = activated(scores_f, RECURRENT, PRECISE) * state
    state = kept + activated(scores_i, RECURRENT, PRECISE) * activated(scores_c, ACTIVATION, PRECISE)
    result = activated(scores_o, RECURRENT, PRECISE) * activated(state, ACTIVATION, PRECISE)
    tl.store(hidden + one, result.to(hidden.dtype.element_ty), mask=inside)
    tl.store(next_cell + one, state.to(next_cell.dtype.element_ty), mask=inside)


@triton.jit
def conv_lstm_backward(
    dhidden, more, dnext_cell, gates, added, cell,  # dhidden, more, dnext_cell, cell (M, K); gates, added (M, 4 K)
    dgates, dcell,  # shapes: (M, 4 K), (M, K)
    rows, columns,
    ACTIVATION: tl.constexpr, RECURRENT: tl.constexpr, ADD: tl.constexpr, MORE: tl.constexpr, PRECISE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Recompute the step and compute the gradients of one tile. MORE: the gradient of hidden is dhidden + more. dcell
    may be dnext_cell.
    """
    size = tl.full((), UNIT, tl.int64) * columns
    row, column, inside = tile_of_program(rows, size, ROWS, COLUMNS)
    four, one = row * (4 * size) + column, row * size + column
    scores_i, scores_f, scores_c, scores_o = _scores(gates, added, four, size, inside, ADD)
    state = tl.load(cell + one, mask=inside, other=0.0).to(tl.float32)
    to_hidden = tl.load(dhidden + one, mask=inside, other=0.0).to(tl.float32)
    if MORE:
        to_hidden += tl.load(more + one, mask=inside, other=0.0).to(tl.float32)
    to_cell = tl.load(dnext_cell + one, mask=inside, other=0.0).to(tl.float32)
    i, f = activated(scores_i, RECURRENT, PRECISE), activated(scores_f, RECURRENT, PRECISE)
    c, o = activated(scores_c, ACTIVATION, PRECISE), activated(scores_o, RECURRENT, PRECISE)
    following = f * state + i * c
    shown = activated(following, ACTIVATION, PRECISE)
    to_cell += to_hidden * o * slope(following, shown, ACTIVATION)
    kind = dgates.dtype.element_ty
    tl.store(dgates + four, (to_cell * c * slope(scores_i, i, RECURRENT)).to(kind), mask=inside)
    tl.store(dgates + four + size, (to_cell * state * slope(scores_f, f, RECURRENT)).to(kind), mask=inside)
    tl.store(dgates + four + 2 * size, (to_cell * i * slope(scores_c, c, ACTIVATION)).to(kind), mask=inside)
    tl.store(dgates + four + 3 * size, (to_hidden * shown * slope(scores_o, o, RECURRENT)).to(kind), mask=inside)
    tl.store(dcell + one, (to_cell * f).to(dcell.dtype.element_ty), mask=inside)


@triton.jit
def activated(x, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """The activation of x; NaN stays NaN."""
    if KIND == TANH:
        return hyperbolic_tangent(x, PRECISE)
    elif KIND == SIGMOID:
        return logistic(x, PRECISE)
    elif KIND == HARD_SIGMOID:
        return _ramp(x, tl.div_rn(x + 3.0, 6.0), 3.0)
    elif KIND == HARD_SIGMOID_KERAS2:
        return _ramp(x, 0.2 * x + 0.5, 2.5)
    elif KIND == RELU:
        return tl.where(x <= 0.0, 0.0, x)
    else:
        return x


@triton.jit
def slope(x, y, KIND: tl.constexpr):
    """The derivative of the activation at x, where its value is y."""
    if KIND == TANH:
        return 1.0 - y * y
    elif KIND == SIGMOID:
        return y * (1.0 - y)
    elif KIND == HARD_SIGMOID:
        return tl.where(tl.abs(x) < 3.0, 1.0 / 6.0, 0.0)
    elif KIND == HARD_SIGMOID_KERAS2:
        return tl.where(tl.abs(x) < 2.5, 0.2, 0.0)
    elif KIND == RELU:
        return tl.where(x <= 0.0, 0.0, 1.0)
    else:
        return 1.0


@triton.jit
def _ramp(x, y, end):
    """Return 0 for x <= -end, 1 for x >= end, and y in between."""
    return tl.where(x <= -end, 0.0, tl.where(x >= end, 1.0, y))


@triton.jit
def _scores(gates, added, place, size, inside, ADD: tl.constexpr):
    """The four pre-activations i, f, c, o, in float32."""
    return (
        _score(gates, added, place, inside, ADD),
        _score(gates, added, place + size, inside, ADD),
        _score(gates, added, place + 2 * size, inside, ADD),
        _score(gates, added, place + 3 * size, inside, ADD),
    )


@triton.jit
def _score(gates, added, place, inside, ADD: tl.constexpr):
    score = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        score += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
    return score
