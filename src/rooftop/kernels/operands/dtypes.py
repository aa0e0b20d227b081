"""The dtypes that operators accept, and the dtypes in which they accumulate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)

CPP_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
"""The C++ types of the dtypes that the CUDA C++ kernels accept."""


def accumulator_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics: float64 if one of the given dtypes is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def in_words(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes as text for error messages: "bfloat16, float16, float32 or float64"."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last
