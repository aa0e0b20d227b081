"""Decide whether plain PyTorch computes a call instead of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED


def without_kernels(device: torch.device) -> bool:
    """Whether the device cannot run Triton kernels: it is a CPU, and Triton's interpreter is off."""
    return device.type == "cpu" and not INTERPRETED


def by_reference(x: Tensor) -> bool:
    """Whether the PyTorch formula computes a call with x: x is float64, or the device of x cannot run
    Triton kernels.
    """
    return why_reference(x.dtype, not without_kernels(x.device)) is not None


def why_reference(dtype: torch.dtype, triton: bool) -> str | None:
    """The reason why the PyTorch formula computes the call; None if kernels do. `triton`: whether the device runs
    Triton kernels.
    """
    if dtype == torch.float64:
        return "float64"
    return None if triton else "no kernels for the CPU"
