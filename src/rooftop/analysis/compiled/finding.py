"""Find out whether a program has compiled parts: a model, one of its modules, or a function that it calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from rooftop.analysis.held_objects import Held, named_globals
from rooftop.hardware.module_paths import inner_modules


def has_compiled_parts(target: Callable[..., Any]) -> bool:
    """Whether `torch.compile` compiled the target, an object that it refers to, or a function that its code names."""
    if isinstance(target, nn.Module):
        held: list[Any] = [target]
    else:
        held = [target, *(value for each in Held([target], everything=True).containers for value in each.items)]
    modules = {id(inner): inner for each in held if isinstance(each, nn.Module) for _, inner in inner_modules(each)}
    attributes = (value for module in modules.values() for value in vars(module).values())
    classes = {type(module) for module in modules.values()}
    return any(map(_is_compiled, chain(held, modules.values(), attributes, _of_classes(classes))))


def _is_compiled(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return "_orig_mod" in value._modules or value._compiled_call_impl is not None
    return isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value)


def _of_classes(classes: set[type]) -> Iterator[Any]:
    """The methods that these classes and their bases define, and the objects to which globals in these methods refer.
    PyTorch's classes are left out."""
    for kind in {base for each in classes for base in each.__mro__}:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                yield method
                yield from named_globals(method)
