"""Activations after a product or a convolution: their names, formulas in PyTorch, and costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.operands.dtypes import accumulator_dtype

# an activation's index is its number in triton_kernels/activations.py
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "relu6", "hardswish", "hardsigmoid")
OF_OUTPUT = ("none", "relu", "sigmoid")
"""Activations whose backward reads only the activation's result. For all others, backward reads the input."""

# Flops per element; an exponential, a division and an error function count 1 each, like a product.
FORWARD_FLOPS = {
    "none": 0, "relu": 1, "gelu": 5, "gelu_tanh": 8, "silu": 4, "sigmoid": 3, "relu6": 2, "hardswish": 5,
    "hardsigmoid": 4,
}  # fmt: skip
BACKWARD_FLOPS = {
    "none": 0, "relu": 1, "gelu": 10, "gelu_tanh": 15, "silu": 8, "sigmoid": 3, "relu6": 2, "hardswish": 5,
    "hardsigmoid": 3,
}  # fmt: skip


def activated(values: Tensor, activation: str) -> Tensor:
    """Apply the activation with this name. All names except "none" and "gelu_tanh" are those of PyTorch's functions."""
    if activation == "none":
        return values
    if activation == "gelu_tanh":
        return functional.gelu(values, approximate="tanh")
    function: Callable[[Tensor], Tensor] = getattr(functional, activation)
    return function(values)


def activation_backward_reference(dy: Tensor, saved: Tensor, activation: str, of_output: bool) -> Tensor:
    """Compute dy * activation' in float32 (float64 for float64). `saved`: the activation's result if `of_output`, else
    the activation's input.
    """
    gradient, value = dy.to(accumulator_dtype(dy.dtype)), saved.to(accumulator_dtype(dy.dtype))
    if activation == "none":
        return gradient
    if activation == "relu":
        return gradient.masked_fill(value <= 0, 0.0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(gradient, value)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(gradient, value, approximate="tanh")
    if activation == "relu6":
        return torch.ops.aten.hardtanh_backward(gradient, value, 0.0, 6.0)
    if activation == "hardswish":
        return torch.ops.aten.hardswish_backward(gradient, value)
    if activation == "hardsigmoid":
        # not aten::hardsigmoid_backward, which has no derivative
        return gradient.masked_fill((value <= -3) | (value >= 3), 0.0) / 6
    share = value if activation == "sigmoid" and of_output else value.sigmoid()
    if activation == "sigmoid":
        return gradient * share * (1 - share)
    return gradient * share * (1 + value * (1 - share))
