"""Merge dimensions of strided tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Dims = list[tuple[int, tuple[int, ...]]]
"""Merged dimensions, the outermost first. For each dimension: (size, the stride of each tensor)."""


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors have the same shape and strides. Strides of dimensions of size 1 do not matter."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    return one.shape == other.shape and all(a == b for size, a, b in strides if size != 1)


def merged(sizes: Sequence[int], *strides: Sequence[int]) -> Dims:
    """Merge the dimensions of tensors of the same shape. Two neighbouring dimensions are merged if every tensor can
    step through both with a single stride.

    Args:
        sizes: sizes of the dimensions, the outermost first. The result omits dimensions of size 1.
        strides: the strides of each tensor.
    """
    dims: Dims = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, tuple(steps))
        else:
            dims.append((size, tuple(steps)))
    return dims
