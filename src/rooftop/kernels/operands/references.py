"""Decide which calls plain PyTorch computes instead of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED


def without_kernels(device: torch.device) -> bool:
    """Whether no Triton kernel runs on the device: on a CPU without Triton's interpreter."""
    return device.type == "cpu" and not INTERPRETED


def by_reference(x: Tensor) -> bool:
    """Whether the PyTorch formula computes the call: for float64, and if no kernel runs."""
    return why_reference(x.dtype, not without_kernels(x.device)) is not None


def why_reference(dtype: torch.dtype, triton: bool) -> str | None:
    """The reason why the PyTorch formula computes the call; None if kernels do. `triton`: whether Triton's kernels run
    on the device.
    """
    if dtype == torch.float64:
        return "float64"
    return None if triton else "no kernels for the CPU"
