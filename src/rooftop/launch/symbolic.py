"""Make `torch.fx` record a call as one node.

`torch.fx.symbolic_trace` runs a model with proxies, which have neither shapes nor dtypes. So a function that reads
shapes or dtypes cannot be traced. If `recorded_whole` decorates a function, or `module_recorded_whole` a module's
forward, a call becomes one node, like a call of PyTorch's own functions. When the traced program runs, it calls the
function with tensors, and the function checks these tensors. Modules whose forward cannot be traced raise an error
(`refuse_proxies`).
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
    """Decorate a function, so that a call with a proxy becomes one node of the proxy's graph.

    The function must be a module's global under its own name, because the code of a traced program imports it.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        proxy = _given(arguments, options)
        if proxy is None:
            return function(*arguments, **options)
        target = getattr(call, "outermost", call)  # the function under this name in its module
        return cast(Result, proxy.tracer.create_proxy("call_function", target, arguments, options))

    return call


def module_recorded_whole(forward: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a module's `forward` so that torch.fx records a call of it as one node, without tracing into it. Raises
    an error if torch.fx traces this module itself instead of a model that contains it.
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
    """Raise an error, which names an alternative, if torch.fx traces a module whose forward cannot be traced.

    Raises:
        NotImplementedError: an argument is a proxy.
    """
    if proxy_in(arguments) is not None:
        raise _refusal(module)


def _refusal(module: object) -> NotImplementedError:
    name = type(module).__name__
    return NotImplementedError(
        f"{name}: torch.fx cannot trace its forward, because it branches on sizes and values: use "
        f"torch.export.export, or a torch.fx.Tracer whose is_leaf_module is True for {name} in a model"
    )


def _given(arguments: tuple[Any, ...], options: dict[str, Any]) -> fx.Proxy | None:
    """The first proxy among the arguments of a call; None if there is none."""
    if has_torch_function(arguments) or (options and has_torch_function((*options.values(),))):  # runs in C, in 0.1 us
        return proxy_in((*arguments, *options.values()))
    return None


def proxy_in(values: Iterable[Any]) -> fx.Proxy | None:
    """The first proxy among the values; None if there is none."""
    return next((each for each in values if isinstance(each, fx.Proxy)), None)
