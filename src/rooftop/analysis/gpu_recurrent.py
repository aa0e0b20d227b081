"""Run recurrent layers and cells with the operators that PyTorch uses on an NVIDIA GPU: one cuDNN call for all layers
and time steps, and cells with fused gates.

This file follows PyTorch's ATen/native/RNN.cpp and ATen/native/cudnn/RNN.cpp. Each function takes the operator, then
the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

_RNN_RELU, _RNN_TANH, _LSTM, _GRU = 0, 1, 2, 3
_CUDNN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _layers(
    mode: int,
    func: Any,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Compute all layers and time steps in one cuDNN call."""
    settings = (params, has_biases, num_layers, dropout, train, bidirectional)
    if not _cudnn_takes(input):
        return composed(func, input, hx, *settings, batch_first)
    return _cudnn_layers(mode, input, hx, *settings, batch_first, [])


def _packed_layers(
    mode: int,
    func: Any,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Any:
    """Compute all layers and time steps in one cuDNN call, for sequences of several lengths."""
    settings = (params, has_biases, num_layers, dropout, train, bidirectional)
    if not _cudnn_takes(data):
        return composed(func, data, batch_sizes, hx, *settings)
    return _cudnn_layers(mode, data, hx, *settings, False, _values(batch_sizes, func))


def _cudnn_layers(
    mode: int,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: list[int],
) -> Any:
    hidden: Tensor
    cell: Tensor | None
    hidden, cell = hx if mode == _LSTM else (hx, None)  # type: ignore[assignment]  # (layers · directions, B, H) each
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        input, hidden = input.to(lower), hidden.to(lower)
        cell = cell.to(lower) if cell is not None else None
        params = [weight.to(lower) for weight in params]
    projected = 0 if cell is None or cell.shape[2] == hidden.shape[2] else hidden.shape[2]
    output, last, last_cell, *_ = aten._cudnn_rnn(
        input,
        params,
        (4 if has_biases else 2) + (projected > 0),  # number of matrices and biases of a layer
        params[0].new_empty(0),  # cuDNN's buffer, which holds all weights one after the other
        hidden,
        cell,
        mode,
        hidden.shape[2] if cell is None else cell.shape[2],
        projected,
        num_layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, last) if cell is None else (output, last, last_cell)


def _cudnn_takes(input: Tensor) -> bool:
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_DTYPES and input.numel() > 0


def _values(tensor: Tensor, func: Any) -> list[int]:
    """The values of the batch sizes of packed sequences. A fake tensor has them only if it was made from constants."""
    known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if known is None:
        raise DataDependentOutputException(func)
    with _disable_current_modes():
        values: list[int] = known.tolist()
    return values


def _runs(batch_sizes: Sequence[int]) -> Iterator[tuple[slice, int, slice]]:
    """Yield each run of time steps with equal batch size: (slice of steps, batch size, slice of packed rows)."""
    step = row = 0
    for size, equal in groupby(batch_sizes):
        steps = len(list(equal))
        yield slice(step, step + steps), size, slice(row, row + steps * size)
        step, row = step + steps, row + steps * size


def _pad(
    func: Any, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes = _values(batch_sizes, func)
    # PyTorch's CPU version computes the same result, but its C++ code cannot read batch sizes from a fake tensor.
    padded = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), padding_value)
    for steps, size, rows in _runs(sizes):
        padded[steps, :size] = data[rows].unflatten(0, (-1, size))
    lengths = [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]
    return (padded.transpose(0, 1) if batch_first else padded), torch.tensor(lengths)


def _lstm_cell(
    func: Any,
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    gates = input @ w_ih.t(), hidden @ w_hh.t()  # (B, 4 H) each
    new_hidden, new_cell, _ = aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)
    return new_hidden, new_cell


def _gru_cell(
    func: Any,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    gates = input @ w_ih.t(), hx @ w_hh.t()  # (B, 3 H) each
    new_hidden: Tensor = aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
    return new_hidden


def composed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator from other operators, as PyTorch does on the CPU."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


RECURRENT: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: partial(_layers, _LSTM),
    aten.lstm.data: partial(_packed_layers, _LSTM),
    aten.gru.input: partial(_layers, _GRU),
    aten.gru.data: partial(_packed_layers, _GRU),
    aten.rnn_tanh.input: partial(_layers, _RNN_TANH),
    aten.rnn_tanh.data: partial(_packed_layers, _RNN_TANH),
    aten.rnn_relu.input: partial(_layers, _RNN_RELU),
    aten.rnn_relu.data: partial(_packed_layers, _RNN_RELU),
    aten._pad_packed_sequence.default: _pad,
    aten.lstm_cell.default: _lstm_cell,
    aten.gru_cell.default: _gru_cell,
}
"""Recurrent operators whose implementation depends on the device, and the GPU's version of each."""

# Fake results, empty tensors of the right shapes, of operators without a fake implementation in PyTorch.


def _cudnn_rnn_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *rest: Any,
) -> Any:
    *_, output_mask = rest
    to_input, to_hidden, to_cell, to_weights = output_mask
    return (
        torch.empty_like(input) if to_input else None,
        torch.empty_like(hx) if to_hidden else None,
        torch.empty_like(cx) if cx is not None and to_cell else None,
        [torch.empty_like(w) for w in weight] if to_weights else [],
    )


def _thnn_fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _thnn_fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    gates = grad_hy.new_empty((grad_hy.shape[0], 3 * grad_hy.shape[1]))
    bias = [gates.new_empty(gates.shape[1]) if has_bias else None for _ in range(2)]
    return gates, torch.empty_like(gates), torch.empty_like(grad_hy), *bias


RECURRENT_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten._thnn_fused_gru_cell.default: _thnn_fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _thnn_fused_gru_cell_backward,
}
"""Functions that compute fake results of operators without a fake implementation in PyTorch."""
