"""Checks of an operator's tensors before any launch, and their error messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.kernels.operands.dtypes import in_words
from rooftop.words import did_you_mean

NUMBERS: tuple[type[Any], ...] = (int, float, torch.SymInt, torch.SymFloat, np.integer, np.floating)


def check_tensors(
    name: str,
    dtypes: Sequence[torch.dtype] | None = None,
    optional: Sequence[str] = (),
    beside: tuple[str, Any] | None = None,
    /,
    **tensors: Any,
) -> None:
    """Check that arguments are tensors of layout `torch.strided` and of some dtypes, on one device.

    Args:
        name: name of the public function, for messages.
        dtypes: the allowed dtypes. None: any dtype, because the caller checks dtypes itself.
        optional: arguments that may be None.
        beside: (name, tensor): all tensors must be on this tensor's device. None: all tensors must be on the first
            tensor's device.
        tensors: the arguments by name.

    Raises:
        TypeError: an argument is not a tensor, its layout is not `torch.strided`, or its dtype is not allowed.
        ValueError: the tensors are on several devices.
    """
    for argument, tensor in tensors.items():
        if tensor is None and argument in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise not_dense(name, argument, tensor)
        if dtypes is not None:
            check_dtype(name, argument, tensor.dtype, dtypes)
        if beside is None:
            beside = (argument, tensor)
        elif tensor.device != beside[1].device:
            raise ValueError(
                f"{name}: {beside[0]} is on {beside[1].device}, {argument} on {tensor.device}: move both to one device"
            )


def not_dense(name: str, argument: str, tensor: Tensor) -> TypeError:
    """The error for a tensor whose layout is not strided."""
    return TypeError(f"{name}: {argument} must be dense, got layout {tensor.layout}: use .to_dense()")


def check_dtype(name: str, argument: str, given: torch.dtype, dtypes: Sequence[torch.dtype], hint: str = "") -> None:
    """Raise TypeError unless the dtype `given` is one of `dtypes`."""
    if given not in dtypes:
        raise TypeError(f"{name}: {argument} must be {in_words(dtypes)}, got {given}{hint}")


def check_shape(name: str, argument: str, tensor: Tensor | None, shape: tuple[int, ...], hint: str = "") -> None:
    """Raise ValueError if the tensor is not None and its shape differs from `shape`."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {argument} of shape {shape}, got {tuple(tensor.shape)}{hint}")


def check_same_dtype(name: str, first: str, tensor: Tensor, hint: str, **others: Tensor | None) -> None:
    """Raise TypeError if one of `others` does not have the dtype of `tensor`."""
    for argument, other in others.items():
        if other is not None and other.dtype != tensor.dtype:
            raise TypeError(f"{name}: {first} is {tensor.dtype}, {argument} {other.dtype}: {hint}")


def check_choice(name: str, argument: str, given: object, choices: Sequence[str], also: str = "") -> None:
    """Raise ValueError unless `given` is one of `choices`. In the message, `also` (such as "None or ") precedes the
    choices."""
    if given not in choices:
        raise ValueError(
            f"{name}: {argument} must be {also}one of {', '.join(choices)}, got {given!r}{did_you_mean(given, choices)}"
        )


def check_number(name: str, argument: str, value: Any, expected: str = "a number") -> None:
    """Raise TypeError if the value is not a number."""
    if not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: {argument} must be {expected}, got {type(value).__name__}")


def check_finite(name: str, argument: str, value: Any, expected: str = "a number") -> None:
    """Raise TypeError if the value is not a number, and ValueError if it is not finite."""
    check_number(name, argument, value, expected)
    if not abs(value) < math.inf:  # torch.compile does not support isfinite of a number that it treats as a variable
        raise ValueError(f"{name}: {argument} must be finite, got {value}")


def finite_number(name: str, argument: str, value: Any, expected: str = "a number") -> Any:
    """Check a number as `check_finite` does, and return it; a NumPy number becomes a Python number, which kernels
    accept.
    """
    check_finite(name, argument, value, expected)
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


def is_integer(value: object) -> bool:
    """Whether a value is an integer, which may be symbolic, and not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def two_integers(name: str, argument: str, given: Any, least: int) -> tuple[int, int]:
    """Return (vertical, horizontal), from one integer for both directions or from two integers.

    Raises:
        TypeError: the value is neither an integer nor a sequence of one or two integers.
        ValueError: a number is below `least`.
    """
    values = (given,) if isinstance(given, int) else tuple(given) if isinstance(given, tuple | list) else ()
    if len(values) == 1:
        values = (*values, *values)  # `values *= 2` cannot be compiled with PyTorch 2.11
    if len(values) != 2 or not all(map(is_integer, values)):
        raise TypeError(f"{name}: {argument} must be one integer or a pair of integers, got {given!r}")
    if min(values) < least:
        raise ValueError(f"{name}: {argument} must be at least {least}, got {given!r}")
    return values
