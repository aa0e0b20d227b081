"""Convert numbers of one depth to another, with a scale and a shift, as `cv::Mat::convertTo` does.

    stored = saturate(round(alpha * x + beta))          rounded half to even; not rounded for a floating target depth

alpha, beta and x are float32, and `alpha * x + beta` is rounded to float64 and then to float32: the result differs from
that of a fused multiply-add in about one of 2^29 cases. For depths whose numbers float32 cannot represent, float64 is
used instead: for conversions into 64F, 64S and 64U, and for conversions from 32- or 64-bit integers or 64F into 32-bit
integers or 32F. Saturation: values beyond an integer depth's range become its nearest limit, and NaN becomes its least
value. Conversion to Bool is `x != 0`, so NaN is true.

OpenCV on x86 behaves differently, although its documentation of saturate_cast promises the rules above. On x86,
floating values of 2^31 and more become the *least* value (1e10 as CV_8U is 0), and values of CV_32U from 2^31 on wrap
when converted to CV_8S and CV_16S. In float64, OpenCV fuses product and sum if the processor can. Here, the product and
the sum are each rounded, on every device.

Most depths are converted by one loop on a CPU, and by one kernel on a GPU (`converting.py`). Other depths, and small
Mats on a CPU, are converted by a sequence of torch operations. On a CPU, these operations run on blocks of rows that
stay in the cache. On a GPU, they run on the whole Mat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.type_codes import (
    CV_16BF,
    CV_16F,
    CV_16U,
    CV_32F,
    CV_32S,
    CV_32U,
    CV_64F,
    CV_64S,
    CV_64U,
    DEPTHS,
    CV_Bool,
)

# Numbers of a block: a source and a target of 8-byte numbers fit together in an L2 cache of 2 MB. With smaller blocks,
# the additional calls take more time than the cache saves.
_BLOCK_ELEMENTS = 1 << 17
WITHOUT_PROGRAMS = (CV_64S, CV_64U, CV_16F, CV_16BF)
"""Depths that neither loops nor kernels convert."""
_WIDE = (CV_32S, CV_32U, CV_64S, CV_64U, CV_64F)
_TOP = 1 << 63
_MOST_SCALE = 2.0**128  # a larger scale moves every integer except 0 beyond the limits of all integer depths


def scales_wholes(depth: int, new_depth: int, alpha: float, beta: float) -> bool:
    """Whether a conversion is evaluated exactly, as an expression of integers.

    Both depths must be integer types, and at least one of them must have 64 bits. Scale and shift must be integers
    below 2**128 in magnitude. With a scale of 1 and a shift of 0, no expression is needed, and the result is False.
    """
    integers = DEPTHS[depth].limits is not None and DEPTHS[new_depth].limits is not None
    if not integers or not {depth, new_depth} & {CV_64S, CV_64U} or (alpha, beta) == (1, 0):
        return False
    return all(float(number).is_integer() and abs(number) < _MOST_SCALE for number in (alpha, beta))


def convert_blocks(source: Tensor, target: Tensor, depth: int, new_depth: int, scaling: Scaling | None) -> None:
    """Convert a tensor to another depth with torch operations, on blocks of rows. Both tensors have the same shape and
    device.

    Each tensor must have its depth's dtype. The tensors must not overlap, unless they are the same elements of the
    same depth.
    """
    for some, into in row_blocks(source, target):
        if scaling is None:
            _convert_plain(some, into, depth, new_depth)
        else:
            _store(scaling.of(some), into, new_depth)


def row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over corresponding rows of several tensors: block by block on the CPU, all rows at once on other
    devices."""
    rows = tensors[0].shape[0]
    per_row = max(tensor.numel() for tensor in tensors) // max(rows, 1)
    if not per_row:
        return
    count = max(_BLOCK_ELEMENTS // per_row, 1) if tensors[0].device.type == "cpu" else rows
    for first in range(0, rows, count):
        yield tuple(tensor[first : first + count] for tensor in tensors)


def _convert_plain(x: Tensor, into: Tensor, depth: int, new_depth: int) -> None:
    if depth == new_depth:
        into.copy_(x)
    elif new_depth == CV_Bool:
        torch.ne(x if DEPTHS[depth].limits is None else x.view(DEPTHS[depth].carrier), 0, out=into)
    elif DEPTHS[new_depth].limits is None:  # 16-bit floats are rounded from float32
        into.copy_(x.float() if into.dtype.itemsize == 2 else x)
    elif DEPTHS[depth].limits is None and depth != CV_Bool:
        _store(x if x.dtype.itemsize > 2 else x.float(), into, new_depth)
    elif depth == CV_Bool:
        into.copy_(x)
    else:
        _store_integers(x, into, depth, new_depth)


@dataclass(frozen=True)
class Scaling:
    """`alpha * x + beta`, in the precision that a pair of depths requires.

    Attributes:
        dtype: float32 (alpha and beta are then rounded to float32) or float64.
    """

    dtype: torch.dtype
    alpha: float
    beta: float

    def of(self, x: Tensor) -> Tensor:
        """Compute `alpha * x + beta` as a new tensor."""
        if self.dtype == torch.float64:
            return _unscaled(x, torch.float64).mul_(self.alpha).add_(self.beta)
        if self.beta == 0:
            return _unscaled(x, torch.float32).mul_(self.alpha)
        if self.alpha == 1:
            return _unscaled(x, torch.float32).add_(self.beta)
        # the product of two float32 numbers is exact in float64
        wide = _unscaled(x if x.dtype.itemsize <= 2 else x.float(), torch.float64)
        return wide.mul_(self.alpha).add_(self.beta).float()


def scaling_of(depth: int, new_depth: int, alpha: float, beta: float) -> Scaling:
    """The scaling for a conversion from one depth to another."""
    if new_depth in (CV_64F, CV_64S, CV_64U) or (depth in _WIDE and new_depth in (*_WIDE, CV_32F)):
        return Scaling(torch.float64, alpha, beta)
    with np.errstate(over="ignore"):
        return Scaling(torch.float32, float(np.float32(alpha)), float(np.float32(beta)))


def _unscaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clone() if x.dtype == dtype else x.to(dtype)


def _store(y: Tensor, into: Tensor, depth: int) -> None:
    """Write the float32 or float64 numbers `y` into a tensor of this depth. For an integer depth, round and saturate
    them.
    """
    limits = DEPTHS[depth].limits
    if depth == CV_Bool:
        torch.ne(y, 0, out=into)
    elif limits is None:
        into.copy_(y.float() if into.dtype.itemsize == 2 else y)
    elif into.dtype.itemsize == 8:
        store_64(y.double().round(), into, depth)
    else:
        # float64 represents the limits of 32-bit integers exactly; float32 represents those of 16-bit integers.
        rounded = (y.double() if into.dtype.itemsize == 4 else y).round()
        low, high = limits
        clamped = rounded.clamp_(low, high).nan_to_num_(nan=float(low))
        # Go through a signed dtype, because not every device converts directly to unsigned dtypes.
        into.copy_(clamped.long() if depth == CV_32U else clamped.int() if depth == CV_16U else clamped)


def store_64(rounded: Tensor, into: Tensor, depth: int) -> None:
    """Store rounded float64 values as 64-bit integers. float64 cannot represent 2^63 - 1 and 2^64 - 1, so values beyond
    the range of the depth are handled separately."""
    top, greatest = float(_TOP), float(_TOP - 1024)  # the greatest float64 below 2^63
    least = -top if depth == CV_64S else 0.0
    bits = rounded.clamp(least, greatest).nan_to_num_(nan=least).long()
    if depth == CV_64S:
        into.copy_(bits.masked_fill_(rounded >= top, _TOP - 1))
        return
    upper = (rounded - top).clamp_(0.0, greatest).nan_to_num_(nan=0.0).long() - _TOP  # for numbers from 2^63 on
    bits = torch.where(rounded >= top, upper, bits).masked_fill_(rounded >= 2 * top, -1)
    into.view(torch.int64).copy_(bits)


def _store_integers(x: Tensor, into: Tensor, depth: int, new_depth: int) -> None:
    limits, new_limits = DEPTHS[depth].limits, DEPTHS[new_depth].limits
    assert limits is not None
    assert new_limits is not None
    if depth == CV_64U:  # as int64: values of 2^63 or more become 2^63 - 1
        signed = x.view(torch.int64)
        x, limits = signed.masked_fill(signed < 0, _TOP - 1), (0, _TOP - 1)
    elif depth in (CV_16U, CV_32U):
        x = x.to(torch.int32 if depth == CV_16U else torch.int64)
    if new_depth == CV_64U:
        into.view(torch.int64).copy_(x.clamp_min(0) if limits[0] < 0 else x)
        return
    low, high = max(limits[0], new_limits[0]), min(limits[1], new_limits[1])
    into.copy_(x if (low, high) == limits else x.clamp(low, high))
