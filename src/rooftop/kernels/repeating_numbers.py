"""Numbers that repeat along a row, one for each channel of interleaved images, as kernels load them.

A program may begin with any of the channels. So a table has a line for each, with the numbers from that one on, again
and again: what a program needs lies side by side, and is loaded as wide as images are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

COLUMNS = 2048
"""Of a table: numbers that a program takes from it at most."""


@functools.lru_cache(maxsize=64)
def table_of(numbers: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(period, COLUMNS): line p has the numbers from number p on.

    Args:
        numbers: in the bytes that they have in memory: -0.0 is not 0.0, and NaN is what it is.
        dtype: of the numbers.
        device: where the table is. It is there when this returns, and for all streams.

    Raises:
        RuntimeError: there is no such table yet, and a CUDA graph is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a number for each channel is copied to the GPU when it is first used, which a CUDA graph would record: do "
            "it once before it is captured"
        )
    period = torch.frombuffer(bytearray(numbers), dtype=dtype)
    places = torch.arange(len(period), device="cpu")[:, None] + torch.arange(COLUMNS, device="cpu")
    return period[places % len(period)].to(device)
