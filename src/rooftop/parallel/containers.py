"""What goes into a module and comes out of it: values in tuples, named tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


def opened(part: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The values in a container, and what makes one of its kind of as many others. None: it is no container."""
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return list(part), type(part)._make  # type: ignore[attr-defined]
    if type(part) is tuple or isinstance(part, list):
        return list(part), type(part)
    if isinstance(part, dict):
        keys = list(part)

        def same_keys(values: list[Any]) -> Any:
            made = copy.copy(part)  # of its own kind, in its own order
            for key, value in zip(keys, values, strict=True):
                made[key] = value
            return made

        return list(part.values()), same_keys
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part) if field.init]

        def same_fields(values: list[Any]) -> Any:
            return dataclasses.replace(part, **dict(zip(names, values, strict=True)))

        return [getattr(part, name) for name in names], same_fields
    return None


def mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` of each value that is no container."""
    found = opened(structure)
    if found is None:
        return function(structure)
    values, made = found
    return made([mapped(value, function) for value in values])


def leaves(structure: Any) -> Iterator[Any]:
    """The values that are no containers, in order."""
    found = opened(structure)
    if found is None:
        yield structure
        return
    for value in found[0]:
        yield from leaves(value)
