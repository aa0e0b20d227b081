"""Explain why a tensor is too large: no tensor can have that many bytes, or the host has less free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import psutil
import torch
from torch import Tensor

MOST_BYTES = 2**63 - 1  # PyTorch counts bytes in int64


def allocated(what: str, shape: Sequence[int], dtype: torch.dtype, allocate: Callable[[], Tensor]) -> Tensor:
    """Return `allocate()`, and explain the error if the tensor is too large.

    Args:
        what: the tensor's name in messages.
        shape, dtype: the tensor's shape and dtype.

    Raises:
        ValueError: no tensor can have that many bytes.
        MemoryError: the host has too little memory.
        torch.OutOfMemoryError: a GPU has too little memory; the message is PyTorch's.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes > MOST_BYTES:
        raise ValueError(too_large(f"{what} of {tuple(shape)}", size_bytes))
    try:
        return allocate()
    except RuntimeError as error:
        check_host_memory(f"{what} of {tuple(shape)}", size_bytes, error)
        raise


def too_large(what: str, size_bytes: int) -> str:
    """The message for a tensor that no machine can hold."""
    return f"{what} needs {size_bytes:,} bytes, but a tensor has fewer than 2^63: use a smaller size"


def check_host_memory(what: str, size_bytes: int, error: BaseException) -> None:
    """Raise `MemoryError` if `error` is the RuntimeError that PyTorch raises when the host has too little memory.
    Return after any other error."""
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        free = psutil.virtual_memory().available
        raise MemoryError(
            f"{what} needs {size_bytes:,} bytes, but the host has {free:,} free: use a smaller size"
        ) from error
