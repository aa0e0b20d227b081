"""The arithmetic of headers: sizes, steps, contiguity, and the position of a header in the whole Mat from which it was
cut. This code uses plain numbers and no tensors, so that making a view costs less than slicing a tensor.

A step is the stride of a dimension in bytes; the last dimension's step is the size of an element. An element with all
its channels is always contiguous.

Source of the rules: modules/core/src/matrix.cpp of OpenCV (updateContinuousFlag, locateROI, adjustROI, reshape).
"""

from __future__ import annotations

import math
from typing import NamedTuple

Sizes = tuple[int, ...]


def natural_steps(sizes: Sizes, elem_bytes: int) -> Sizes:
    """The steps, in bytes, of a Mat of these sizes whose elements are contiguous."""
    steps = [elem_bytes] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        steps[axis] = steps[axis + 1] * sizes[axis + 1]
    return tuple(steps)


def is_continuous(sizes: Sizes, steps: Sizes) -> bool:
    """Whether the elements of a Mat with these sizes and steps (in bytes) are contiguous. The steps of leading
    dimensions of size 1 do not matter.

    The result equals OpenCV's except for Mats of 2^31 numbers or more: OpenCV counts with a 32-bit int, and reports
    such Mats as not continuous.
    """
    last = len(sizes) - 1
    first = 0  # the first dimension that is larger than 1
    while first < last and sizes[first] <= 1:
        first += 1
    return all(steps[axis] * sizes[axis] >= steps[axis - 1] for axis in range(last, first, -1))


def span_bytes(sizes: Sizes, steps: Sizes) -> int:
    """Number of bytes from a Mat's first element to the end of its last element; 0 if the Mat has no elements."""
    if 0 in sizes or not sizes:
        return 0
    return steps[-1] + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


class Place(NamedTuple):
    """The position of a header in the whole Mat from which it was cut: the number of rows and columns of that Mat, and
    the header's first row and column in it."""

    whole_rows: int
    whole_cols: int
    row: int
    col: int


def locate(rows: int, cols: int, step: int, elem_bytes: int, offset: int, start: int, end: int) -> Place:
    """Find the position of a 2-D header in the whole Mat.

    The header begins at byte `offset` of the block of memory; the whole Mat spans bytes `start` to `end` of this block.
    """
    row, rest = divmod(offset - start, step)
    col = rest // elem_bytes
    whole_rows = max((end - start - (col + cols) * elem_bytes) // step + 1, row + rows)
    whole_cols = max((end - start - step * (whole_rows - 1)) // elem_bytes, col + cols)
    return Place(whole_rows, whole_cols, row, col)


def adjusted(place: Place, rows: int, cols: int, top: int, bottom: int, left: int, right: int) -> tuple[int, ...]:
    """Compute (first row, end of rows, first column, end of columns) after the edges moved outward by `top`, `bottom`,
    `left` and `right` (inward if negative). The edges stay within the whole Mat."""
    row1, row2 = _moved(place.row, rows, top, bottom, place.whole_rows)
    col1, col2 = _moved(place.col, cols, left, right, place.whole_cols)
    return row1, row2, col1, col2


def _moved(first: int, count: int, before: int, after: int, whole: int) -> tuple[int, int]:
    begin = min(max(first - before, 0), whole)
    end = max(0, min(first + count + after, whole))
    return min(begin, end), max(begin, end)


def reshaped_2d(rows: int, cols: int, cn: int, new_cn: int, new_rows: int, continuous: bool) -> tuple[int, int, int]:
    """Compute (rows, cols, channels) of a reshaped 2-D header. A `new_cn` or `new_rows` of 0 keeps the present value.
    Changing the number of rows requires elements without gaps.

    Raises:
        ValueError: the numbers cannot be divided into these rows or into elements of `new_cn` channels, or the number
            of rows would change although the Mat has gaps.
    """
    new_cn = new_cn or cn
    width = cols * cn  # numbers in a row
    if new_rows == 0 and (new_cn > width or width % new_cn):
        new_rows = rows * width // new_cn
    if new_rows not in (0, rows):
        if not continuous:
            raise ValueError(
                f"{rows} rows cannot become {new_rows}: there are gaps between the rows (isContinuous() is False); "
                "clone() first"
            )
        total = width * rows
        if total % new_rows:
            raise ValueError(
                f"{total} numbers ({rows} x {cols}, {cn} channels) cannot be divided into {new_rows} rows of equal "
                "length"
            )
        width, rows = total // new_rows, new_rows
    if width % new_cn:
        raise ValueError(f"rows of {width} numbers cannot be divided into elements of {new_cn} channels")
    return rows, width // new_cn, new_cn


def reshaped_nd(sizes: Sizes, cn: int, new_cn: int, wanted: Sizes) -> tuple[Sizes, int]:
    """Compute the sizes and channels of reshaped contiguous elements. In `wanted`, 0 keeps a dimension's size, and one
    size may be -1, which is computed from the others.

    Raises:
        ValueError: there are no new sizes, or the new sizes and channels give a different count of numbers.
    """
    new_cn = new_cn or cn
    if not wanted:
        raise ValueError("reshape needs at least one size, got (): use (1,) for one element")
    if any(size < -1 for size in wanted) or wanted.count(-1) > 1:
        raise ValueError(f"each size must be at least 0, except that one may be -1, got {wanted}")
    kept = []
    for axis, size in enumerate(wanted):
        if size == 0 and axis >= len(sizes):
            raise ValueError(
                f"the 0 at dimension {axis} keeps that dimension's size, but {sizes} has no such dimension"
            )
        kept.append(sizes[axis] if size == 0 else size)
    numbers = math.prod(sizes) * cn if sizes else 0
    known = math.prod(size for size in kept if size != -1) * new_cn
    if -1 in kept and known and numbers % known == 0:
        kept[kept.index(-1)] = numbers // known
    elif -1 in kept or known != numbers:
        raise ValueError(
            f"{numbers} numbers ({sizes}, {cn} channels) cannot be reshaped to {wanted} with {new_cn} channels"
        )
    return tuple(kept), new_cn
