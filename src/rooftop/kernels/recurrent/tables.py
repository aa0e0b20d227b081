"""Launch parameters of the kernels of the gates of a ConvLSTM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GatesConfig:
    """Elements of the cell that a program works on, and warps."""

    elements: int
    warps: int
    measured: bool = field(default=True, compare=False)  # or predicted


# A thread has 4 elements of up to 9 tensors forward, and of up to 11 backward, which its registers hold without
# spills. `benchmarks/tuning/conv_lstms.py` tries others; there are no figures of a whole run yet.
FORWARD = GatesConfig(elements=512, warps=4, measured=False)
BACKWARD = GatesConfig(elements=512, warps=4, measured=False)
