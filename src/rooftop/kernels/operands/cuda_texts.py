"""Join CUDA C++ files of several families into one text for NVRTC."""

from __future__ import annotations

from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[1]


@cache
def cuda_text(*names: str) -> str:
    """The joined text of files in `rooftop/kernels`.

    Args:
        names: paths such as "norms/pieces.cu". A file must follow the files whose functions it calls.
    """
    return "\n".join((KERNELS / name).read_text(encoding="utf-8") for name in names)
