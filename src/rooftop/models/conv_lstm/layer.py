"""ConvLSTM with Keras's semantics.

The layer is that of Shi et al. 2015, "Convolutional LSTM Network: A Machine Learning Approach for Precipitation
Nowcasting", without peepholes. The order of gates, the defaults and the options are those of `keras.layers.ConvLSTM2D`:

    z = conv(x_t, kernel) + conv(h, recurrent_kernel) + bias
    i, f, o = recurrent_activation(z_i, z_f, z_o)
    c' = f c + i activation(z_c)
    h' = o activation(c')

One convolution call computes the input convolutions of all time steps. Each time step then runs one recurrent
convolution with 4 * F output channels, and one kernel for all other operations (`rooftop.kernels.conv_lstm_sequence`).
Keras runs eight convolutions per step. On a GPU tensors are always channels last in memory, for any data_format,
because convolutions are faster in this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.kernels import conv_lstm_gates, conv_lstm_sequence
from rooftop.kernels.recurrent.conv_lstm_sequences import recurrent_convolution
from rooftop.kernels.recurrent.conv_lstms import ACTIVATIONS
from rooftop.launch.symbolic import module_recorded_whole
from rooftop.words import did_you_mean

Pair = tuple[int, int]
States = tuple[Tensor, Tensor]
FIRST, LAST = "channels_first", "channels_last"
FEW = 64  # for windows of at most this many values (kh * kw * C), a matrix product is faster than a convolution


class ConvLSTM2D(nn.Module):
    """The layer `keras.layers.ConvLSTM2D`: maps frames (N, T, H, W, C), or (N, T, C, H, W), to hidden states.

    The parameters are `kernel` (4 * F, C, kh, kw), `recurrent_kernel` (4 * F, F, kh, kw) and `bias` (4 * F), with gates
    in the order i, f, c, o. The weights are Keras's weights, permuted so that output and input channels come first
    (`keras_weights.py` reads them).

    Args:
        in_channels: C, the channels of a frame (Keras infers them at the first call).
        filters: F, the channels of the hidden state.
        kernel_size: kernel size of both convolutions: one number, or (height, width).
        strides: strides of the input convolution. The recurrent convolution has neither strides nor dilation.
        padding: padding of the input convolution, "valid" or "same". If "same" adds an odd number of rows or columns,
            the additional row or column comes last, as in TensorFlow. The recurrent convolution is always "same".
        data_format: layout of frames and results: "channels_last", (N, T, H, W, C), or "channels_first", (N, T, C, H,
            W).
        dilation_rate: dilation of the input convolution.
        activation, recurrent_activation: names from `rooftop.kernels.recurrent.conv_lstms.ACTIVATIONS`. "hard_sigmoid"
            is Keras 3's; networks of Keras 2 need "hard_sigmoid_keras2".
        use_bias: whether the layer has a `bias`.
        unit_forget_bias: whether the forget gate's bias starts at 1.
        return_sequences: return the results of all steps, (N, T, ...), instead of the last step's result, (N, ...).
        return_state: return (output, hidden, cell) instead of the output.
        go_backwards: compute from the last frame to the first; results are in the order of computation.
        stateful: each call begins with the final state of the previous call, until `reset_state()`. No gradient flows
            from one call to another. The state is not part of the state dict.
        dropout, recurrent_dropout: probabilities, below 1, of dropping an element of the input and of the hidden state,
            in training. Each gate has its own mask, which is drawn once per call and used for every step.

    Raises:
        ValueError: options are invalid or inconsistent, such as strides with dilation.
    """

    hidden_state: Tensor | None
    cell_state: Tensor | None

    def __init__(
        self,
        in_channels: int,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        data_format: str = LAST,
        dilation_rate: int | Sequence[int] = 1,
        activation: str = "tanh",
        recurrent_activation: str = "sigmoid",
        use_bias: bool = True,
        unit_forget_bias: bool = True,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_channels, self.filters = _positive("in_channels", in_channels), _positive("filters", filters)
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.strides, self.dilation_rate = _pair("strides", strides), _pair("dilation_rate", dilation_rate)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ValueError(
                "ConvLSTM2D: strides > 1 and dilation_rate > 1 cannot be combined: set one of them to 1; got "
                f"strides={self.strides}, dilation_rate={self.dilation_rate}"
            )
        self.padding = _one_of("padding", str(padding).lower(), ("valid", "same"))
        self.data_format = _one_of("data_format", data_format, (LAST, FIRST))
        self.activation = _one_of("activation", activation, ACTIVATIONS)
        self.recurrent_activation = _one_of("recurrent_activation", recurrent_activation, ACTIVATIONS)
        for name, rate in (("dropout", dropout), ("recurrent_dropout", recurrent_dropout)):
            if not 0 <= rate < 1:
                raise ValueError(f"ConvLSTM2D: {name} must be at least 0 and below 1, got {rate}")
        self.dropout, self.recurrent_dropout = dropout, recurrent_dropout
        self.unit_forget_bias = unit_forget_bias
        self.return_sequences, self.return_state = return_sequences, return_state
        self.go_backwards, self.stateful = go_backwards, stateful
        self.kernel = nn.Parameter(torch.empty(4 * filters, in_channels, *self.kernel_size))
        self.recurrent_kernel = nn.Parameter(torch.empty(4 * filters, filters, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(4 * filters)) if use_bias else None
        self.register_buffer("hidden_state", None, persistent=False)
        self.register_buffer("cell_state", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set Keras's initial values.

        The kernel is Glorot uniform, the recurrent kernel is orthogonal, and the bias is 0 (with unit_forget_bias, 1
        for the forget gate).
        """
        nn.init.xavier_uniform_(self.kernel)
        nn.init.orthogonal_(self.recurrent_kernel)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
            if self.unit_forget_bias:
                nn.init.ones_(self.bias[self.filters : 2 * self.filters])

    def reset_state(self) -> None:
        """Let the next call of a stateful layer begin with zeros."""
        self.hidden_state = self.cell_state = None

    def extra_repr(self) -> str:
        shapes = ("in_channels", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate")
        names = (*shapes, "activation", "recurrent_activation", "return_sequences")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    @module_recorded_whole
    def forward(
        self, x: Tensor, initial_state: Sequence[Tensor] | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Compute the hidden states of all time steps, or of the last time step.

        Args:
            x: (N, T, H, W, C), or (N, T, C, H, W) with channels_first; T at least 1.
            initial_state: (hidden, cell), each (N, H', W', F) or (N, F, H', W') like the result of one step; None:
                zeros, or the state of a stateful layer.
            mask: (N, T) booleans; a step whose mask is False keeps the state and returns the result of the previous
                step (zeros at the first step).

        Returns:
            The hidden states, (N, T, H', W', F), or (N, H', W', F) without return_sequences. With "channels_first", F
            comes before H' and W'. With return_state, a tuple: this tensor, the hidden state and the cell state after
            the last step. The tensor may be non-contiguous: in memory, T may come before N.

        Raises:
            TypeError: frames are not floating point, the mask is not boolean, or an argument is not a tensor.
            ValueError: shapes do not match, a frame is smaller than the kernel, or a stateful layer's state has another
                batch size or frame size.
        """
        output, (hidden, cell) = self.unrolled(x, initial_state, mask, last_only=not self.return_sequences)
        if not self.return_sequences:
            output = output[:, 0]
        return (output, hidden, cell) if self.return_state else output

    def unrolled(
        self,
        x: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, States]:
        """Return the results as a sequence, and the last (hidden, cell), for any return_sequences and return_state.

        The sequence has all steps; with last_only, it has only the last step.
        """
        self._check(x, mask)
        if self.go_backwards:
            x, mask = x.flip(1), None if mask is None else mask.flip(1)
        inputs = self._input_gates(x)  # (T, N, 4 * F, H', W')
        given = self._given_state(inputs, initial_state)
        if mask is None and not (self.training and self.recurrent_dropout > 0):
            outputs, state = self._all_steps(inputs, given)
        else:
            outputs, state = self._step_by_step(inputs, given, mask)
        if self.stateful:  # cloned, because a view of the last state would keep all states in memory
            self.hidden_state, self.cell_state = (t.detach().clone() for t in state)
        # (T, N, ...) in memory, the order that the convolutions of the next ConvLSTM2D need: it copies no frames
        results = outputs[-1:] if last_only else outputs
        hidden, cell = (self._as_given(t) for t in state)
        return results.transpose(0, 1), (hidden, cell)

    def _input_gates(self, x: Tensor) -> Tensor:
        """Compute the input convolutions of all steps, without the bias: (T, N, 4 * F, H', W')."""
        frames = x.transpose(0, 1)  # (T, N, ...)
        if self.data_format == LAST:
            frames = frames.contiguous().permute(0, 1, 4, 2, 3)  # (T, N, C, H, W), channels last in memory
        steps, batch = frames.shape[:2]
        groups = 1
        if self.training and self.dropout > 0:
            frames, groups = _four_times(frames, self.dropout), 4  # (T, N, 4 * C, H, W)
        flat = frames.flatten(0, 1)
        memory_format = self._memory_format(flat)
        before, after = self._pads(flat.shape[-2:])
        if before != after:
            flat, before = F.pad(flat, (before[1], after[1], before[0], after[0])), (0, 0)
        flat = flat.contiguous(memory_format=memory_format)
        if groups == 1 and memory_format == torch.channels_last and self.kernel[0].numel() <= FEW:
            gates = _convolved_as_product(flat, self.kernel, self.strides, before, self.dilation_rate)
        else:
            gates = F.conv2d(flat, self.kernel, None, self.strides, before, self.dilation_rate, groups)
        return gates.contiguous(memory_format=memory_format).unflatten(0, (steps, batch))

    def _memory_format(self, x: Tensor) -> torch.memory_format:
        """The memory format of states and gates: channels last on a GPU, or if data_format is "channels_last"."""
        return torch.channels_last if self.data_format == LAST or x.is_cuda else torch.contiguous_format

    def _pads(self, sizes: Sequence[int]) -> tuple[Pair, Pair]:
        """The zero padding of a frame: ((rows above, columns on the left), (rows below, columns on the right)).

        If the number of padding rows is odd, the extra row is below; an extra column is on the right.
        """
        if self.padding == "valid":
            return (0, 0), (0, 0)
        rows, columns = (
            max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            for size, stride, kernel, dilation in zip(
                sizes, self.strides, self.kernel_size, self.dilation_rate, strict=True
            )
        )
        return (rows // 2, columns // 2), (rows - rows // 2, columns - columns // 2)

    def _all_steps(self, inputs: Tensor, given: States | None) -> tuple[Tensor, States]:
        """Compute all steps with one operator.

        Returns the results, (T, N, ...) in the layout of data_format, and the last hidden and cell state, (N, F, H',
        W').
        """
        same = inputs.dtype == self.kernel.dtype
        hidden, cell = given or (None, None if same else self._zeros(inputs)[1])
        names = (self.activation, self.recurrent_activation)
        kernel = self.recurrent_kernel.to(inputs.dtype)
        outputs, cell = conv_lstm_sequence(inputs, kernel, hidden, cell, *names, bias=self.bias)
        return self._as_given(outputs), (outputs[-1], cell)

    def _step_by_step(self, inputs: Tensor, given: States | None, mask: Tensor | None) -> tuple[Tensor, States]:
        """Compute the steps one by one, for a mask or recurrent dropout. Shapes as in `_all_steps`."""
        state = given or self._zeros(inputs)
        kernel = self.recurrent_kernel.to(inputs.dtype)
        dropped = self.training and self.recurrent_dropout > 0
        kept = _masks(state[0], self.recurrent_dropout) if dropped else None
        if self.bias is not None:
            inputs = inputs + self.bias.to(inputs.dtype)[:, None, None]
        output = torch.zeros_like(state[0])
        outputs: list[Tensor] = []
        for step, added in enumerate(inputs):
            hidden, cell = state
            if kept is not None:
                hidden = (hidden[:, None] * kept).flatten(1, 2)  # (N, 4 * F, H', W'), a dropout mask per gate
            gates = recurrent_convolution(hidden, kernel, groups=1 if kept is None else 4)
            hidden, cell = conv_lstm_gates(gates, cell, self.activation, self.recurrent_activation, added=added)
            if mask is None:
                state, output = (hidden, cell), hidden
            else:
                seen = mask[:, step, None, None, None]
                output = torch.where(seen, hidden, output)
                state = torch.where(seen, hidden, state[0]), torch.where(seen, cell, state[1])
            outputs.append(output)
        return torch.stack([self._as_given(y) for y in outputs]), state

    def _zeros(self, inputs: Tensor) -> States:
        """A state of zeros. The cell has the parameters' dtype, so that autocast does not reduce its accuracy."""
        shape = (inputs.shape[1], self.filters, *inputs.shape[3:])
        hidden = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
        hidden = hidden.contiguous(memory_format=self._memory_format(inputs))
        return hidden, hidden.to(self.kernel.dtype)

    def _given_state(self, inputs: Tensor, initial_state: Sequence[Tensor] | None) -> States | None:
        """Return the hidden and cell state before the first step, (N, F, H', W'). None: the caller passed no state and
        the layer keeps none, so both are zeros."""
        shape = (inputs.shape[1], self.filters, *inputs.shape[3:])
        if initial_state is None:
            if not self.stateful or self.hidden_state is None or self.cell_state is None:
                return None
            if self.hidden_state.shape != shape:
                raise ValueError(
                    f"ConvLSTM2D: the previous call's state has shape {tuple(self.hidden_state.shape)}, but these "
                    f"frames need {shape}: call reset_state() before you change the batch size or the frame size"
                )
            return self.hidden_state.to(inputs.dtype), self.cell_state.to(self.kernel.dtype)
        if not isinstance(initial_state, Sequence) or not all(isinstance(t, Tensor) for t in initial_state):
            given = initial_state if isinstance(initial_state, Sequence) else [initial_state]
            kinds = ", ".join(type(t).__name__ for t in given)
            raise TypeError(f"ConvLSTM2D: initial_state must be None or two tensors, (hidden, cell), got {kinds}")
        if len(initial_state) != 2:
            raise ValueError(f"ConvLSTM2D: initial_state must be (hidden, cell), got {len(initial_state)} tensors")
        hidden, cell = (
            t.permute(0, 3, 1, 2) if self.data_format == LAST and t.dim() == 4 else t for t in initial_state
        )
        for name, state in (("hidden", hidden), ("cell", cell)):
            if state.shape != shape:
                expected = (shape[0], *shape[2:], shape[1]) if self.data_format == LAST else shape
                raise ValueError(
                    f"ConvLSTM2D: expected an initial {name} state of shape {expected}, got {tuple(state.shape)}"
                )
        return hidden.to(inputs.dtype), cell.to(self.kernel.dtype)

    def _as_given(self, x: Tensor) -> Tensor:
        """Convert (..., F, H', W') to the layout that `data_format` names: channels last, or unchanged."""
        return x.movedim(-3, -1) if self.data_format == LAST else x

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        names = "(N, T, H, W, C)" if self.data_format == LAST else "(N, T, C, H, W)"
        for name, tensor in (("frames", x), ("mask", mask)):
            if not isinstance(tensor, Tensor) and (name == "frames" or tensor is not None):
                raise TypeError(f"ConvLSTM2D: {name} must be a tensor, got {type(tensor).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"ConvLSTM2D: frames must have a floating-point dtype, got {x.dtype}")
        if x.dim() != 5:
            raise ValueError(f"ConvLSTM2D: frames must be {names}, got {tuple(x.shape)}")
        channels, sizes = (x.shape[4], x.shape[2:4]) if self.data_format == LAST else (x.shape[2], x.shape[3:])
        if channels != self.in_channels or x.shape[1] == 0:
            raise ValueError(
                f"ConvLSTM2D: frames must be {names} with C = {self.in_channels} and at least one time step, got "
                f"{tuple(x.shape)}"
            )
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation_rate, strict=True)]
        if min(sizes) == 0 or (self.padding == "valid" and any(n < k for n, k in zip(sizes, spans, strict=True))):
            raise ValueError(
                f"ConvLSTM2D: frames of {tuple(sizes)} are smaller than the kernel, which spans {tuple(spans)}; "
                'padding="same" takes any size but 0'
            )
        if mask is None:
            return
        if mask.dtype != torch.bool:
            raise TypeError(f"ConvLSTM2D: mask must be boolean, got {mask.dtype}")
        if mask.shape != x.shape[:2]:
            raise ValueError(f"ConvLSTM2D: mask must be (N, T) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")


def _convolved_as_product(x: Tensor, kernel: Tensor, strides: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Compute the convolution of x as one matrix product, for kernel windows with few values.

    The shapes of x and of the result are (N, C, H, W), in the memory format `torch.channels_last`.

    The rows of the matrices are padded to a multiple of 8 values, which is 16 bytes in half precision, so that tensor
    cores can load the rows.
    """
    height, width = kernel.shape[2:]
    if max(padding) > 0:
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows = x.permute(0, 2, 3, 1)
    if (height, width, *strides) == (1, 1, 1, 1):
        matrix = kernel.flatten(1)
    else:
        for axis, size in enumerate((height, width)):
            rows = rows.unfold(axis + 1, (size - 1) * dilation[axis] + 1, strides[axis])[..., :: dilation[axis]]
        rows = rows.permute(0, 1, 2, 4, 5, 3).flatten(3)  # (N, H', W', kh * kw * C)
        matrix = kernel.permute(0, 2, 3, 1).flatten(1)
    missing = -matrix.shape[1] % 8
    if missing:
        rows, matrix = F.pad(rows, (0, missing)), F.pad(matrix, (0, missing))
    return F.linear(rows, matrix).permute(0, 3, 1, 2)


def _masks(like: Tensor, rate: float) -> Tensor:
    """Draw four dropout masks for (N, C, H, W), scaled by 1 / (1 - rate): (N, 4, C, H, W)."""
    ones = torch.ones_like(like)[:, None].expand(-1, 4, -1, -1, -1)
    return F.dropout(ones, rate)


def _four_times(frames: Tensor, rate: float) -> Tensor:
    """Apply dropout to frames (T, N, C, H, W), with a mask per gate: (T, N, 4 * C, H, W).

    All time steps use the same masks.
    """
    return (frames[:, :, None] * _masks(frames[0], rate)).flatten(2, 3)


def _pair(name: str, value: int | Sequence[int]) -> Pair:
    found = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(found) != 2 or not all(isinstance(each, int) and each > 0 for each in found):
        raise ValueError(f"ConvLSTM2D: {name} must be a positive integer or a pair of them, got {value!r}")
    return found


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"ConvLSTM2D: {name} must be a positive integer, got {value!r}")
    return value


def _one_of(name: str, value: Any, names: Sequence[str]) -> str:
    if value not in names:
        raise ValueError(
            f"ConvLSTM2D: {name} must be one of {', '.join(names)}; got {value!r}{did_you_mean(value, names)}"
        )
    return str(value)
