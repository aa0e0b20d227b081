"""Copies of tensors from the host to the rank's device, for which the host does not wait.

CUDA copies from ordinary memory only after the stream has finished all earlier launches, and the host waits for the
copy. Copies from pinned memory do not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device; a tensor that is already there is returned unchanged."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
