"""Calls that `torch.fx` records whole.

`torch.fx.symbolic_trace` runs a model with proxies, which have neither shapes nor dtypes. So a function that looks at
either cannot be traced into. PyTorch's own functions become one node each; so do functions with `recorded_whole`, and
within a model modules with `module_recorded_whole`. They are called when the traced program runs, with tensors, and
check their arguments then. What cannot be traced at all says so (`refuse_proxies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import fx
from torch.overrides import has_torch_function

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def recorded_whole(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, of which a call with a proxy is one node of the proxy's graph.

    The function is one of a module, under its own name: the code of a traced program imports it.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        proxy = _given(arguments, options)
        if proxy is None:
            return function(*arguments, **options)
        return cast(Result, proxy.tracer.create_proxy("call_function", call, arguments, options))

    return call


def module_recorded_whole(forward: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same method `forward`, of which a call with a proxy is one node: a call of the module, which stays as it is.

    Traced alone the module refuses: there is no model of which it would be a part.
    """

    @wraps(forward)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        proxy = _given(arguments, options)
        if proxy is None:
            return forward(*arguments, **options)
        module: Any = arguments[0]
        if module is getattr(proxy.tracer, "root", module):
            raise _refusal(module)
        path = proxy.tracer.path_of_module(module)  # type: ignore[attr-defined]
        return cast(Result, proxy.tracer.create_proxy("call_module", path, arguments[1:], options))

    return call


def refuse_proxies(module: object, *arguments: object) -> None:
    """Say what to do instead where torch.fx traces a forward that it cannot trace.

    Raises:
        NotImplementedError: a proxy among the arguments.
    """
    if proxy_in(arguments) is not None:
        raise _refusal(module)


def _refusal(module: object) -> NotImplementedError:
    name = type(module).__name__
    return NotImplementedError(
        f"{name}: torch.fx cannot trace its forward, in which sizes and values decide what is computed: use "
        f"torch.export.export, or a torch.fx.Tracer whose is_leaf_module is True for {name} in a model"
    )


def _given(arguments: tuple[Any, ...], options: dict[str, Any]) -> fx.Proxy | None:
    """The proxy of a call, if it has one."""
    if has_torch_function(arguments) or (options and has_torch_function((*options.values(),))):  # in C: 0.1 us
        return proxy_in((*arguments, *options.values()))
    return None


def proxy_in(values: Iterable[Any]) -> fx.Proxy | None:
    """The first proxy among them."""
    return next((each for each in values if isinstance(each, fx.Proxy)), None)
