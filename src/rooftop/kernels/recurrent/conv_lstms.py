"""The pointwise operations of a ConvLSTM step without peepholes: all operations after the step's convolutions.

    i, f, o = recurrent_activation(z_i, z_f, z_o)
    c' = f c + i activation(z_c)
    h' = o activation(c')

Shi et al. 2015, "Convolutional LSTM Network", equation 3 without the peephole terms, with the order of gates i, f, c, o
of Keras. The operator is bound by memory. In maps of (N, F, H, W), forward reads 5 (9 with `added`) and writes 2, and
backward reads 7 (11 with `added`) and writes 5. Backward recomputes the step, so forward keeps only the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_choice, check_dtype, check_same_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.recurrent import launches
from rooftop.kernels.recurrent.launches import format_of
from rooftop.launch.operators import declare, no_second_derivative, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

ACTIVATIONS = ("tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_keras2", "relu", "linear")
"""The possible activations; the kernels refer to them by index."""

# ---- reference -------------------------------------------------------------------------------------------------


def activated(x: Tensor, name: str) -> Tensor:
    """Apply the activation with this name to a tensor of any shape."""
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
    """The derivative of the activation at x, where its value is y."""
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
    """Compute (hidden, cell), both (N, F, H, W), from gates (N, 4 F, H, W) in plain PyTorch. The arithmetic is float32
    (float64 for float64).
    """
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
    """Compute (dgates, dcell) in plain PyTorch."""
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
    """gates + added, in float32 (float64 for float64)."""
    wide = accumulator_dtype(gates.dtype)
    return gates.to(wide) if added is None else gates.to(wide) + added.to(wide)


# ---- steps -----------------------------------------------------------------------------------------------------


def step_into(
    hidden: Tensor, next_cell: Tensor, gates: Tensor, cell: Tensor, added: Tensor | None, bias: Tensor | None,
    scores: Tensor | None, activation: str, recurrent_activation: str,
) -> None:  # fmt: skip
    """Compute hidden and next_cell in place; next_cell may be `cell`. If `scores` is given, also write gates + added +
    bias to `scores`.

    All tensors must have the same memory format, contiguous or channels last. `bias`: (4 F,).
    """
    if not by_reference(gates):
        kinds = _kinds(activation, recurrent_activation)
        launches.forward(hidden, next_cell, gates, cell, added, bias, scores, kinds)
        return
    if bias is not None:
        bias = bias[:, None, None]
        added = bias if added is None else _wide_scores(added, None) + bias
    found = conv_lstm_gates_reference(gates, cell, added, activation, recurrent_activation)
    hidden.copy_(found[0])
    next_cell.copy_(found[1])
    if scores is not None:
        scores.copy_(_wide_scores(gates, added))


def step_backward_into(
    dgates: Tensor, dcell: Tensor, dhidden: Tensor, more_dhidden: Tensor | None, dnext_cell: Tensor, gates: Tensor,
    cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str,
) -> None:  # fmt: skip
    """Compute dgates and dcell in place; dcell may be `dnext_cell`. The gradient of the hidden state is dhidden +
    more_dhidden.

    All tensors must have the same memory format, contiguous or channels last.
    """
    if not by_reference(gates):
        kinds = _kinds(activation, recurrent_activation)
        launches.backward(dgates, dcell, dhidden, more_dhidden, dnext_cell, gates, cell, added, kinds)
        return
    if more_dhidden is not None:
        wide = accumulator_dtype(gates.dtype)
        dhidden = dhidden.to(wide) + more_dhidden.to(wide)
    names = (activation, recurrent_activation)
    found = conv_lstm_gates_backward_reference(dhidden, dnext_cell, gates, cell, added, *names)
    dgates.copy_(found[0])
    dcell.copy_(found[1])


def _kinds(activation: str, recurrent_activation: str) -> Constants:
    return {"ACTIVATION": ACTIVATIONS.index(activation), "RECURRENT": ACTIVATIONS.index(recurrent_activation)}


# ---- operators -------------------------------------------------------------------------------------------------

PLAIN = "the formula in PyTorch (rooftop.kernels.recurrent.conv_lstms.conv_lstm_gates_reference)"


class ConvLstmGates(NamedTuple):
    """The pointwise operations of a step: compute (hidden, next cell), both (N, F, H, W), from gates (N, 4 F, H, W).
    The results have the memory format of the gates.
    """

    gates: Tensor
    cell: Tensor
    added: Tensor | None
    activation: str
    recurrent_activation: str

    def run(self) -> tuple[Tensor, Tensor]:
        hidden, next_cell = self.fake()
        gates, cell, added = _alike(self.gates, self.cell, self.added)
        step_into(hidden, next_cell, gates, cell, added, None, None, *self[3:])
        return hidden, next_cell

    def fake(self) -> tuple[Tensor, Tensor]:
        return _empty(self.cell, self.gates.dtype, self.gates), _empty(self.cell, self.cell.dtype, self.gates)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        return conv_lstm_gates_reference(*self)

    @staticmethod
    def gradients(
        kept: ConvLstmGates, wanted: Sequence[bool], dhidden: Tensor | None, dnext_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gates, cell, added, *_ = kept
        dhidden = cell.new_zeros(cell.shape, dtype=gates.dtype) if dhidden is None else dhidden
        dnext_cell = cell.new_zeros(cell.shape) if dnext_cell is None else dnext_cell
        dgates, dcell = _conv_lstm_gates_backward(dhidden, dnext_cell, *kept)
        return dgates, dcell, None if added is None else dgates

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops for each element of the cell state: five activations, three products and a sum. If `added` is given,
        there are four more sums, one for each gate.
        """
        flops = 4 + 4 * (self.added is not None) + activation_flops(FLOPS, *self[3:])
        read = distinct_bytes([self.gates, self.cell, self.added])
        return Cost(read, distinct_bytes(made), {precision_of(self.gates.dtype): flops * self.cell.numel()})


class ConvLstmGatesBackward(NamedTuple):
    """The backward operator of `ConvLstmGates`: it computes (dgates, dcell), in the memory format of the gates."""

    dhidden: Tensor
    dnext_cell: Tensor
    gates: Tensor
    cell: Tensor
    added: Tensor | None
    activation: str
    recurrent_activation: str

    def run(self) -> tuple[Tensor, Tensor]:
        dgates, dcell = self.fake()
        gates, dhidden, dnext_cell, cell, added = _alike(
            self.gates, self.dhidden, self.dnext_cell, self.cell, self.added
        )
        step_backward_into(dgates, dcell, dhidden, None, dnext_cell, gates, cell, added, *self[5:])
        return dgates, dcell

    def fake(self) -> tuple[Tensor, Tensor]:
        return _empty(self.gates, self.gates.dtype, self.gates), _empty(self.cell, self.cell.dtype, self.gates)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops for each element of the cell: those of the activations and of their slopes, 3 to recompute the cell, 3
        for the gradient of the new cell, 2 products for each of the four gates, and 1 product for dcell. If `added` is
        given, there are 4 more sums, one for each gate.
        """
        of_activations = activation_flops(FLOPS, *self[5:]) + activation_flops(SLOPE_FLOPS, *self[5:])
        flops = (15 + 4 * (self.added is not None) + of_activations) * self.cell.numel()
        return Cost(distinct_bytes(self[:5]), distinct_bytes(made), {precision_of(self.gates.dtype): flops})


_conv_lstm_gates = declare("conv_lstm_gates", ConvLstmGates, known=True)
_conv_lstm_gates_backward = declare(
    "conv_lstm_gates_backward",
    ConvLstmGatesBackward,
    derivative=no_second_derivative("conv_lstm_gates", PLAIN),
    known=True,
)


def _empty(like: Tensor, dtype: torch.dtype, gates: Tensor) -> Tensor:
    """Allocate memory of the shape of `like`, in the memory format of the gates."""
    return torch.empty(like.shape, dtype=dtype, device=like.device, memory_format=format_of(gates))


def _alike(gates: Tensor, *others: Any) -> Any:
    """All tensors in the memory format of the gates; None stays None."""
    memory_format = format_of(gates)
    return [None if t is None else t.contiguous(memory_format=memory_format) for t in (gates, *others)]


# A sigmoid is a negation, an exponential, a sum and a division. tanh has one operation more than a sigmoid. A hard
# sigmoid is a product, a sum and two clips.
FLOPS = {"tanh": 5, "sigmoid": 4, "hard_sigmoid": 4, "hard_sigmoid_keras2": 4, "relu": 1, "linear": 0}
SLOPE_FLOPS = {"tanh": 2, "sigmoid": 2, "hard_sigmoid": 2, "hard_sigmoid_keras2": 2, "relu": 1, "linear": 0}


def activation_flops(table: dict[str, int], activation: str, recurrent_activation: str) -> int:
    """Flops of the activations of three gates, the candidate and the cell."""
    return 3 * table[recurrent_activation] + 2 * table[activation]


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def conv_lstm_gates(
    gates: Tensor,
    cell: Tensor,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    *,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one step of a ConvLSTM after its convolutions, and return (hidden, cell).

    Args:
        gates: (N, 4 F, H, W), pre-activations in the order i, f, c, o; bfloat16, float16, float32 or float64. The gates
            should be contiguous or channels last; gates with other strides are copied.
        cell: (N, F, H, W) of the gates' dtype or float32; preferably in the gates' memory format.
        activation: activation of the candidate and of the new cell: one of `ACTIVATIONS`.
        recurrent_activation: activation of the three gates: one of `ACTIVATIONS`. "hard_sigmoid" is Keras 3's clip(x /
            6 + 0.5), "hard_sigmoid_keras2" clip(0.2 x + 0.5).
        added: (N, 4 F, H, W), with the gates' dtype, which the kernel first adds to the gates. `gates` and `added` may
            be the results of the step's two convolutions.

    Returns:
        hidden (N, F, H, W) with the gates' dtype and the new cell with the cell's dtype, both in the gates' memory
        format. The arithmetic is float32 (float64 for float64 gates). Autocast casts nothing. If the gates are in half
        precision, a float32 cell does not lose accuracy over many steps.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, or the name of an activation is unknown.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(gates, cell, added, activation, recurrent_activation)
    no_tangents("conv_lstm_gates", gates, cell, added, instead=PLAIN)
    return _conv_lstm_gates(gates, cell, added, activation, recurrent_activation)


def _check(gates: Tensor, cell: Tensor, added: Tensor | None, activation: str, recurrent_activation: str) -> None:
    check_tensors("conv_lstm_gates", None, ("added",), gates=gates, cell=cell, added=added)
    check_choice("conv_lstm_gates", "activation", activation, ACTIVATIONS)
    check_choice("conv_lstm_gates", "recurrent_activation", recurrent_activation, ACTIVATIONS)
    check_dtype("conv_lstm_gates", "gates", gates.dtype, FLOATS)
    if cell.dtype not in (gates.dtype, torch.float32):
        raise TypeError(f"conv_lstm_gates: cell must be {gates.dtype} like the gates, or float32; got {cell.dtype}")
    check_same_dtype("conv_lstm_gates", "gates", gates, "convert one of them", added=added)
    if gates.dim() != 4 or gates.shape[1] % 4:
        raise ValueError(f"conv_lstm_gates: gates must be (N, 4 F, H, W), got {tuple(gates.shape)}")
    batch, channels, height, width = gates.shape
    check_shape("conv_lstm_gates", "cell", cell, (batch, channels // 4, height, width))
    check_shape("conv_lstm_gates", "added", added, tuple(gates.shape))
