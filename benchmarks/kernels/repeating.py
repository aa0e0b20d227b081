"""Call a function as often as a training does before its backward is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rooftop.launch.repeated_calls import LESSON_AT


def after_repeats(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Call a function several times with the same inputs, and return the last outputs. Rooftop observes the third of
    these calls, so the last call and its backward run in C++, as in a training after its first steps.
    """
    for _ in range(LESSON_AT):
        function(*inputs)
    return function(*inputs)
