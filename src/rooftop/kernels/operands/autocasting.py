"""The dtype of an operator's result under autocast: the same as for the corresponding PyTorch function.

PyTorch has a list of functions for each kind of device. A GPU's list computes norms, softmaxes and sums in float32. The
CPU's list keeps their input's dtype, and computes only losses in float32. Operators get the dtype of their result as an
argument, so that no input is copied to another dtype first.
"""

from __future__ import annotations

import torch
from torch import Tensor

IN_FLOAT32 = {
    "cpu": frozenset({"cross_entropy"}),
    "cuda": frozenset({"cross_entropy", "layer_norm", "rms_norm", "softmax", "log_softmax", "sum", "norm"}),
}
"""For each kind of device, the functions whose result is float32 under autocast (`norm` is
`torch.linalg.vector_norm`)."""


def under_autocast(x: Tensor) -> bool:
    """Whether autocast applies to x: it is on for the device of x, and x is not float64. Autocast never casts
    float64."""
    kind = x.device.type
    return kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)


def result_dtype(function: str, x: Tensor) -> torch.dtype:
    """The dtype of `function`'s result for a floating-point input x: float32 if autocast requires it, else x's
    dtype.
    """
    widened = function in IN_FLOAT32.get(x.device.type, frozenset()) and under_autocast(x)
    return torch.float32 if widened else x.dtype
