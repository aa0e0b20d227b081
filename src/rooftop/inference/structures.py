"""What goes into a model and comes out of it: tensors in tuples, named tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def mapped(structure: Any, function: Callable[[Any], Tensor], strict: bool = False, of_type: type = Tensor) -> Any:
    """The same structure with `function` of each tensor; a tensor that is there twice is asked for once.

    Args:
        of_type: what `function` takes, if not tensors.
        strict: refuse objects in which tensors could be hidden; else they stay as they are.

    Raises:
        TypeError: such an object.
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
            same = copy.copy(part)  # of its own kind, in its own order
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
    """What two calls must have in common to be one and the same work, and the different tensors of this one, in order.

    Tensors count by `kind` (shape and dtype, say) and by which of them are the same tensor; numbers, strings and the
    like by value.

    Raises:
        TypeError: an object in which tensors could be hidden, or that could change between calls.
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
        f"a call that becomes a CUDA graph takes and gives tensors, numbers, strings and None, in tuples, lists, dicts "
        f"and dataclasses; got a {kind.__module__}.{kind.__qualname__}: pass its tensors, or build the engine with "
        "graphs=False"
    )
