"""The dtypes of an operator's operands and result under autocast, as for the corresponding PyTorch function.

Autocast casts the operands of products, convolutions and attention to its own dtype. PyTorch also lists, for each
device type, the functions that autocast runs in float32. For GPUs, the listed functions include losses, norms,
softmaxes and sums; for the CPU, they include losses, but none of the others. The operators for the listed functions get
the dtype of their result as an argument, so that no input is copied to another dtype first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.torch_versions import torch_at_least

_ON_GPU = {"cross_entropy", "layer_norm", "softmax", "log_softmax", "sum", "norm"}
IN_FLOAT32 = {
    "cpu": frozenset({"cross_entropy"}),
    "cuda": frozenset(_ON_GPU | {"rms_norm"} if torch_at_least(2, 12) else _ON_GPU),
}
"""For each device type, the functions whose result is float32 under autocast (`norm` is `torch.linalg.vector_norm`)."""


def under_autocast(x: Tensor) -> bool:
    """Whether autocast applies to x: autocast is on for its device, and x is not float64, which autocast never
    casts.
    """
    kind = x.device.type
    return kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)


def cast_by_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return all tensors in autocast's dtype if autocast applies to x, else unchanged. None stays None."""
    if not under_autocast(x):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), *(None if t is None else t.to(dtype) for t in others)


def cast_beside_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cast x, weight and bias as autocast does. Return (x, weight, bias, residual, a residual to add after the
    operator); at most one of both residuals is not None. If the residual's dtype differs from autocast's, the residual
    is added after the operator, because it promotes the dtype of the sum, as in PyTorch.
    """
    x, weight, bias = cast_by_autocast(x, weight, bias)
    if residual is not None and under_autocast(x) and residual.dtype != x.dtype:
        return x, weight, bias, None, residual
    return x, weight, bias, residual, None


def result_dtype(function: str, x: Tensor) -> torch.dtype:
    """The dtype of `function`'s result for a floating-point input x: float32 if autocast requires it, else x's
    dtype.
    """
    widened = function in IN_FLOAT32.get(x.device.type, frozenset()) and under_autocast(x)
    return torch.float32 if widened else x.dtype
