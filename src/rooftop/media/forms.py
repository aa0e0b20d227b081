"""The requested form of a reader's frames: layout, dtype, size and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from operator import index as as_integer
from typing import Any

import torch

from rooftop.errors import InputError

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
OUTPUTS = ("rgb", "nv12")

Normalization = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Form:
    """The form of frames, checked by `form_of`.

    Attributes:
        output: "rgb": (3, H, W), upright; or "nv12": (3 H / 2, W), rows of luma, then rows of chroma pairs, unrotated.
        dtype: dtype of the tensor.
        resize: (height, width) upright, or None for the size of the video.
        mean, std: mean and standard deviation of red, green and blue in 0..1, for (value - mean) / std; or None.
    """

    output: str
    dtype: torch.dtype
    resize: tuple[int, int] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def white(self) -> float:
        """The value of white in each colour before normalization: 1 for a floating-point dtype, otherwise 255."""
        return 1.0 if self.dtype.is_floating_point else 255.0

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """The shape of the tensor for a frame that has this size after its rotation."""
        return (height * 3 // 2, width) if self.output == "nv12" else (3, height, width)


def form_of(output: str, dtype: torch.dtype, resize: Any, normalize: Any) -> Form:
    """Check the requested form of frames.

    Raises:
        InputError: a value is invalid, or values contradict each other.
    """
    if output not in OUTPUTS:
        raise InputError(f'output {output!r} is not known: expected "rgb" or "nv12"')
    if dtype not in DTYPES:
        raise InputError(f"frames cannot be {dtype}: expected one of {', '.join(map(str, DTYPES))}")
    if output == "nv12" and (resize is not None or normalize is not None or dtype != torch.uint8):
        raise InputError('output="nv12" returns uint8 values as decoded: leave out resize, normalize and dtype')
    if normalize is not None and not dtype.is_floating_point:
        raise InputError(f"normalize needs a floating dtype, got {dtype}: pass dtype=torch.float32 or torch.float16")
    mean, std = _normalization(normalize)
    return Form(output, dtype, _size(resize), mean, std)


def _normalization(given: Any) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if given is None:
        return None, None
    try:
        mean, std = (tuple(float(each) for each in part) for part in given)
    except (TypeError, ValueError):
        mean = std = ()
    if len(mean) != 3 or len(std) != 3 or not all(map(isfinite, mean + std)) or min(std) <= 0:
        raise InputError(
            f"normalize={given!r}: expected (mean, std) of pixels scaled to 0..1, three numbers each for red, green "
            "and blue, std above 0"
        )
    return mean, std


def _size(resize: Any) -> tuple[int, int] | None:
    if resize is None:
        return None
    try:
        height, width = (as_integer(each) for each in resize)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise InputError(f"resize={resize!r}: expected (height, width) in pixels, both 1 or more")
    return height, width
