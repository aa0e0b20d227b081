"""Boxes: a box describes the part of a whole tensor that is on one rank. A tensor may be cut along rows, columns, heads
or sequences. Along each dimension, the elements of a box are consecutive or equally spaced. For example, a rank may
have one chunk from the front of a sequence and one chunk from the back, which balances causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """The part of a whole tensor that is on one rank: indices start + i * stride for 0 <= i < size in each dimension.

    `shape` may be the shape of any view of the whole tensor: for example (3, heads, features, hidden) for a packed
    projection whose weight is (3 * heads * features, hidden). The elements of the part are in the same order as in the
    whole tensor.

    Attributes:
        shape: shape of the whole tensor.
        start: the index of the first element, in each dimension.
        size: the number of elements, in each dimension.
        stride: the distance between neighbouring elements, in each dimension. None: elements are consecutive.

    Raises:
        ValueError: shape, start, size and stride differ in length, or the part is not within the whole tensor.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.start) == len(self.size) == len(self.strides):
            raise ValueError(f"Box: shape, start, size and stride must have the same number of dimensions, got {self}")
        for extent, first, count, pace in zip(self.shape, self.start, self.size, self.strides, strict=True):
            if first < 0 or count < 0 or pace < 1 or (count > 0 and first + (count - 1) * pace >= extent):
                raise ValueError(
                    f"Box: {count} elements from index {first}, {pace} apart, do not fit in a dimension of {extent}: "
                    f"{self}"
                )

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return Box(tuple(shape), (0,) * len(shape), tuple(shape))

    @staticmethod
    def shard(shape: Sequence[int], dim: int, index: int, count: int) -> Box:
        """Part `index` of `count` equal parts along a dimension."""
        return Box.whole(shape).cut(dim, index, count)

    @staticmethod
    def zigzag(shape: Sequence[int], dim: int, index: int, count: int) -> Box:
        """Two of 2 * `count` equal chunks along a dimension: chunk `index` from the front, and chunk `index` from the
        back.
        """
        dim = _dimension(shape, dim)
        chunk = _equal(shape, dim, 2 * count, index, count)
        seen = (*shape[:dim], 2 * count, chunk, *shape[dim + 1 :])
        ones = (1,) * (len(shape) - dim)
        return Box(
            seen,
            (*(0,) * dim, index, *(0,) * len(ones)),
            (*seen[:dim], 2, *seen[dim + 1 :]),
            (*(1,) * dim, 2 * (count - index) - 1, *ones),
        )

    def cut(self, dim: int, index: int, count: int) -> Box:
        """Cut this part into `count` equal parts along one of its dimensions, and return part `index`."""
        dim = _dimension(self.size, dim)
        length = _equal(self.size, dim, count, index, count)
        start, size = list(self.start), list(self.size)
        start[dim] += index * length * self.strides[dim]
        size[dim] = length
        return Box(self.shape, tuple(start), tuple(size), self.stride)

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each dimension. If `stride` is None, all strides are 1."""
        return (1,) * len(self.shape) if self.stride is None else self.stride

    def of(self, whole: Tensor) -> Tensor:
        """Extract this part, of shape `size`, from a whole tensor with prod(shape) elements. The result is a view if
        possible.
        """
        seen = whole.reshape(self.shape)
        ends = zip(self.start, self.size, self.strides, strict=True)
        return seen[tuple(slice(first, first + count * pace, pace) for first, count, pace in ends)]

    def index_map(self) -> tuple[list[int], list[int], int]:
        """The sizes, strides and offset of the part within the flattened whole tensor, with as few dimensions as
        possible."""
        sizes: list[int] = []
        strides: list[int] = []
        offset, pace = 0, 1
        for d in range(len(self.shape) - 1, -1, -1):
            offset += self.start[d] * pace
            stride = self.strides[d] * pace
            if sizes and sizes[-1] * strides[-1] == stride:
                sizes[-1] *= self.size[d]
            elif self.size[d] != 1:
                sizes.append(self.size[d])
                strides.append(stride)
            pace *= self.shape[d]
        return (sizes[::-1], strides[::-1], offset) if sizes else ([1], [1], offset)


def _dimension(shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"Box: there is no dimension {dim} in {tuple(shape)}")
    return dim % len(shape)


def _equal(shape: Sequence[int], dim: int, pieces: int, index: int, count: int) -> int:
    """The length of each of `pieces` equal pieces of a dimension. Raises ValueError if `index` is out of range, or the
    dimension cannot be cut equally."""
    if not 0 <= index < count:
        raise ValueError(f"Box: index must be from 0 to {count - 1} for {count} parts, got {index}")
    if shape[dim] % pieces:
        raise ValueError(f"Box: dimension {dim} of {tuple(shape)} cannot be cut into {pieces} equal pieces")
    return shape[dim] // pieces
