"""Tensors from the host to where a rank computes, for which the host does not wait.

CUDA copies from ordinary memory only after the stream has done all that was launched before, and the host waits for it.
From pinned memory it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the CPU, on the device; there as it is."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
