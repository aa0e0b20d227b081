"""Unpack containers (tuples, lists, mappings, dataclasses) in a module's inputs and outputs, and pack new values into
similar containers.

Extra attributes of a container (such as a dict subclass or a UserDict) count as values, too. Otherwise, a part of a
batch could keep the mask of the whole batch in an attribute.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that contain no other values."""

CODE = (type, ModuleType, FunctionType)
"""Types of objects that are never searched for tensors."""

BOUND = (MethodType, BuiltinMethodType, MethodWrapperType)
"""Types of functions that are bound to an object, such as methods."""

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Opened:
    """The values of a container, and a function that makes a similar container with other values.

    Attributes:
        names: the names of the values: indices or keys, then "attribute ..." for values in attributes.
        values: the values, in the order of the names.
        made: makes a container of the same kind from other values, in the same order and number (any number for lists
            and tuples). If the class does not allow this, `made` raises a TypeError that names a remedy.
    """

    names: list[Any]
    values: list[Any]
    made: Callable[[list[Any]], Any]


def opened(part: Any) -> Opened | None:
    """Open a container: return its values, and a function that makes a similar container from the same number of other
    values. Return None if the value is not a container.

    Containers are tuples, named tuples, operators' return types (torch.return_types), dataclasses, and lists, deques,
    UserLists, Mappings and UserDicts with their subclasses. Any other subclass of tuple, such as torch.Size, does not
    count as a container. Neither does a PackedSequence, because its rows are not samples.
    """
    if isinstance(part, (*PLAIN, Tensor, nn.Module, PackedSequence, type)):
        return None
    if isinstance(part, tuple):
        return _opened_tuple(part)
    if isinstance(part, UserDict | UserList):
        return _opened_attributes(part)
    if isinstance(part, list | deque):
        return _opened_list(part)
    if isinstance(part, dict):
        return _opened_dict(part)
    if isinstance(part, Mapping):
        return _opened_mapping(part)
    return _opened_dataclass(part) if dataclasses.is_dataclass(part) else None


def mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each value that is not a container, and return the results in the same structure."""
    found = opened(structure)
    if found is None:
        return function(structure)
    return found.made([mapped(value, function) for value in found.values])


def leaves(structure: Any) -> Iterator[Any]:
    """Yield the values that are not containers, in order."""
    found = opened(structure)
    if found is None:
        yield structure
        return
    for value in found.values:
        yield from leaves(value)


def holds_tensors(value: Any) -> bool:
    """Whether an object holds a tensor in its containers, sets, attributes or bound arguments.

    Modules, classes and functions are not searched.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no new object gets the id of one of them
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            return True
        if isinstance(part, (*PLAIN, *CODE, nn.Module)) or id(part) in seen:
            continue
        seen[id(part)] = part
        waiting.extend(_within(part))
    return False


def full_name(value: Any) -> str:
    """The qualified name of a value's class, for error messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _within(part: Any) -> list[Any]:
    """The objects that an object refers to directly: items and attribute values, a partial's function and arguments, or
    a bound method's object."""
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, BOUND):
        return [part.__self__]
    found = opened(part)
    if found is not None:
        return found.values
    items = list(part) if isinstance(part, tuple | Set | ValuesView) else []
    return [*items, *_attributes(part).values()]


def _attributes(part: Any) -> dict[str, Any]:
    """The attributes of an instance, first from its slots, then from its dict."""
    slots = [
        name
        for kind in type(part).__mro__
        for name in _slots_of(kind)
        if name not in ("__dict__", "__weakref__") and not name.startswith("__")
    ]
    found = {name: getattr(part, name, _ABSENT) for name in slots}
    own = getattr(part, "__dict__", None)
    return {name: value for name, value in found.items() if value is not _ABSENT} | (dict(own) if own else {})


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _opened_tuple(part: tuple[Any, ...]) -> Opened | None:
    values, kind = list(part), type(part)
    if kind is tuple:
        return Opened(list(range(len(values))), values, tuple)
    if hasattr(part, "_fields"):
        return Opened(list(part._fields), values, kind._make)  # type: ignore[attr-defined]
    if hasattr(part, "n_fields") and kind.__module__ == "torch.return_types":
        return Opened(list(range(len(values))), values, kind)
    return None  # torch.Size, and classes whose constructor is unknown


def _opened_list(part: list[Any] | deque[Any]) -> Opened:
    attributes = dict(getattr(part, "__dict__", {}))

    def made(values: list[Any]) -> Any:
        new = copy.copy(part)
        new.clear()
        new.extend(values[: len(values) - len(attributes)])
        if attributes:
            vars(new).update(zip(attributes, values[len(values) - len(attributes) :], strict=True))
        return new

    return Opened([*range(len(part)), *map(_named, attributes)], [*part, *attributes.values()], made)


def _opened_dict(part: dict[Any, Any]) -> Opened:
    """Open a dict. If a dict's items are also its attributes (as in ModelOutput, or by `self.__dict__ = self`), the new
    dict's items are also the new dict's attributes.
    """
    keys, own = list(part), dict(getattr(part, "__dict__", {}))
    twice = [name for name, value in own.items() if name in part and part[name] is value]
    attributes = {name: value for name, value in own.items() if name not in twice}

    def made(values: list[Any]) -> Any:
        new = copy.copy(part)  # keeps the class and the order of keys
        items = dict(zip(keys, values[: len(keys)], strict=True))
        for key, value in items.items():
            new[key] = value
        if own:
            vars(new).update({name: items[name] for name in twice})
            vars(new).update(zip(attributes, values[len(keys) :], strict=True))
        return new

    return Opened([*keys, *map(_named, attributes)], [*part.values(), *attributes.values()], made)


def _opened_attributes(part: UserDict[Any, Any] | UserList[Any]) -> Opened:
    """Open a UserDict or UserList: the values are its attributes, of which `data` holds the items."""
    attributes = dict(vars(part))

    def made(values: list[Any]) -> Any:
        new = copy.copy(part)
        vars(new).update(zip(attributes, values, strict=True))
        return new

    return Opened([*map(_named, attributes)], list(attributes.values()), made)


def _opened_mapping(part: Mapping[Any, Any]) -> Opened:
    """Open a mapping that is not a dict. A similar mapping is made by calling its class with a dict."""
    keys, kind = list(part), type(part)
    values = [part[key] for key in keys]

    def made(others: list[Any]) -> Any:
        if all(other is value for other, value in zip(others, values, strict=True)):
            return part
        try:
            twin, new = kind(dict(zip(keys, values, strict=True))), kind(dict(zip(keys, others, strict=True)))  # type: ignore[call-arg]
        except Exception as error:
            raise TypeError(f"a {full_name(part)} cannot be rebuilt with other values ({error}): use a dict") from error
        if not _has(new, keys, others):
            raise TypeError(f"a {full_name(part)} made of a dict has other items than the dict: use a dict")
        if _plain_attributes(twin) != _plain_attributes(part):
            raise TypeError(
                f"a {full_name(part)} has attributes besides its items, which a new one would lose: use a dict"
            )
        return new

    return Opened(keys, values, made)


def _has(mapping: Any, keys: list[Any], values: list[Any]) -> bool:
    return list(mapping) == keys and all(mapping[key] is value for key, value in zip(keys, values, strict=True))


def _plain_attributes(part: Any) -> dict[str, Any]:
    return {name: value for name, value in _attributes(part).items() if isinstance(value, (*PLAIN, torch.Size))}


def _opened_dataclass(part: Any) -> Opened:
    fields = {field.name: field.init for field in dataclasses.fields(part) if hasattr(part, field.name)}
    values = {name: getattr(part, name) for name in fields} | dict(getattr(part, "__dict__", {}))
    derives = hasattr(part, "__post_init__")
    if derives:  # __post_init__ recomputes values that depend on its fields, such as the number of samples
        values = {name: value for name, value in values.items() if fields.get(name) or holds_tensors(value)}

    def made(others: list[Any]) -> Any:
        given = dict(zip(values, others, strict=True))
        if derives:
            return _initialized(part, [name for name, init in fields.items() if init], given)
        new = copy.copy(part)
        _set(new, given)
        return new

    names = [name if name in fields else _named(name) for name in values]
    return Opened(names, list(values.values()), made)


def _initialized(part: Any, arguments: list[str], given: dict[str, Any]) -> Any:
    """Rebuild the dataclass `part`: call __init__ and __post_init__ with the values `given`. Copy the attributes that
    were set on `part` after its creation."""
    new = dataclasses.replace(part, **{name: given[name] for name in arguments})
    changed = [name for name in arguments if not _same(getattr(new, name), given[name])]
    if changed:
        raise TypeError(
            f"a {full_name(part)} cannot be rebuilt with other values: its __post_init__ would change "
            f"{', '.join(changed)} twice. Pass values that need no changes, or use a dict"
        )
    there = _attributes(new)
    later = {name: value for name, value in _attributes(part).items() if name not in there}
    of_tensors = {n: v for n, v in given.items() if n not in arguments and not holds_tensors(there.get(n))}
    _set(new, later | of_tensors)
    return new


def _set(instance: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes, even if the class is frozen."""
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)


def _same(one: Any, other: Any) -> bool:
    """Whether the values are the same objects or share memory. The function does not read tensors, which may be on a
    GPU."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (
            (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            and one.layout == other.layout == torch.strided
            and (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())
        )
    ours, theirs = opened(one), opened(other)
    if ours is None or theirs is None or type(one) is not type(other):
        return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))
    return ours.names == theirs.names and all(map(_same, ours.values, theirs.values))


def _named(attribute: str) -> str:
    return f"attribute {attribute}"
