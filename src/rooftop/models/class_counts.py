"""Check the number of classes that a network is built for."""

from __future__ import annotations

import operator


def check_classes(num_classes: object) -> None:
    """Raise an error if `num_classes` is not a number of classes.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    try:
        count = None if isinstance(num_classes, bool) else operator.index(num_classes)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None:
        raise TypeError(f"num_classes must be an int, got {num_classes!r}")
    if count < 1:
        raise ValueError(f"num_classes must be at least 1, got {count}")
