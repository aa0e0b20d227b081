"""Count the part of an input that sliding windows touch: all of it, unless stride or dilation leave gaps.

A 1x1 convolution of stride 2 needs only a quarter of its input, so its cost must not count the other pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from torch import Tensor

from rooftop.cost.accounting import tensor_bytes


def touched_bytes(
    tensor: Tensor,
    windows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """Bytes of `tensor` (N, C, *spatial) under at least one window.

    Args:
        windows: the number of windows along each spatial dimension.
        kernel, stride, padding, dilation: for each spatial dimension.
    """
    spatial = tensor.shape[-len(windows) :]
    touched = prod(map(_touched, spatial, windows, kernel, stride, padding, dilation))
    return tensor_bytes(tensor) * touched // max(prod(spatial), 1)


def per_dimension(values: int | Sequence[int], dimensions: int) -> list[int]:
    """Repeat a single number for all dimensions, as PyTorch does."""
    values = [values] if isinstance(values, int) else list(values)
    return values * dimensions if len(values) == 1 else values


@lru_cache(maxsize=4096)
def _touched(size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many of the `size` positions along one dimension are under a window."""
    if dilation == 1 and windows and stride <= kernel:  # no gap between the windows
        return max(0, min((windows - 1) * stride - padding + kernel, size) - max(-padding, 0))
    touched = bytearray(size)
    for tap in range(kernel):
        first = tap * dilation - padding
        start = first if first >= 0 else first % stride
        places = range(start, max(start, min(first + windows * stride, size)), stride)  # a slice must not end below 0
        touched[places.start : places.stop : stride] = b"\1" * len(places)
    return sum(touched)
