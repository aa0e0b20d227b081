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
    """Apply `function` to each tensor of a structure; a tensor that occurs twice is mapped once.

    Args:
        of_type: the type that `function` takes, if not tensors.
        strict: refuse objects that may hide tensors; else such objects stay unchanged.

    Raises:
        TypeError: an object may hide tensors, and `strict` is set.
    """
    done: dict[int, Tensor] = {}

    def of(part: Any) -> Any:
        if isinstance(part, of_type):
            if id(part) not in done:
                done[id(part)] = function(part)
            return done[id(part)]
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(of, part))
        if type(part) in (tuple, list):
            return type(part)(map(of, part))
        if isinstance(part, dict):
            same = copy.copy(part)  # keeps the type and the order of the original
            for key, value in part.items():
                same[key] = of(value)
            return same
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            values = {field.name: of(getattr(part, field.name)) for field in dataclasses.fields(part) if field.init}
            return dataclasses.replace(part, **values)
        if strict and type(part) not in CONSTANTS:
            raise TypeError(_unknown(part))
        return part

    return of(structure)


def signature(structure: Any, kind: Callable[[Tensor], Hashable]) -> tuple[Hashable, list[Tensor]]:
    """The signature of a call, equal for calls that do the same work, and its distinct tensors in order.

    Tensors enter by their `kind` (such as shape and dtype) and by which of them are identical; numbers and strings by
    value.

    Raises:
        TypeError: an object that may hide tensors, or may change between calls.
    """
    tensors: list[Tensor] = []
    place: dict[int, int] = {}

    def of(part: Any) -> Hashable:
        if isinstance(part, Tensor):
            if id(part) not in place:
                place[id(part)] = len(tensors)
                tensors.append(part)
            return Tensor, place[id(part)], kind(part)
        if isinstance(part, tuple | list) and (type(part) in (tuple, list) or hasattr(part, "_fields")):
            return type(part), *map(of, part)
        if isinstance(part, dict):
            return type(part), *((key, of(value)) for key, value in part.items())
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return type(part), *(of(getattr(part, field.name)) for field in dataclasses.fields(part))
        if type(part) not in CONSTANTS:
            raise TypeError(_unknown(part))
        return type(part), repr(part)  # 1 is not True, 0.0 not -0.0, nan is nan

    return of(structure), tensors


def _unknown(part: Any) -> str:
    kind = type(part)
    return (
        "inputs and outputs must be tensors, numbers, strings and None, in tuples, lists, dicts and dataclasses; got a "
        f"{kind.__module__}.{kind.__qualname__}: pass its tensors (an Engine takes it with graphs=False)"
    )
