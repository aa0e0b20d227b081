"""CUDA C++ that lies beside the families' Python, as the one text that NVRTC compiles."""

from __future__ import annotations

from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[1]


@cache
def cuda_text(*names: str) -> str:
    """The text of files of `rooftop/kernels`, one after another.

    Args:
        names: with their folders, such as "norms/pieces.cu"; what a file calls stands in one before it.
    """
    return "\n".join((KERNELS / name).read_text(encoding="utf-8") for name in names)
