"""What composite operators call on an NVIDIA GPU, where that differs from the CPU.

Each entry of `CHOSEN_BY_DEVICE` is called with the operator and its arguments and does what the branch for CUDA in
PyTorch's C++ source does. `benchmarks/operators_by_device.py` runs all operators of PyTorch's own test suite on fake
tensors of both devices and lists those that differ.

| operator | CPU | CUDA |
|---|---|---|
| `lstm`, `gru`, `rnn_tanh`, `rnn_relu`, also packed | products step by step, or oneDNN | `_cudnn_rnn` |
| `lstm_cell`, `gru_cell` | gates by elementwise operators | `_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell` |
| `scaled_dot_product_attention` | one kernel, not with dropout | flash, efficient or cuDNN attention |
| `rms_norm` | elementwise operators | `_fused_rms_norm` |
| `dropout` | random numbers, division, product | `native_dropout` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def _composed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As the CPU composes it."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# Recurrent layers: ATen/native/RNN.cpp, ATen/native/cudnn/RNN.cpp.

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
    """All layers and time steps in one call of cuDNN."""
    settings = (params, has_biases, num_layers, dropout, train, bidirectional)
    if not _cudnn_takes(input):
        return _composed(func, input, hx, *settings, batch_first)
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
    """The same for sequences of several lengths."""
    settings = (params, has_biases, num_layers, dropout, train, bidirectional)
    if not _cudnn_takes(data):
        return _composed(func, data, batch_sizes, hx, *settings)
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
        (4 if has_biases else 2) + (projected > 0),  # matrices and biases of a layer
        params[0].new_empty(0),  # where cuDNN keeps all weights one after the other
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
    """The values of a tensor that lies in the host's memory: batch sizes of packed sequences."""
    known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if known is None:
        raise DataDependentOutputException(func)
    with _disable_current_modes():
        values: list[int] = known.tolist()
    return values


def _runs(batch_sizes: Sequence[int]) -> Iterator[tuple[slice, int, slice]]:
    """Time steps of equal batch size one after the other: the steps, their batch size, and their rows when packed."""
    step = row = 0
    for size, equal in groupby(batch_sizes):
        steps = len(list(equal))
        yield slice(step, step + steps), size, slice(row, row + steps * size)
        step, row = step + steps, row + steps * size


def _pad(
    func: Any, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes = _values(batch_sizes, func)
    # The same on both devices, but PyTorch reads the sizes where fake tensors have none.
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


# Attention: ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp.

_HALVES = (torch.float16, torch.bfloat16)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In one kernel where a GPU has one for these shapes, types and masks, else product by product."""
    if query.dim() == 3 and all(t.dim() == 3 for t in (key, value)) and torch.__version__ >= TorchVersion("2.14"):
        # (H, S, D): from this release on a batch of one
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        output = _attention(func, query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output.squeeze(0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown, hidden = (torch.scalar_tensor(v, dtype=query.dtype) for v in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, shown, hidden)
    kernel = _attention_kernel(query, key, value, attn_mask, is_causal, enable_gqa)
    with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "flash":
        width = query.shape[-1]
        query, key, value = (_padded(t, 8) for t in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        flash = aten._scaled_dot_product_flash_attention
        output = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :width]
    elif kernel == "math":
        math = aten._scaled_dot_product_attention_math
        output = math(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    else:
        bias = _bias(attn_mask, query, key)
        if kernel == "cudnn":
            cudnn = aten._scaled_dot_product_cudnn_attention
            output = cudnn(query, key, value, bias, with_gradient, dropout_p, is_causal, False, scale=scale)[0]
        else:
            efficient = aten._scaled_dot_product_efficient_attention
            output = efficient(query, key, value, bias, with_gradient, dropout_p, is_causal, scale=scale)[0]
    attended: Tensor = output
    return attended


def _attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, grouped: bool
) -> str:
    """The kernel that an NVIDIA GPU from Ampere on has for this attention; "math" if it has none."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype != query.dtype or t.numel() == 0 for t in tensors) or query.is_nested:
        return "math"
    if len({t.shape[0] for t in tensors}) > 1 or (mask is not None and is_causal):
        return "math"
    same_heads = len({t.shape[1] for t in tensors}) == 1
    if not same_heads and not grouped:
        return "math"
    enabled, half = torch.backends.cuda, query.dtype in _HALVES
    widths = {t.shape[-1] for t in tensors}
    aligned = all(width % (8 if half else 4) == 0 for width in widths)
    if enabled.flash_sdp_enabled() and half and mask is None and len(widths) == 1 and max(widths) <= 256:
        return "flash"
    efficient = same_heads and (half or query.dtype == torch.float32)
    if enabled.mem_efficient_sdp_enabled() and efficient and aligned and query.shape[-1] == key.shape[-1]:
        return "efficient"
    if enabled.cudnn_sdp_enabled() and half and aligned and max(widths) <= 256:
        return "cudnn"
    return "math"


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as (B, H, S_q, S_k), its rows padded in memory to where vectors of 16 elements end."""
    if mask is None:
        return None
    keys = key.shape[2]
    if mask.shape[-1] == keys:
        mask = _padded(mask, 16)[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)


# Norms and dropout: ATen/native/layer_norm.cpp, ATen/native/Dropout.cpp.


class _FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm`, which autograd on a CPU takes apart."""

    @staticmethod
    def forward(context: Any, input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output, scale = aten._fused_rms_norm(input, shape, weight, eps)
        context.save_for_backward(input, weight, scale)
        context.shape = shape
        result: Tensor = output
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        input, weight, scale = context.saved_tensors
        needed = [context.needs_input_grad[0], context.needs_input_grad[2]]
        to_input, to_weight = aten._fused_rms_norm_backward(gradient, input, context.shape, scale, weight, needed)
        return to_input, None, to_weight, None


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    channels_last = input.dim() in (4, 5) and not input.is_contiguous()
    if input.is_complex() or channels_last or (weight is not None and weight.dtype != input.dtype):
        composed: Tensor = _composed(func, input, normalized_shape, weight, eps)
        return composed
    normed: Tensor = _FusedRMSNorm.apply(input, list(normalized_shape), weight, eps)
    return normed


def _dropout(func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    dropped: Tensor
    if train and 0 < p < 1 and input.numel() > 0:
        dropped = aten.native_dropout(input, p, train)[0]
    else:
        dropped = _composed(func, input, p, train)
    return dropped


CHOSEN_BY_DEVICE: dict[Any, Callable[..., Any]] = {
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
    aten.scaled_dot_product_attention.default: _attention,
    aten.rms_norm.default: _rms_norm,
    aten.dropout.default: _dropout,
}
"""What each operator does on a GPU, called with the operator before its arguments."""


# Shapes of results of operators that PyTorch gives no fake implementation.


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


SHAPES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten._thnn_fused_gru_cell.default: _thnn_fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _thnn_fused_gru_cell_backward,
}
