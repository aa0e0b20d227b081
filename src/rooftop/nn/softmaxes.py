"""Softmax and its logarithm as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import log_softmax, softmax


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax`, computed by `rooftop.kernels.softmax`. By default, `dim` is the last dimension."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the softmax of input, of any shape. The result has the same shape as input."""
        return softmax(input, self.dim)  # type: ignore[arg-type]


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, computed by `rooftop.kernels.log_softmax`. By default, `dim` is the last dimension."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the log softmax of input, of any shape. The result has the same shape as input."""
        return log_softmax(input, self.dim)  # type: ignore[arg-type]
