"""Gated activations as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import swiglu


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, computed by `rooftop.kernels.swiglu`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Accept gate and up (..., N), or packed (..., 2 N) with the gate first. The result is (..., N)."""
        return swiglu(gate, up)
