"""Operators of the `rooftop::` namespace of `torch.library`.

`torch.library.custom_op` does the same with more checks at every call (of aliasing, mutation, versions), which cost the
host more time than launching the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("rooftop", "FRAGMENT")


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as `torch.ops.rooftop.<name>` for all devices; gives the operator in its place.

    The schema follows from the annotations. The function changes none of its arguments, and its results share memory
    neither with them nor with each other. A fake implementation, autograd and a cost are registered beside it.
    """

    def register(function: Callable[..., Any]) -> Any:
        _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.rooftop, name).default

    return register
