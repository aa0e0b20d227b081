"""Inputs and outputs of models: tensors in tuples, named tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def mapped(structure: Any, function: Callable[[Any], Tensor], strict: bool = False, of_type: type = Tensor) -> Any:
    """Apply `function` to each tensor of a structure. A tensor that occurs twice is mapped once.

    Args:
        of_type: the type of the objects to map.
        strict: True: refuse objects that may hide tensors. False: leave such objects unchanged.

    Raises:
        TypeError: an object may hide tensors, and `strict` is set.
    """
    return _mapped(structure, function, strict, of_type, {})


def _mapped(part: Any, function: Callable[[Any], Tensor], strict: bool, of_type: type, done: dict[int, Tensor]) -> Any:
    """The recursive part of `mapped`. It is no closure, because a closure that calls itself would keep tensors alive
    until the next garbage collection.
    """
    if isinstance(part, of_type):
        if id(part) not in done:
            done[id(part)] = function(part)
        return done[id(part)]
    rest = function, strict, of_type, done
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_mapped(each, *rest) for each in part))
    if type(part) in (tuple, list):
        return type(part)(_mapped(each, *rest) for each in part)
    if isinstance(part, dict):
        same = copy.copy(part)  # a copy has the original's type and order
        for key, value in part.items():
            same[key] = _mapped(value, *rest)
        return same
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = dataclasses.fields(part)
        values = {field.name: _mapped(getattr(part, field.name), *rest) for field in fields if field.init}
        try:
            return dataclasses.replace(part, **values)
        except (TypeError, ValueError):  # it has its own `__init__`, or an InitVar, whose value was not kept
            other = copy.copy(part)
            for name, value in values.items():
                object.__setattr__(other, name, value)
            return other
    if strict and type(part) not in CONSTANTS:
        raise TypeError(_unknown(part))
    return part


def signature(structure: Any, kind: Callable[[Tensor], Hashable]) -> tuple[Hashable, list[Tensor]]:
    """(signature, distinct tensors in order of first appearance) of a call. Calls with equal signatures do the same
    work.

    The signature contains the `kind` of each tensor (such as shape and dtype), and the values of numbers and strings.
    It also shows which arguments are the same tensor object.

    Raises:
        TypeError: an object may hide tensors, or may change between calls.
    """
    tensors: list[Tensor] = []
    return _signature(structure, kind, tensors, {}), tensors


def _signature(part: Any, kind: Callable[[Tensor], Hashable], tensors: list[Tensor], place: dict[int, int]) -> Hashable:
    if isinstance(part, Tensor):
        if id(part) not in place:
            place[id(part)] = len(tensors)
            tensors.append(part)
        return Tensor, place[id(part)], kind(part)
    rest = kind, tensors, place
    if isinstance(part, tuple | list) and (type(part) in (tuple, list) or hasattr(part, "_fields")):
        return type(part), *(_signature(each, *rest) for each in part)
    if isinstance(part, dict):
        return type(part), *((key, _signature(value, *rest)) for key, value in part.items())
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return type(part), *(_signature(getattr(part, field.name), *rest) for field in dataclasses.fields(part))
    if type(part) not in CONSTANTS:
        raise TypeError(_unknown(part))
    return type(part), repr(part)  # so 1 differs from True and 0.0 from -0.0, and nan equals nan


def _unknown(part: Any) -> str:
    kind = type(part)
    return (
        "inputs and outputs must be tensors, numbers, strings and None, in tuples, lists, dicts and dataclasses; got a "
        f"{kind.__module__}.{kind.__qualname__}: pass its tensors (an Engine accepts it with graphs=False)"
    )
