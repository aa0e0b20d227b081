"""Climb the memory ladder on a CPU or a GPU."""

from __future__ import annotations

import torch

from rooftop.hardware.ceilings import Progress
from rooftop.ladder.memory_levels import MemoryClimb


def climb_memory(device: torch.device, *, progress: Progress = lambda what, fraction: None) -> MemoryClimb:
    """Measure every level of the device's memory.

    Args:
        device: a GPU, or the CPU.
        progress: called with (the current activity, fraction done).

    Raises:
        MissingExtraError: Numba is not installed (for a CPU), or the compiler of CUDA C++ (for a GPU).
    """
    if device.type == "cuda":
        from rooftop.ladder.memory_on_gpu import on_gpu

        return on_gpu(device, progress)
    from rooftop.ladder.memory_on_cpu import on_cpu

    return on_cpu(progress)
