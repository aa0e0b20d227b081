"""Which calls plain PyTorch computes, instead of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED


def without_kernels(device: torch.device) -> bool:
    """Whether no Triton kernel runs there: on a CPU, where Triton does not interpret them."""
    return device.type == "cpu" and not INTERPRETED


def by_reference(x: Tensor) -> bool:
    """Whether the formula in PyTorch computes it: in float64, and where no kernel runs."""
    return x.dtype == torch.float64 or without_kernels(x.device)
