"""Values that are written to every element: one number for all channels, a number for each channel, or OpenCV's Scalar
of four numbers.

Numbers are converted to a depth as in the rest of this package: rounded half to even, limited to the depth's range,
with NaN as the least integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.type_codes import CV_MAT_CN, Depth, depth_of, typeToString

ScalarLike: TypeAlias = "float | bool | Sequence[float] | np.ndarray[Any, Any] | Tensor"

_MOST_BITS = 1023  # integers of more bits may exceed the range of float64


class Scalar(tuple[float, float, float, float]):
    """cv::Scalar: four numbers; omitted numbers are 0. So `Scalar(5)` is 5 in the first channel and 0 in the
    others. `Scalar.all(5)` and the plain number 5 are 5 in all channels."""

    __slots__ = ()

    def __new__(cls, v0: float = 0, v1: float = 0, v2: float = 0, v3: float = 0) -> Scalar:
        return super().__new__(cls, (v0, v1, v2, v3))

    @classmethod
    def all(cls, value: float) -> Scalar:
        """The same number four times."""
        return cls(value, value, value, value)

    def __repr__(self) -> str:
        return f"Scalar{tuple(self)}"


def element(value: ScalarLike, type: int) -> Tensor:
    """Build one element of a type from a value: a tensor (channels,) of the type's dtype, on the CPU.

    Args:
        value: one number for all channels, or one number per channel. For up to four channels, 2 to 4 numbers are also
            accepted as a Scalar: missing numbers are 0, and surplus numbers are ignored.

    Raises:
        TypeError: `value` does not consist of numbers.
        ValueError: the count of numbers is wrong.
    """
    depth = depth_of(type)
    return torch.tensor([_stored(number, depth) for number in numbers_of(value, type)], dtype=depth.dtype, device="cpu")


def numbers_of(value: ScalarLike, type: int) -> list[int | float]:
    """The number of each channel of a type, without conversion. Arguments and errors are as in `element`."""
    channels = CV_MAT_CN(type)
    numbers = _numbers(value)
    if len(numbers) == 1:
        return numbers * channels
    if len(numbers) != channels:
        if channels > 4 or len(numbers) > 4 or not numbers:
            scalar = "; a Scalar may have 1 to 4 numbers" if channels <= 4 else ""
            raise ValueError(
                f"got {len(numbers)} numbers for an element of {typeToString(type)}, which has {channels} "
                f"channel{'' if channels == 1 else 's'}: pass one number for all channels, or one number for each "
                f"channel{scalar}"
            )
        numbers = (numbers + [0] * 4)[:channels]
    return numbers


def _numbers(value: ScalarLike) -> list[int | float]:
    flat: list[Any]
    if isinstance(value, (bool, int, float)):
        flat = [value]
    elif isinstance(value, (np.ndarray, np.generic, Tensor)):
        flat = value.reshape(-1).tolist()
    else:
        try:
            flat = [each.item() if isinstance(each, (np.generic, Tensor)) else each for each in value]
        except TypeError:
            flat = [value]
    if not all(isinstance(each, (bool, int, float)) for each in flat):
        raise TypeError(f"expected a number or a tuple of numbers, got {value!r}")
    if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in flat):
        raise ValueError(f"a number of more than {_MOST_BITS} bits is too large for a Mat")
    return list(flat)


def _stored(number: int | float, depth: Depth) -> int | float | bool:
    if depth.dtype == torch.bool:
        return number != 0
    if depth.limits is None:
        return float(number)
    low, high = depth.limits
    if isinstance(number, float):
        if math.isnan(number):
            return low
        if math.isinf(number):
            return high if number > 0 else low
        number = round(number)  # half to even
    return min(max(number, low), high)
