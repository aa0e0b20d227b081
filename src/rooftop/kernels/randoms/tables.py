"""Launch parameters of the kernels of random numbers and dropout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RandomConfig:
    """Elements of a program, and warps."""

    elements: int
    warps: int
    measured: bool = field(default=True, compare=False)  # or predicted


# Eight elements a thread, two blocks of the generator: their rounds run side by side. `benchmarks/tuning/randoms.py`
# tries others; none has been timed yet.
FILL = RandomConfig(elements=1024, warps=4, measured=False)
DROPOUT = RandomConfig(elements=1024, warps=4, measured=False)
