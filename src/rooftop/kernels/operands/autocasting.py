"""The dtype of an operator's result under autocast, as for the corresponding PyTorch function.

PyTorch lists, for each device type, the functions that autocast runs in float32. For GPUs, the listed functions include
losses, norms, softmaxes and sums; for the CPU, they include losses, but none of the others. Operators get the dtype of
their result as an argument, so that no input is copied to another dtype first.
"""

from __future__ import annotations

import torch
from torch import Tensor

IN_FLOAT32 = {
    "cpu": frozenset({"cross_entropy"}),
    "cuda": frozenset({"cross_entropy", "layer_norm", "rms_norm", "softmax", "log_softmax", "sum", "norm"}),
}
"""For each device type, the functions whose result is float32 under autocast (`norm` is `torch.linalg.vector_norm`)."""


def under_autocast(x: Tensor) -> bool:
    """Whether autocast applies to x: autocast is on for its device, and x is not float64, which autocast never
    casts.
    """
    kind = x.device.type
    return kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)


def result_dtype(function: str, x: Tensor) -> torch.dtype:
    """The dtype of `function`'s result for a floating-point input x: float32 if autocast requires it, else x's
    dtype.
    """
    widened = function in IN_FLOAT32.get(x.device.type, frozenset()) and under_autocast(x)
    return torch.float32 if widened else x.dtype
