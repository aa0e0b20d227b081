"""The operators that composite operators call on an NVIDIA GPU, where these differ from the operators on a CPU.

Each function in `CHOSEN_BY_DEVICE` takes the operator and its arguments, and follows the CUDA branch in PyTorch's C++
source. `benchmarks/operators_by_device.py` runs all operators of PyTorch's own test suite on fake tensors of both
devices and lists the operators that differ.

| operator | CPU | CUDA |
|---|---|---|
| `lstm`, `gru`, `rnn_tanh`, `rnn_relu`, also packed | products step by step, or oneDNN | `_cudnn_rnn` |
| `lstm_cell`, `gru_cell` | gates by elementwise operators | `_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell` |
| `scaled_dot_product_attention` | one kernel, except with dropout | flash, efficient or cuDNN attention |
| `rms_norm` | elementwise operators | `_fused_rms_norm` |
| `dropout` | random numbers, division, product | `native_dropout` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftop.analysis.gpu_attention import attention
from rooftop.analysis.gpu_recurrent import RECURRENT, composed

aten = torch.ops.aten


# Norms and dropout: ATen/native/layer_norm.cpp, ATen/native/Dropout.cpp.


class _FusedRMSNorm(torch.autograd.Function):
    """Autograd function for `_fused_rms_norm`, which PyTorch's autograd would decompose on a CPU."""

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
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    channels_last = last is not None and not input.is_contiguous() and input.is_contiguous(memory_format=last)
    if input.is_complex() or channels_last or (weight is not None and weight.dtype != input.dtype):
        normed: Tensor = composed(func, input, normalized_shape, weight, eps)
    else:
        normed = _FusedRMSNorm.apply(input, list(normalized_shape), weight, eps)
    return normed


def _dropout(func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    dropped: Tensor
    if train and 0 < p < 1 and input.numel() > 0:
        dropped = aten.native_dropout(input, p, train)[0]
    else:
        dropped = composed(func, input, p, train)
    return dropped


CHOSEN_BY_DEVICE: dict[Any, Callable[..., Any]] = {
    **RECURRENT,
    aten.scaled_dot_product_attention.default: attention,
    aten.rms_norm.default: _rms_norm,
    aten.dropout.default: _dropout,
}
"""The GPU's version of each operator. Each function takes the operator, then the operator's arguments."""
