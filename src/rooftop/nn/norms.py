"""Layer norm and RMS norm as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import layer_norm, rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, parameters and state included, computed by `rooftop.kernels.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """input (..., *normalized_shape); the result is like it."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, parameters and state included, computed by `rooftop.kernels.rms_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """input (..., *normalized_shape); the result is like it."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)
