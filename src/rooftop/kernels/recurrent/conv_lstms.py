"""The pointwise half of a ConvLSTM step, without peepholes: what follows its convolutions.

    i, f, o = recurrent_activation(z_i, z_f, z_o)
    c' = f c + i activation(z_c)
    h' = o activation(c')

Shi et al. 2015, "Convolutional LSTM Network", equation 3 without the peephole terms, with the order of gates i, f, c, o
of Keras. Bound by memory: forward reads 5 maps (9 with `added`) and writes 2, backward reads 7 (11) and writes 5. The
step is computed again in backward: nothing but the inputs is kept.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_choice, check_dtype, check_same_dtype, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, grid_of, tile_of
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.recurrent.tables import BACKWARD, FORWARD
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

ACTIVATIONS = ("tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_keras2", "relu", "linear")
"""What either activation may be; the kernels know them by their place."""

# ---- reference -------------------------------------------------------------------------------------------------


def activated(x: Tensor, name: str) -> Tensor:
    """The activation of that name, of a tensor of any shape."""
    if name == "tanh":
        return torch.tanh(x)
    if name == "sigmoid":
        return torch.sigmoid(x)
    if name == "relu":
        return torch.relu(x)
    if name == "linear":
        return x
    return F.hardsigmoid(x) if name == "hard_sigmoid" else (0.2 * x + 0.5).clamp(0, 1)


def slope(x: Tensor, y: Tensor, name: str) -> Tensor:
    """The derivative of the activation at x, where it is y."""
    if name == "tanh":
        return 1 - y * y
    if name == "sigmoid":
        return y * (1 - y)
    if name == "relu":
        return torch.where(x <= 0, 0.0, 1.0).to(x.dtype)
    if name == "linear":
        return torch.ones_like(x)
    end, rise = (3.0, 1 / 6) if name == "hard_sigmoid" else (2.5, 0.2)
    return (x.abs() < end).to(x.dtype) * rise


def conv_lstm_gates_reference(
    gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str
) -> tuple[Tensor, Tensor]:
    """(hidden, cell) (N, F, H, W) of gates (N, 4 F, H, W); float32 inside, or float64 for float64."""
    i, f, c, o = _wide_scores(gates, added).chunk(4, 1)
    state = activated(f, recurrent_activation) * cell.to(i.dtype)
    state = state + activated(i, recurrent_activation) * activated(c, activation)
    hidden = activated(o, recurrent_activation) * activated(state, activation)
    return hidden.to(gates.dtype), state.to(cell.dtype)


def conv_lstm_gates_backward_reference(
    dhidden: Tensor,
    dnext_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> tuple[Tensor, Tensor]:
    """(dgates, dcell)."""
    scores = _wide_scores(gates, added)
    state, to_hidden, to_cell = (t.to(scores.dtype) for t in (cell, dhidden, dnext_cell))
    z_i, z_f, z_c, z_o = scores.chunk(4, 1)
    i, f, o = (activated(z, recurrent_activation) for z in (z_i, z_f, z_o))
    c = activated(z_c, activation)
    following = f * state + i * c
    shown = activated(following, activation)
    to_cell = to_cell + to_hidden * o * slope(following, shown, activation)
    of_gates = (
        to_cell * c * slope(z_i, i, recurrent_activation),
        to_cell * state * slope(z_f, f, recurrent_activation),
        to_cell * i * slope(z_c, c, activation),
        to_hidden * shown * slope(z_o, o, recurrent_activation),
    )
    return torch.cat(of_gates, 1).to(gates.dtype), (to_cell * f).to(cell.dtype)


def _wide_scores(gates: Tensor, added: Tensor | None) -> Tensor:
    wide = accumulator_dtype(gates.dtype)
    return gates.to(wide) if added is None else gates.to(wide) + added.to(wide)


# ---- implementations -------------------------------------------------------------------------------------------


def _format_of(gates: Tensor) -> torch.memory_format:
    """Channels last where the gates are; all else is made contiguous."""
    last = not gates.is_contiguous() and gates.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _like_cell(cell: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(cell.shape, dtype=dtype, device=cell.device, memory_format=memory_format)


def _table(cell: Tensor, memory_format: torch.memory_format) -> tuple[int, int]:
    """(rows, columns) of the cell's memory, between whose rows the four gates lie side by side."""
    batch, features, height, width = cell.shape
    if memory_format == torch.channels_last:
        return batch * height * width, features
    return batch, features * height * width


def _constants(gates: Tensor, added: Tensor | None, activation: str, recurrent_activation: str) -> Constants:
    kinds: Constants = {
        "ACTIVATION": ACTIVATIONS.index(activation),
        "RECURRENT": ACTIVATIONS.index(recurrent_activation),
    }
    return kinds | {"ADD": added is not None, "PRECISE": gates.dtype == torch.float32}


def _forward(
    gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str
) -> tuple[Tensor, Tensor]:
    memory_format = _format_of(gates)
    hidden, next_cell = (_like_cell(cell, t.dtype, memory_format) for t in (gates, cell))
    gates, cell = (t.contiguous(memory_format=memory_format) for t in (gates, cell))
    added = None if added is None else added.contiguous(memory_format=memory_format)
    step_into(hidden, next_cell, gates, cell, added, None, None, activation, recurrent_activation)
    return hidden, next_cell


def step_into(
    hidden: Tensor,
    next_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    bias: Tensor | None,
    scores: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> None:
    """Fills hidden and next_cell, which may be `cell`, and if given `scores` with gates + added + bias.

    All in one memory format: contiguous or channels last. bias: (4 F,).
    """
    if by_reference(gates):
        if bias is not None:
            bias = bias[:, None, None]
            added = bias if added is None else _wide_scores(added, None) + bias
        found = conv_lstm_gates_reference(gates, cell, added, activation, recurrent_activation)
        hidden.copy_(found[0])
        next_cell.copy_(found[1])
        if scores is not None:
            scores.copy_(_wide_scores(gates, added))
        return
    require_triton()
    from rooftop.kernels.recurrent.triton_kernels import conv_lstm_forward

    if cell.numel() == 0:
        return
    rows, columns = _table(cell, _format_of(gates))
    unit, tile = math.gcd(8, columns), tile_of(FORWARD.elements, columns, FORWARD.warps)
    constants = _constants(gates, added, activation, recurrent_activation) | tile | {"UNIT": unit}
    constants |= {"BIAS": bias is not None, "KEEP": scores is not None}
    read = (gates, gates if added is None else added, gates if bias is None else bias, cell)
    written = (hidden, next_cell, gates if scores is None else scores)
    sizes = (rows, columns // unit, columns // cell.shape[1])
    launch(conv_lstm_forward, grid_of(rows, columns, tile), gates.device, *read, *written, *sizes, **constants)


def _backward(
    dhidden: Tensor,
    dnext_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> tuple[Tensor, Tensor]:
    dgates, dcell = _gradients(gates, cell)
    memory_format = _format_of(gates)
    read = (t.contiguous(memory_format=memory_format) for t in (dhidden, dnext_cell, gates, cell))
    dhidden, dnext_cell, gates, cell = read
    added = None if added is None else added.contiguous(memory_format=memory_format)
    step_backward_into(dgates, dcell, dhidden, None, dnext_cell, gates, cell, added, activation, recurrent_activation)
    return dgates, dcell


def step_backward_into(
    dgates: Tensor,
    dcell: Tensor,
    dhidden: Tensor,
    more_dhidden: Tensor | None,
    dnext_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> None:
    """Fills dgates and dcell, which may be `dnext_cell`; the hidden state's gradient is dhidden + more_dhidden.

    All in one memory format: contiguous or channels last.
    """
    if by_reference(gates):
        if more_dhidden is not None:
            wide = accumulator_dtype(gates.dtype)
            dhidden = dhidden.to(wide) + more_dhidden.to(wide)
        found = conv_lstm_gates_backward_reference(
            dhidden, dnext_cell, gates, cell, added, activation, recurrent_activation
        )
        dgates.copy_(found[0])
        dcell.copy_(found[1])
        return
    require_triton()
    from rooftop.kernels.recurrent.triton_kernels import conv_lstm_backward

    if cell.numel() == 0:
        return
    rows, columns = _table(cell, _format_of(gates))
    unit, tile = math.gcd(8, columns), tile_of(BACKWARD.elements, columns, BACKWARD.warps)
    constants = _constants(gates, added, activation, recurrent_activation) | tile | {"UNIT": unit}
    constants["MORE"] = more_dhidden is not None
    more, other = dhidden if more_dhidden is None else more_dhidden, gates if added is None else added
    tensors = (dhidden, more, dnext_cell, gates, other, cell, dgates, dcell)
    launch(conv_lstm_backward, grid_of(rows, columns, tile), gates.device, *tensors, rows, columns // unit, **constants)


def _gradients(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the gradients, in the format of the gates."""
    memory_format = _format_of(gates)
    return _like_cell(gates, gates.dtype, memory_format), _like_cell(cell, cell.dtype, memory_format)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("conv_lstm_gates")
def _conv_lstm_gates(
    gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str
) -> tuple[Tensor, Tensor]:
    return _forward(gates, cell, added, activation, recurrent_activation)


@torch.library.register_fake("rooftop::conv_lstm_gates")
def _(
    gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str
) -> tuple[Tensor, Tensor]:
    memory_format = _format_of(gates)
    return _like_cell(cell, gates.dtype, memory_format), _like_cell(cell, cell.dtype, memory_format)


in_pytorch("conv_lstm_gates", conv_lstm_gates_reference)


@operator("conv_lstm_gates_backward")
def _conv_lstm_gates_backward(
    dhidden: Tensor,
    dnext_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> tuple[Tensor, Tensor]:
    return _backward(dhidden, dnext_cell, gates, cell, added, activation, recurrent_activation)


@torch.library.register_fake("rooftop::conv_lstm_gates_backward")
def _(
    dhidden: Tensor,
    dnext_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    added: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> tuple[Tensor, Tensor]:
    return _gradients(gates, cell)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[type-arg]
    gates, cell, added, activation, recurrent_activation = inputs
    ctx.save_for_backward(gates, cell, added)
    ctx.activations = (activation, recurrent_activation)  # type: ignore[attr-defined]


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dhidden: Tensor, dnext_cell: Tensor
) -> tuple[Tensor | None, ...]:
    gates, cell, added = ctx.saved_tensors  # type: ignore[attr-defined]
    dgates, dcell = _conv_lstm_gates_backward(dhidden, dnext_cell, gates, cell, added, *ctx.activations)  # type: ignore[attr-defined]
    return dgates, dcell, None if added is None else dgates, None, None


PLAIN = "the formula in PyTorch (rooftop.kernels.recurrent.conv_lstms.conv_lstm_gates_reference)"
differentiable("conv_lstm_gates", _differentiate, _save)
differentiable("conv_lstm_gates_backward", no_second_derivative("conv_lstm_gates", PLAIN))

# A sigmoid is a negation, exponential, sum and division, tanh one operation more; a hard one scales, shifts and clips
# twice.
FLOPS = {"tanh": 5, "sigmoid": 4, "hard_sigmoid": 4, "hard_sigmoid_keras2": 4, "relu": 1, "linear": 0}
SLOPE_FLOPS = {"tanh": 2, "sigmoid": 2, "hard_sigmoid": 2, "hard_sigmoid_keras2": 2, "relu": 1, "linear": 0}


def activation_flops(call: Call, table: dict[str, int]) -> int:
    """Of the three gates, the candidate and the cell."""
    return 3 * table[call["recurrent_activation"]] + 2 * table[call["activation"]]


@cost_of("rooftop::conv_lstm_gates")
def _forward_cost(call: Call) -> Cost:
    """Five activations, three products and a sum; a sum for each gate with `added`."""
    gates, cell, added = call["gates"], call["cell"], call["added"]
    flops = (4 + 4 * (added is not None) + activation_flops(call, FLOPS)) * cell.numel()
    read = distinct_bytes([gates, cell, added])
    return Cost(read, distinct_bytes(list(call.out)), {precision_of(gates.dtype): flops})


@cost_of("rooftop::conv_lstm_gates_backward")
def _backward_cost(call: Call) -> Cost:
    """The cell again (3), the activations and their slopes, the cell's gradient (3), two products a gate, one more."""
    gates, cell, added = call["gates"], call["cell"], call["added"]
    flops = 3 + 4 * (added is not None) + activation_flops(call, FLOPS) + activation_flops(call, SLOPE_FLOPS) + 12
    read = distinct_bytes([call["dhidden"], call["dnext_cell"], gates, cell, added])
    return Cost(read, distinct_bytes(list(call.out)), {precision_of(gates.dtype): flops * cell.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def conv_lstm_gates(
    gates: Tensor,
    cell: Tensor,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    *,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a ConvLSTM after its convolutions: (hidden, cell).

    Args:
        gates: (N, 4 F, H, W), pre-activations in the order i, f, c, o; bfloat16, float16, float32 or float64. Memory is
            contiguous or channels last; other strides cost a copy.
        cell: (N, F, H, W) of the gates' dtype or float32; best in the gates' memory format.
        activation: of the candidate and of the new cell: one of `ACTIVATIONS`.
        recurrent_activation: of the three gates: one of `ACTIVATIONS`. "hard_sigmoid" is Keras 3's clip(x / 6 + 0.5),
            "hard_sigmoid_keras2" clip(0.2 x + 0.5).
        added: (N, 4 F, H, W) of the gates' dtype, added to them first: the two convolutions of a step need no sum of
            their own.

    Returns:
        hidden (N, F, H, W) of the gates' dtype and the new cell of the cell's, both in the gates' memory format. The
        arithmetic is float32 (float64 for float64 gates). Autocast casts nothing: with half precision gates and a
        float32 cell, the cell loses nothing over time.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes, devices or names that do not fit.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(gates, cell, added, activation, recurrent_activation)
    no_tangents("conv_lstm_gates", gates, cell, added, instead=PLAIN)
    result: tuple[Tensor, Tensor] = _conv_lstm_gates(gates, cell, added, activation, recurrent_activation)
    return result


def _check(gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str) -> None:
    check_tensors("conv_lstm_gates", None, ("added",), gates=gates, cell=cell, added=added)
    check_choice("conv_lstm_gates", "activation", activation, ACTIVATIONS)
    check_choice("conv_lstm_gates", "recurrent_activation", recurrent_activation, ACTIVATIONS)
    check_dtype("conv_lstm_gates", "gates", gates.dtype, FLOATS)
    if cell.dtype not in (gates.dtype, torch.float32):
        raise TypeError(f"conv_lstm_gates: cell must be {gates.dtype} as the gates, or float32; got {cell.dtype}")
    check_same_dtype("conv_lstm_gates", "gates", gates, "give both one dtype", added=added)
    if gates.dim() != 4 or gates.shape[1] % 4:
        raise ValueError(f"conv_lstm_gates: gates must be (N, 4 F, H, W), got {tuple(gates.shape)}")
    batch, channels, height, width = gates.shape
    if cell.shape != (batch, channels // 4, height, width):
        expected = (batch, channels // 4, height, width)
        raise ValueError(f"conv_lstm_gates: expected a cell of shape {expected}, got {tuple(cell.shape)}")
    if added is not None and added.shape != gates.shape:
        raise ValueError(
            f"conv_lstm_gates: expected added of gates' shape {tuple(gates.shape)}, got {tuple(added.shape)}"
        )
