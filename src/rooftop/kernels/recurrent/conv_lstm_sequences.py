"""Compute all steps of a ConvLSTM, from the results of the input convolutions to the hidden states.

    z_t = gates_t + conv(h_{t-1}, kernel) + bias
    i, f, o = recurrent_activation(z_i, z_f, z_o)
    c_t = f c_{t-1} + i activation(z_c)
    h_t = o activation(c_t)

Shi et al. 2015, "Convolutional LSTM Network", without peepholes, with the gates in Keras's order i, f, c, o. The
operator is bound by the flops of the convolutions. A forward step is two launches: the convolution, and the kernel of
`conv_lstms.py`, which writes h_t directly into the results. A backward step is two launches as well: the backward
kernel of `conv_lstms.py`, which adds the two gradients of h_t, and the gradient of the convolution's input. After the
last backward step, one call computes the gradient of `kernel` for all steps together, and one call the gradient of
`bias`. In float32 without TF32, the gradient of `kernel` is computed step by step instead, because cuDNN's sum over all
steps has a larger error.

Backward reads the sums z_t and the cells before each step. Forward keeps the sums and cells only if a gradient is
needed; otherwise forward updates the cell in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.operands.checks import check_choice, check_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.recurrent.conv_lstms import (
    ACTIVATIONS,
    FLOPS,
    SLOPE_FLOPS,
    activation_flops,
    conv_lstm_gates_reference,
    step_backward_into,
    step_into,
)
from rooftop.kernels.recurrent.launches import format_of
from rooftop.kernels.reductions.reductions import sum as total
from rooftop.launch.operators import (
    declare,
    keeps_for_backward,
    no_second_derivative,
    no_tangents,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole

PLAIN = "the loop in PyTorch (rooftop.kernels.recurrent.conv_lstm_sequences.conv_lstm_sequence_reference)"

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def conv_lstm_sequence_reference(
    gates: Tensor,
    kernel: Tensor,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (outputs (T, N, F, H, W), cell (N, F, H, W)) in plain PyTorch, which autograd can differentiate twice."""
    outputs = []
    gates = gates if bias is None else gates + bias.to(gates.dtype)[:, None, None]
    state = torch.zeros_like(gates[0, :, : kernel.shape[1]]) if cell is None else cell
    for step in gates:
        scores = step if hidden is None else step + recurrent_convolution(hidden, kernel)
        hidden, state = conv_lstm_gates_reference(scores, state, None, activation, recurrent_activation)
        outputs.append(hidden)
    return torch.stack(outputs), state


def recurrent_convolution(hidden: Tensor, kernel: Tensor, groups: int = 1) -> Tensor:
    """The recurrent convolution, (N, F, H, W) -> (N, 4 F, H, W), with "same" padding. If a side of the kernel is even,
    there is one more row or column of padding after the image than before the image.
    """
    padded, padding = _padded(hidden, kernel)
    return F.conv2d(padded, kernel, padding=padding, groups=groups)


def _padded(hidden: Tensor, kernel: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the input and the padding of the convolution. An even kernel needs different padding before and after the
    image, so in this case the function pads the input.
    """
    height, width = kernel.shape[2:]
    if height % 2 and width % 2:
        return hidden, (height // 2, width // 2)
    return F.pad(hidden, ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)), (0, 0)


# ---- implementations -------------------------------------------------------------------------------------------


def _as_steps(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """The tensor (T, N, C, H, W) itself if each step is contiguous in the memory format, else a copy."""
    return x.flatten(0, 1).contiguous(memory_format=memory_format).unflatten(0, x.shape[:2])


def _empty(gates: Tensor, steps: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor (steps, N, channels, H, W) in the memory format of the gates. For zero steps the tensor has the
    shape (0,).
    """
    if steps == 0:
        return gates.new_empty(0, dtype=dtype)
    shape = (steps * gates.shape[1], channels, *gates.shape[3:])
    found = torch.empty(shape, dtype=dtype, device=gates.device, memory_format=format_of(gates[0]))
    return found.unflatten(0, (steps, gates.shape[1]))


def _input_gradient(dgates: Tensor, like: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of the recurrent convolution's input, a hidden state of the shape of `like`, (N, F, H, W)."""
    padded, padding = _padded(like, kernel)
    found = _convolution_backward(dgates, padded, kernel, padding, [True, False, False])[0]
    if padded is like:
        return found
    top, left = ((size - 1) // 2 for size in kernel.shape[2:])
    return found.narrow(2, top, like.shape[2]).narrow(3, left, like.shape[3])


def _kernel_gradient_of_steps(dgates: Tensor, hidden: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of the convolution's weight, summed over the T steps of hidden (T, N, F, H, W)."""
    if matrix_precision(dgates, convolution=True) == "fp32":
        found = _kernel_gradient(dgates[0], hidden[0], kernel)
        for step in range(1, len(hidden)):
            found += _kernel_gradient(dgates[step], hidden[step], kernel)
        return found
    return _kernel_gradient(dgates.flatten(0, 1), hidden.flatten(0, 1), kernel)


def _kernel_gradient(dgates: Tensor, hidden: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of `kernel` in one convolution of hidden states (M, F, H, W). M may be the sum of the batches of
    many steps.
    """
    padded, padding = _padded(hidden, kernel)
    return _convolution_backward(dgates, padded, kernel, padding, [False, True, False])[1]


def _convolution_backward(
    dgates: Tensor, x: Tensor, kernel: Tensor, padding: tuple[int, int], which: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dgates, x, kernel, None, (1, 1), padding, (1, 1), False, (0, 0), 1, which
    )
    return found


# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs: results of forward, and tensors that forward kept. In a traced program, forward
    keeps only its arguments, and backward recomputes all other values.
    """

    kernel: Tensor
    hidden: Tensor | None
    bias: Tensor | None
    outputs: Tensor | None
    cells: Tensor | None
    scores: Tensor | None
    gates: Tensor | None
    cell: Tensor | None
    has_cell: bool
    activation: str
    recurrent_activation: str


class ConvLstmSequence(NamedTuple):
    """All steps of a ConvLSTM: returns (outputs (T, N, F, H, W), the last cell (N, F, H, W), the cell before each step
    (T, N, F, H, W), the sums z of each step (T, N, 4 F, H, W)). The last two results are for backward. They are empty
    if `keep_` is False.
    """

    gates: Tensor
    kernel: Tensor
    hidden: Tensor | None
    cell: Tensor | None
    bias: Tensor | None
    activation: str
    recurrent_activation: str
    keep_: bool

    @without_autocast
    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, kernel, hidden, cell, bias, *names, keep = self
        memory_format = format_of(gates[0])
        outputs, last_cell, cells, scores = self.fake()
        if outputs.numel() == 0:
            return outputs, last_cell, cells, scores
        inputs = _as_steps(gates, memory_format)
        kernel = kernel.contiguous(memory_format=memory_format)  # convert once for all convolutions
        hidden = None if hidden is None else hidden.contiguous(memory_format=memory_format)
        bias = None if bias is None else bias.contiguous()
        state = cells[0] if keep else last_cell
        if cell is None:
            state.zero_()
        else:
            state.copy_(cell)
        for step, added in enumerate(inputs):
            following = cells[step + 1] if keep and step + 1 < len(inputs) else last_cell
            written, sums = (outputs[step], following), scores[step] if keep else None
            if hidden is None:
                step_into(*written, added, state, None, bias, sums, *names)
            else:
                recurrent = recurrent_convolution(hidden, kernel).contiguous(memory_format=memory_format)
                step_into(*written, recurrent, state, added, bias, sums, *names)
            hidden, state = outputs[step], following
        return outputs, last_cell, cells, scores

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, cell = self.gates, self.cell
        features, steps = self.kernel.shape[1], gates.shape[0] if self.keep_ else 0
        dtype = gates.dtype if cell is None else cell.dtype
        return (
            _empty(gates, gates.shape[0], features, gates.dtype),
            _empty(gates, 1, features, dtype)[0],
            _empty(gates, steps, features, dtype),
            _empty(gates, steps, 4 * features, gates.dtype),
        )

    def in_pytorch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.keep_:
            raise NotImplementedError(
                "rooftop::conv_lstm_sequence has no decomposition if it saves tensors for backward: call it under "
                "torch.no_grad()"
            )
        gates, kernel, hidden, cell, bias, *names, _ = self
        outputs, last = conv_lstm_sequence_reference(gates, kernel, hidden, cell, *names, bias)
        return outputs, last, last.new_empty(0), gates.new_empty(0)

    def keep(self, made: tuple[Tensor, Tensor, Tensor, Tensor]) -> Kept:
        outputs, _, cells, scores = made
        tensors = (self.kernel, self.hidden, self.bias)
        rest = (self.cell is not None, self.activation, self.recurrent_activation)
        if self.keep_:
            return Kept(*tensors, outputs, cells, scores, None, None, *rest)
        return Kept(*tensors, None, None, None, self.gates, self.cell, *rest)

    @staticmethod
    def gradients(
        kept: Kept, wanted: Sequence[bool], doutputs: Tensor | None, dlast_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        kernel, hidden, bias, outputs, cells, scores, gates, cell, has_cell, *_ = kept
        names = (kept.activation, kept.recurrent_activation)
        if outputs is None or cells is None or scores is None:
            assert gates is not None
            with torch.no_grad():
                outputs, _, cells, scores = _conv_lstm_sequence(gates, kernel, hidden, cell, bias, *names, True)
        tensors = (scores, kernel, hidden, bias, outputs, cells, doutputs, dlast_cell)
        dgates, dkernel, dhidden, dcell, dbias = _conv_lstm_sequence_backward(*tensors, *names)
        given = (hidden is not None, has_cell, bias is not None)
        of_given = (t if there else None for t, there in zip((dhidden, dcell, dbias), given, strict=True))
        return dgates, dkernel, *of_given

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops of the gates of each step. Each step with a previous hidden state adds a convolution, and the addition
        of its result: one flop for each of the N 4 F H W elements of the step's gates. If `bias` is given, each step
        adds another flop for each of these elements.
        """
        gates, kernel, hidden, cell, bias, *names, _ = self
        positions, convolved = _sizes(gates, hidden)
        features = kernel.shape[1]
        sums = convolved + (bias is not None) * gates.shape[0]
        each = 4 + activation_flops(FLOPS, *names)
        of_gates = each * gates.shape[0] + 4 * sums
        flops = _flops(gates, 2 * convolved * positions * kernel.numel(), of_gates * positions * features)
        return Cost(distinct_bytes([gates, kernel, hidden, cell, bias]), distinct_bytes(made), flops)


class ConvLstmSequenceBackward(NamedTuple):
    """The gradients (dgates, dkernel, dhidden, dcell, dbias) of `ConvLstmSequence`. dhidden is empty if the call has no
    `hidden`, and dbias is empty if it has no `bias`.
    """

    scores: Tensor
    kernel: Tensor
    hidden: Tensor | None
    bias: Tensor | None
    outputs: Tensor
    cells: Tensor
    doutputs: Tensor | None
    dlast_cell: Tensor | None
    activation: str
    recurrent_activation: str

    @without_autocast
    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        scores, kernel, hidden, bias, outputs, cells, doutputs, dlast_cell, *names = self
        memory_format = format_of(scores[0])
        dgates, dkernel, dhidden, dcell, dbias = self.fake()
        if outputs.numel() == 0:
            return dgates, dkernel.zero_(), dhidden, dcell, dbias.zero_()
        if doutputs is None:
            doutputs = outputs.new_zeros(()).expand(outputs.shape)
        doutputs = _as_steps(doutputs, memory_format)
        if dlast_cell is None:
            dcell.zero_()
        else:
            dcell.copy_(dlast_cell)
        weight = kernel.contiguous(memory_format=memory_format)
        to_hidden = None
        for step in reversed(range(scores.shape[0])):
            tensors = (doutputs[step], to_hidden, dcell, scores[step], cells[step], None)
            step_backward_into(dgates[step], dcell, *tensors, *names)
            if step > 0 or hidden is not None:
                to_hidden = _input_gradient(dgates[step], outputs[step], weight)
                to_hidden = to_hidden.contiguous(memory_format=memory_format)
        if scores.shape[0] > 1:  # every step except the first has a previous hidden state
            dkernel.copy_(_kernel_gradient_of_steps(dgates[1:], outputs[:-1], weight))
        else:
            dkernel.zero_()
        if hidden is not None and to_hidden is not None:
            first = hidden.contiguous(memory_format=memory_format)
            dkernel += _kernel_gradient(dgates[0], first, weight)
            dhidden.copy_(to_hidden)
        if bias is not None:
            dbias.copy_(total(dgates, (0, 1, 3, 4), dtype=accumulator_dtype(dgates.dtype)))
        return dgates, dkernel, dhidden, dcell, dbias

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        scores, kernel, hidden, bias, _, cells, *_ = self
        width = kernel.shape[1]
        return (
            _empty(scores, scores.shape[0], 4 * width, scores.dtype),
            kernel.new_empty(kernel.shape),
            kernel.new_empty(0) if hidden is None else _empty(scores, 1, width, hidden.dtype)[0],
            _empty(scores, 1, width, cells.dtype)[0],
            kernel.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        )

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops of the two gradients of each convolution, one of its input and one of its weight. Each step adds the
        backward of the gates. Each step t < T - 1 adds the two gradients of its hidden state: one flop for each of
        N F H W elements. If `bias` is given, its gradient sums dgates: one flop for each element of dgates.
        """
        scores, kernel, hidden, bias, outputs, cells, doutputs, dlast_cell, *names = self
        positions, convolved = _sizes(scores, hidden)
        features = kernel.shape[1]
        of_gates = 15 + activation_flops(FLOPS, *names) + activation_flops(SLOPE_FLOPS, *names)
        sums = 4 * scores.shape[0] if bias is not None else 0
        elementwise = (of_gates * scores.shape[0] + scores.shape[0] - 1 + sums) * positions * features
        flops = _flops(scores, 4 * convolved * positions * kernel.numel(), elementwise)
        read = distinct_bytes([scores, kernel, hidden, outputs[:-1], cells, doutputs, dlast_cell])
        return Cost(read, distinct_bytes(made), flops)


_conv_lstm_sequence = declare("conv_lstm_sequence", ConvLstmSequence, slopes=2)
_conv_lstm_sequence_backward = declare(
    "conv_lstm_sequence_backward",
    ConvLstmSequenceBackward,
    derivative=no_second_derivative("conv_lstm_sequence", PLAIN),
)


def _sizes(gates: Tensor, hidden: Tensor | None) -> tuple[int, int]:
    """Return the number of pixels (N H W) of a time step, and the number of time steps that compute a recurrent
    convolution. Without an initial hidden state, the first step computes none.
    """
    steps, batch, _, height, width = gates.shape
    return batch * height * width, steps - (hidden is None)


def _flops(x: Tensor, of_convolutions: int, others: int) -> dict[str, int]:
    flops = {matrix_precision(x, convolution=True): of_convolutions}
    precision = precision_of(x.dtype)
    flops[precision] = flops.get(precision, 0) + others
    return flops


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def conv_lstm_sequence(
    gates: Tensor,
    kernel: Tensor,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute all steps of a ConvLSTM after its input convolutions, and return (outputs, cell).

    Args:
        gates: (T, N, 4 F, H, W), T at least 1: results of the input convolutions of all steps, gates in the order i, f,
            c, o; bfloat16, float16, float32 or float64. Each step should be contiguous or channels last, as
            convolutions on a GPU need; tensors with other strides are copied.
        kernel: (4 F, F, kh, kw), with the gates' dtype: the weight of the recurrent convolution. The convolution has no
            stride or dilation, and "same" padding. If a side of the kernel is even, there is one more row or column of
            padding after the image than before the image.
        hidden: (N, F, H, W), with the gates' dtype: the initial hidden state; None: zeros.
        cell: (N, F, H, W), with the gates' dtype or float32: the initial cell; None: zeros of the gates' dtype.
        activation: activation of the candidate and of the new cell: one of
            `rooftop.kernels.recurrent.conv_lstms.ACTIVATIONS`.
        recurrent_activation: activation of the three gates, from the same list.
        bias: (4 F,), with the gates' dtype or float32, added to the gates of every step. If `bias` is given, the input
            convolutions need no bias.

    Returns:
        outputs (T, N, F, H, W), the hidden state after each step, and the cell (N, F, H, W) after the last step, both
        in the gates' memory format. Dtypes and arithmetic are those of `conv_lstm_gates`; autocast casts nothing.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, or the name of an activation is unknown.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(gates, kernel, hidden, cell, bias, activation, recurrent_activation)
    tensors = (gates, kernel, hidden, cell, bias)
    no_tangents("conv_lstm_sequence", *tensors, instead=PLAIN)
    keep = keeps_for_backward(*tensors)
    outputs, last_cell, _, _ = _conv_lstm_sequence(*tensors, activation, recurrent_activation, keep)
    return outputs, last_cell


def _check(
    gates: Tensor,
    kernel: Tensor,
    hidden: Tensor | None,
    cell: Tensor | None,
    bias: Tensor | None,
    activation: str,
    recurrent_activation: str,
) -> None:
    tensors = {"gates": gates, "kernel": kernel, "hidden": hidden, "cell": cell, "bias": bias}
    check_tensors("conv_lstm_sequence", None, ("hidden", "cell", "bias"), **tensors)
    check_choice("conv_lstm_sequence", "activation", activation, ACTIVATIONS)
    check_choice("conv_lstm_sequence", "recurrent_activation", recurrent_activation, ACTIVATIONS)
    check_dtype("conv_lstm_sequence", "gates", gates.dtype, FLOATS)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        may_be_wide = name in ("cell", "bias")
        if tensor.dtype != gates.dtype and not (may_be_wide and tensor.dtype == torch.float32):
            other = " or float32" if may_be_wide else ""
            raise TypeError(
                f"conv_lstm_sequence: {name} must be {gates.dtype} like the gates{other}; got {tensor.dtype}"
            )
    if gates.dim() != 5 or gates.shape[2] % 4 or gates.shape[0] == 0:
        raise ValueError(
            f"conv_lstm_sequence: gates must be (T, N, 4 F, H, W) with T at least 1, got {tuple(gates.shape)}"
        )
    _, batch, channels, height, width = gates.shape
    if kernel.dim() != 4 or kernel.shape[:2] != (channels, channels // 4) or 0 in kernel.shape[2:]:
        raise ValueError(
            f"conv_lstm_sequence: expected a kernel of shape ({channels}, {channels // 4}, kh, kw), "
            f"got {tuple(kernel.shape)}"
        )
    for name in ("hidden", "cell"):
        check_shape("conv_lstm_sequence", name, tensors[name], (batch, channels // 4, height, width))
    check_shape("conv_lstm_sequence", "bias", bias, (channels,))
