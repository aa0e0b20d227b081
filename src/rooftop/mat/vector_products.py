"""Dot and cross products, on the device of the operands.

Source of names and meanings: `cv::Mat::dot`, `cv::Mat::cross` of OpenCV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.mat.conversions import row_blocks
from rooftop.mat.expressions import FLOATING
from rooftop.mat.type_codes import typeToString
from rooftop.mat.views import Header


def dot(x: Header, y: Header) -> float:
    """The dot product: the sum over all elements and channels of the numbers' products, in float64.

    Raises:
        TypeError: the types differ.
        ValueError: the sizes differ.
    """
    _check_alike("a dot product", x, y)
    found = 0.0
    for one, other in row_blocks(x._tensor(), y._tensor()):
        found += float(torch.dot(one.double().flatten(), other.double().flatten()))
    return found


def cross(x: Header, y: Header) -> Tensor:
    """The cross product (3,) of two floating-point vectors: (3, 1), (1, 3), or one element of three channels.

    Raises:
        TypeError: the types differ, or are integers.
        ValueError: the sizes differ, or a vector does not have three numbers.
    """
    _check_alike("a cross product", x, y)
    if x.depth() not in FLOATING:
        raise TypeError(
            f"a cross product needs floating-point numbers, got {typeToString(x.type())}: convertTo(CV_32F)"
        )
    if x.total() * x.channels() != 3:
        raise ValueError(f"a cross product needs vectors of three numbers, got {x}")
    return torch.linalg.cross(in_float32(x._tensor().flatten()), in_float32(y._tensor().flatten()))


def _check_alike(what: str, x: Header, y: Header) -> None:
    if x.type() != y.type():
        raise TypeError(
            f"{what} takes two vectors of the same type, got {typeToString(x.type())} and {typeToString(y.type())}"
        )
    if x.size != y.size:
        raise ValueError(f"{what} takes two vectors of the same size, got {x} and {y}")


def in_float32(x: Tensor) -> Tensor:
    """Convert 16-bit floating numbers to float32; leave other numbers unchanged."""
    return x.float() if x.element_size() == 2 else x
