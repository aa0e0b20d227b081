"""Operators of the `rooftop::` namespace of `torch.library`.

`torch.library.custom_op` does the same with more checks at every call (of aliasing, mutation, versions), which cost the
host more time than launching the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("rooftop", "FRAGMENT")


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as `torch.ops.rooftop.<name>` for all devices; gives the operator in its place.

    The schema follows from the annotations. The function changes none of its arguments but those named in `mutates`,
    and its results share memory neither with them nor with each other. A fake implementation, autograd and a cost are
    registered beside it.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.rooftop, name).default

    return register


def no_second_derivative(name: str, instead: str | None = None) -> Callable[..., Any]:
    """The backward of a backward operator that has none: without it a second derivative would be wrong in silence.

    Args:
        name: of the public function.
        instead: what has one, where that is not PyTorch's function of the same name.
    """
    other = instead or f"torch.nn.functional.{name}"

    def refuse(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            f"{name} has no second derivative: for one, use {other} in the part that is differentiated twice"
        )

    return refuse


def no_tangents(name: str, *tensors: Tensor | None, instead: str | None = None) -> None:
    """Refuse forward-mode differentiation, for which torch would give tangents of zero; `instead` as above.

    Raises:
        NotImplementedError: a tensor carries a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        other = instead or f"torch.nn.functional.{name}"
        raise NotImplementedError(f"{name} has no forward-mode derivative: use {other} under jvp")
