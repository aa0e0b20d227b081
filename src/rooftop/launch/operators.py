"""Operators of the `rooftop::` namespace of `torch.library`.

`torch.library.custom_op` does the same with more checks at every call (of aliasing, mutation, versions), which cost the
host more time than launching the kernel. So does the dispatcher where an operator is written in Python: a call that
nothing watches or transforms goes past it, straight to the implementation, under an autograd function of its own.
Whatever has to see the operator does: torch.compile, modes (FakeTensor, counting), transforms, the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("rooftop", "FRAGMENT")


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as `torch.ops.rooftop.<name>` for all devices; gives the operator in its place.

    The schema follows from the annotations. The function changes none of its arguments but those named in `mutates`,
    and its results share memory neither with them nor with each other. A fake implementation, autograd
    (`differentiable`) and a cost are registered beside it.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.rooftop, name).default
        if mutates:
            return overload
        _functions[name] = function

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling() or not _is_plain(arguments):
                return overload(*arguments)
            if not torch.is_grad_enabled() or not any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
                return function(*arguments)
            recorded = _recorded.get(name)
            return overload(*arguments) if recorded is None else recorded(*arguments)

        return call

    return register


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None] | None = None
) -> None:
    """Gives the operator of that name its derivative, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(f"rooftop::{name}", backward, setup_context=setup_context)
    function = _functions[name]

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = function(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recording: Any = type(f"GeneratedBackwardFor_rooftop_{name}_default", (torch.autograd.Function,), methods)
    # What Function.apply does before it calls this only concerns transforms, and those go through the dispatcher.
    _recorded[name] = super(torch.autograd.Function, recording).apply


_functions: dict[str, Callable[..., Any]] = {}  # what computes an operator, by name
_recorded: dict[str, Callable[..., Any]] = {}  # the same, for autograd to differentiate
_UNWATCHED = torch._C._dispatch_tls_local_include_set()  # of a thread without modes, transforms or inference mode
_PLAIN = (Tensor, torch.nn.Parameter)


def _is_plain(arguments: Sequence[Any]) -> bool:
    """Whether nothing but autograd has to know of a call."""
    if (
        torch._C._dispatch_tls_local_include_set() != _UNWATCHED
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    for argument in arguments:
        if isinstance(argument, Tensor):
            if type(argument) not in _PLAIN or argument.is_meta or argument.is_neg():
                return False
        elif isinstance(argument, list | tuple) and any(isinstance(each, Tensor) for each in argument):
            return False
    return True


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
