"""Cache the results of methods that depend only on parameters and sizes, while the parameters do not change.

    class Attention(nn.Module):
        @constant
        def position_bias(self) -> Tensor: ...

A module cannot know whether its parameters will change, but the user of the module can. So a method with `@constant`
computes its result in each call, until `keep_constants(model)` declares the parameters constant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from rooftop.nn.hooks import has_hooks

MOST = 8  # largest number of cached results per module and method; `Engine` keeps as many CUDA graphs by default

Arguments = ParamSpec("Arguments")
Module = TypeVar("Module", bound=nn.Module)
Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])


class _Kept(dict[tuple[Hashable, ...], Any]):
    """Cached results of a module's methods. A key consists of a method's name and its arguments."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()  # without results, because the parameters of a copied or loaded model may be cast or moved


def constant(
    method: Callable[Concatenate[Module, Arguments], Result],
) -> Callable[Concatenate[Module, Arguments], Result]:
    """Mark a method whose result, a tensor or a tuple of tensors, depends only on parameters, buffers and arguments.

    The arguments may be numbers, dtypes, devices and parameters. Calls with keywords, other tensors or unhashable
    arguments are not cached. The result must not be changed in place. After `keep_constants`, each module caches
    the method's results for the first eight different sets of arguments, and computes the result in each call for all
    further sets. No cached result is ever dropped, since CUDA graphs may read it. The cache is not used in training
    mode, under autocast, or in `torch.compile`. A result that needs a gradient, or is computed within a capture, is not
    cached.
    """

    @wraps(method)
    def kept(self: Module, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return method(self, *arguments, **options)
        results: _Kept | None = self.__dict__.get("_constants")
        if results is None or self.training or torch._C._is_any_autocast_enabled() or not _lasting(arguments, options):
            return method(self, *arguments, **options)
        key = (method.__name__, *((type(each), each) for each in arguments))  # the type distinguishes 1 from 1.0
        if key in results:
            return results[key]  # type: ignore[no-any-return]
        result = method(self, *arguments, **options)
        others = sum(name == method.__name__ for name, *_ in results)
        if others < MOST and all(map(_can_be_kept, result if isinstance(result, tuple) else (result,))):
            results[key] = result
        return result

    kept.__dict__["is_constant"] = True
    return cast(Callable[Concatenate[Module, Arguments], Result], kept)


def keep_constants(model: nn.Module) -> tuple[str, ...]:
    """From now on, compute results of the methods with `@constant` only once. The model's parameters and buffers must
    not change any more.

    A module caches nothing if it or a submodule has hooks, because a cached result would not call the hooks. A copy of
    the model begins with an empty cache.

    Returns:
        The methods with cached results, each as "<name of the module>.<name of the method>".
    """
    found = []
    for name, module in model.named_modules():
        methods = [each for each in dir(type(module)) if hasattr(getattr(type(module), each, None), "is_constant")]
        if methods and not any(map(has_hooks, module.modules())):
            module.__dict__["_constants"] = _Kept()
            found += [f"{name}.{each}" if name else each for each in methods]
    return tuple(found)


def kept_bytes(model: nn.Module) -> int:
    """Number of bytes of all results that the modules of a model have cached."""
    results = [each for module in model.modules() for each in module.__dict__.get("_constants", {}).values()]
    flat = [t for each in results for t in (each if isinstance(each, tuple) else (each,))]
    return sum(t.numel() * t.element_size() for t in flat)


def _lasting(arguments: tuple[object, ...], options: dict[str, object]) -> bool:
    """Whether a method call can be cached by its arguments: it has no keywords, no tensors except parameters, and only
    hashable arguments."""
    kinds_fit = all(isinstance(each, nn.Parameter) or not isinstance(each, Tensor) for each in arguments)
    return not options and kinds_fit and all(isinstance(each, Hashable) for each in arguments)


def _can_be_kept(tensor: Tensor) -> bool:
    """Whether a method's result may be cached. This function waits until the result is computed, so that any stream can
    use it."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.requires_grad:
        return False
    if tensor.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream(tensor.device).synchronize()
    return True
