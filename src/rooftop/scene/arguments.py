"""Check numbers that users pass. Errors say what was given and what was expected."""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_SIDE = 16384  # pixels
# least and greatest accepted length, such as the height of a camera's view; float32 can represent both, and their
# products with lengths from 1e-8 to 1e8
LEAST, MOST = 1e-30, 1e30

MOST_SHOWN = 200  # an error message shows at most this many characters of a value

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80
_shortened.maxlist = _shortened.maxtuple = 6


def short(value: object) -> str:
    """Describe a value in an error message: an array or tensor by its shape, and a long text by its beginning and its
    end."""
    if isinstance(value, np.ndarray) or type(value).__module__ == "torch":
        return f"{type(value).__name__} of shape {tuple(value.shape)}" if getattr(value, "ndim", 0) else repr(value)  # type: ignore[attr-defined]
    text = _shortened.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]}...{text[-MOST_SHOWN // 2 :]}"


def host_array(values: Any) -> NDArray[Any]:
    """Convert values to a NumPy array. A tensor is detached and copied to the host first; bfloat16, which NumPy lacks,
    becomes float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().resolve_conj().resolve_neg()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    return np.asarray(values)


def real_numbers(values: ArrayLike, name: str, expected: str) -> NDArray[np.float64]:
    """Copy values to a float64 array.

    Raises:
        ValueError: some values are complex, or are not numbers, such as strings. (NaN and infinity are allowed.) The
            message states `name` and what is `expected`.
    """
    try:
        array = host_array(values)
        if array.dtype.kind not in "uifbO":
            raise TypeError(f"{array.dtype}")
        return np.array(array, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={short(values)}: expected {expected}") from error


def whole_number(name: str, value: object, low: int, high: int, what: str = "an integer") -> int:
    """Check that a value is an integer from `low` to `high`, of Python or NumPy but not a bool, and return it.

    Args:
        what: words for such a value in the message.

    Raises:
        ValueError: `value` is not an integer, or is out of range; the message begins with `name`.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # raised for fractions and for arrays of several numbers
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}={short(value)}: expected {what} from {low} to {high}")
    return number


def whole_pixels(name: str, value: object) -> int:
    """Check and return a number of pixels, from 1 to MAX_SIDE."""
    return whole_number(name, value, 1, MAX_SIDE, "an integer number of pixels")


def number_in(name: str, value: object, low: float, high: float, what: str = "a number") -> float:
    """Check that a value is a number from `low` to `high`, but not a bool or a text, and return it as a float.

    Args:
        what: words for such a value in the message.

    Raises:
        ValueError: `value` is not a number, or is out of range; the message begins with `name`.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if isinstance(value, bool | np.bool_ | str | bytes) or not low <= number <= high:
        raise ValueError(f"{name}={short(value)}: expected {what} from {low:g} to {high:g}")
    return number
