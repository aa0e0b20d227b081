"""The checked geometry of a sparse convolution: grid, kernel, stride, padding and dilation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DIMS = 4
MAX_ROWS = 2**31 - 1  # tables store row numbers as int32
INT32_SIZE = 2**31  # largest size of a dimension, or of a batch, whose coordinates int32 indices can store
NO_KEY = 2**63 - 1  # the maximum int64, which sorts after all keys
EMPTY = -1  # marks a free slot in a hash table of keys
NO_ROOM = 2  # index of a flag in a rulebook's `faults`, set if the hash table has no room or the bound is too small

PerDimension = int | Sequence[int]


@dataclass(frozen=True)
class Geometry:
    """A convolution without its channels: how the sites of inputs map to the sites of outputs.

    Attributes:
        batch_size: number of batch elements.
        in_shape, out_shape: sizes of the dense grids.
        ksize, stride, padding, dilation: one value per dimension. For a submanifold convolution, the padding is
            dilation * (ksize // 2), so that the centre of the kernel is at the output site.
        subm: whether the output sites are the input sites.
        transpose: whether input and output are swapped in the definition (`rulebook.py`).
    """

    batch_size: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    ksize: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    subm: bool = False
    transpose: bool = False

    @property
    def dims(self) -> int:
        return len(self.in_shape)

    @property
    def kernel_volume(self) -> int:
        return math.prod(self.ksize)


def geometry(
    batch_size: int,
    spatial_shape: Sequence[int],
    ksize: PerDimension,
    stride: PerDimension = 1,
    padding: PerDimension = 0,
    dilation: PerDimension = 1,
    out_padding: PerDimension = 0,
    subm: bool = False,
    transpose: bool = False,
) -> Geometry:
    """Create the `Geometry` of a convolution over a grid.

    Arguments and errors are those of `get_indice_pairs`.
    """
    shape = sizes_of(spatial_shape)
    dims = len(shape)
    batch_size = batch_size_of(batch_size)
    kernel, step = _sizes("ksize", ksize, dims, 1), _sizes("stride", stride, dims, 1)
    pad, spread = _sizes("padding", padding, dims, 0), _sizes("dilation", dilation, dims, 1)
    more = _sizes("out_padding", out_padding, dims, 0)
    check_kernel(kernel)
    if any(more) and not transpose:
        raise ValueError(f"out_padding must be 0 except for transposed convolutions, got {more}")
    if subm:
        _check_submanifold(kernel, step, transpose)
        pad, out_shape = tuple(d * (k // 2) for d, k in zip(spread, kernel, strict=True)), shape
    else:
        out_shape = tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + m + 1 if transpose else (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d, m in zip(shape, kernel, step, pad, spread, more, strict=True)
        )
    if min(out_shape) < 1:
        raise ValueError(
            f"a kernel of {kernel} (dilation {spread}, padding {pad}) does not fit into spatial_shape {shape}: the "
            f"output would be {out_shape}; add padding or use a smaller kernel"
        )
    check_cells("spatial_shape", shape, batch_size)
    check_cells("the output's shape", out_shape, batch_size)
    return Geometry(batch_size, shape, out_shape, kernel, step, pad, spread, subm, transpose)


def _check_submanifold(ksize: tuple[int, ...], stride: tuple[int, ...], transpose: bool) -> None:
    if transpose:
        raise ValueError("a convolution is submanifold or transposed, not both: pass subm=False or transpose=False")
    if any(k % 2 == 0 for k in ksize):
        raise ValueError(f"the kernel of a submanifold convolution needs a centre: ksize must be odd, got {ksize}")
    if any(s != 1 for s in stride):
        raise ValueError(f"a submanifold convolution keeps its sites: stride must be 1, got {stride}")


def check_kernel(ksize: tuple[int, ...]) -> None:
    """Raise `ValueError` if a kernel has more offsets than int32 can number."""
    if math.prod(ksize) > MAX_ROWS:
        raise ValueError(f"a kernel of {ksize} has more offsets than int32 can number: use a smaller kernel")


def check_cells(what: str, shape: Sequence[int], batch_size: int) -> None:
    """Raise `ValueError` if a grid has more cells than int64 keys can number."""
    if batch_size * math.prod(shape) > NO_KEY:
        raise ValueError(
            f"{what} {tuple(shape)} times batch_size {batch_size} is 2^63 cells or more, too many for int64 keys: "
            "shift the coordinates to start near 0 and pass the smallest shape that contains them"
        )


def sizes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Convert a `spatial_shape` to integers. Raise `TypeError` if a size is not an integer, and `ValueError` unless
    there are 1 to 4 sizes of at least 1."""
    sizes = _sizes("spatial_shape", shape, None, 1)
    if not 1 <= len(sizes) <= MAX_DIMS:
        raise ValueError(f"spatial_shape must have 1 to {MAX_DIMS} dimensions, got {sizes}")
    return sizes


def batch_size_of(value: Any) -> int:
    """Convert a batch size to an integer.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is below 1.
    """
    size = whole_number("batch_size", value)
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {value}")
    return size


def whole_number(what: str, value: Any, where: str = "") -> int:
    """Convert an integer (of Python, numpy or a tensor) or a float with an integer value to an int. In error
    messages, `what` is the name of the value, and `where` follows "must be an integer".

    Raises:
        TypeError: the value is not an integer (such as 2.5), or is a bool.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor without exactly one element
        found = None
    if found is None or isinstance(value, (bool, str)) or found != value:
        raise TypeError(f"{what} must be an integer{where}, got {value!r}")
    return found


def whole_numbers(what: str, value: PerDimension, dims: int) -> tuple[int, ...]:
    """Convert a sequence or array to integers, or repeat one integer for all `dims`. Errors are as in
    `whole_number`."""
    if isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0:  # 0-dimensional arrays cannot be iterated
        return tuple(whole_number(what, each, " in each dimension") for each in value)
    return (whole_number(what, value, " for each dimension or for all"),) * dims


def _sizes(what: str, value: PerDimension, dims: int | None, least: int) -> tuple[int, ...]:
    """Convert a value to one integer per dimension. Raise `ValueError` if the number of integers is not `dims` (None:
    any number), or if one is below `least`.
    """
    sizes = whole_numbers(what, value, dims or 1)
    if dims is not None and len(sizes) != dims:
        raise ValueError(f"{what} must be one integer, or {dims} integers (one per dimension), got {value}")
    if any(size < least for size in sizes):
        raise ValueError(f"{what} must be at least {least} in each dimension, got {value}")
    return sizes
