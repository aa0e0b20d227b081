"""Remove fake tensors that a predicted program has stored: they have no values, so the program cannot use them later.

Programs store results for later: masks in a `functools.lru_cache`, tables in a global or in an attribute of a class.
Rooftop restores the earlier contents of every cache, global and class attribute that it can reach. If a fake tensor is
still stored elsewhere, an error names its location.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rooftop.analysis.held_objects import (
    Container,
    Held,
    attributes_of,
    code_names,
    global_of,
    globals_by_name,
    mapping_of,
)
from rooftop.errors import InputError

_CACHE = type(functools.lru_cache(lambda: None))
_LIBRARIES = {"torch", "builtins", *sys.stdlib_module_names}
"""Packages whose classes and modules the search does not enter."""
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_MADE_BY_CODE = 1 << 9
"""Flag of classes that are created at run time (Py_TPFLAGS_HEAPTYPE)."""
MOST_STEPS = 30
"""Largest number of levels of referrers that the search for the owner of a fake tensor follows."""


@contextmanager
def fakes_taken_out(roots: Iterable[Any], mode: FakeTensorMode) -> Iterator[list[Any]]:
    """After the block, restore every container that is reachable from the roots and holds fake tensors of the mode.

    Other changes stay, because a library that has initialized itself must not be initialized again. The context
    yields a list. After the block, the list holds the owner of each restored container: the object (class, cache,
    dictionary, tensor) whose items or attributes were restored.
    """
    containers = _Reached(roots).containers
    owners: list[Any] = []
    try:
        yield owners
    finally:
        for container in containers:
            if container.is_changed() and _holds_fakes(container.now(), mode):
                container.put_back()
                owners.append(container.owner)


def _holds_fakes(values: list[Any], mode: FakeTensorMode) -> bool:
    tensors = Held(values, everything=True, training=True).tensors
    return any(isinstance(tensor, FakeTensor) and tensor.fake_mode is mode for tensor in tensors)


class _Reached(Held):
    """A search that also follows classes and their methods, caches of functions, and attributes of tensors.

    The search skips installed packages that do not use PyTorch: they have much code but no tensors.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._classes = set[type]()
        self._foreign = _packages_without_torch()
        super().__init__(roots, everything=True, training=True, installed=True)

    def _enters(self, value: Any) -> bool:
        if isinstance(value, (type, types.FunctionType, _CACHE)):
            package = str(getattr(value, "__module__", None)).partition(".")[0]
            if package in _LIBRARIES or package in self._foreign:
                return False
        return bool(value.__flags__ & _MADE_BY_CODE) if isinstance(value, type) else super()._enters(value)

    def _parts(self, value: Any) -> Iterator[Container]:
        if isinstance(value, type):
            yield from _of_class(value)
            return
        kind = type(value)
        if kind not in self._classes:
            self._classes.add(kind)
            yield Container(value, lambda: [kind])
        if isinstance(value, Tensor):
            attributes = None if isinstance(value, FakeTensor) else attributes_of(value)
            if attributes is not None:
                yield mapping_of(attributes, value)
            return
        if isinstance(value, _CACHE):
            yield from _of_cache(value)
        if isinstance(value, types.FunctionType):
            yield from _of_named_modules(value)
        yield from super()._parts(value)


def _packages_without_torch() -> set[str]:
    """Installed packages that are loaded, and in which no module has PyTorch among its globals."""
    used = {id(each) for each in (torch, nn, nn.functional, Tensor, nn.Module)}
    found: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if not found.get(package) and isinstance(module, types.ModuleType):
            is_own = not str(getattr(module, "__file__", None)).startswith(_INSTALLED)
            found[package] = is_own or not used.isdisjoint(map(id, list(vars(module).values())))
    return {package for package, is_entered in found.items() if not is_entered}


def _is_programs(kind: type) -> bool:
    """Whether a class is written in Python, and belongs neither to PyTorch nor to the standard library."""
    return bool(kind.__flags__ & _MADE_BY_CODE) and _is_outside_libraries(kind.__module__)


def _is_outside_libraries(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _LIBRARIES


def _of_class(kind: type) -> Iterator[Container]:
    """The attributes of a class, the functions of its methods and properties, and its base classes."""

    def read() -> list[Any]:
        return [part for entry in vars(kind).items() if not entry[0].startswith("__") for part in entry]

    def write(items: list[Any]) -> None:
        before = dict(zip(items[::2], items[1::2], strict=True))
        now = read()
        for name in now[::2]:
            if name not in before:
                type.__delattr__(kind, name)
        for name, value in before.items():
            if vars(kind).get(name) is not value:
                type.__setattr__(kind, name, value)

    yield Container(kind, read, write)
    functions: list[Any] = [*kind.__bases__]
    for value in vars(kind).values():
        if isinstance(value, (staticmethod, classmethod)):
            functions.append(value.__func__)
        elif isinstance(value, property):
            functions += [each for each in (value.fget, value.fset, value.fdel) if each is not None]
        elif isinstance(value, types.FunctionType):  # also dunder methods, such as __call__
            functions.append(value)
    yield Container(kind, lambda: functions)


def _of_named_modules(function: types.FunctionType) -> Iterator[Container]:
    """The globals of other modules that a function may read as attributes of these modules, such as `tables.MASKS`."""
    for _, module in globals_by_name(function):
        if isinstance(module, types.ModuleType) and _is_outside_libraries(module.__name__):
            names = vars(module)
            for name in sorted(code_names(function.__code__) & names.keys()):
                yield global_of(names, name)


def _of_cache(function: Any) -> Iterator[Container]:
    """The stored results of an `lru_cache`. To restore a bounded cache, the keys added since this call are deleted.
    Their results stay in memory, but later calls do not find them and compute them again."""
    parts = gc.get_referents(function)
    places = [place for place, part in enumerate(parts) if part is getattr(function, "__wrapped__", None)]
    kept = parts[places[-1] - 1] if places and places[-1] else None
    if not isinstance(kept, dict):
        return
    cache = kept
    if function.cache_info().maxsize is None:
        yield mapping_of(cache, function)
        return
    before = set(cache)

    def write(items: list[Any]) -> None:
        for key in cache.keys() - before:
            del cache[key]

    yield Container(function, lambda: gc.get_referents(function), write)


def require_no_fakes(mode: FakeTensorMode, name: str, emptied: list[Any]) -> None:
    """Check that no fake tensor of a mode is stored anywhere after the mode has ended.

    Args:
        name: name of the predicted program, for the error.
        emptied: the list from `fakes_taken_out`. Caches in it may still refer to fake tensors, but can no longer return
            them.

    Raises:
        InputError: the program stores a fake tensor. The message says where the tensor is stored.
    """
    for generation in (1, 2):  # most remaining fake tensors are young garbage that is not yet collected
        if not _fakes_of(mode):
            return
        gc.collect(generation)
    place = _where_kept(_fakes_of(mode), emptied)
    if place is not None:
        raise InputError(
            f"the prediction of {name} is complete, but left fake tensors in {place}. Fake tensors have no values and "
            f"cannot be used later: clear {place} before you run the program, or predict in a separate process"
        )


def _fakes_of(mode: FakeTensorMode) -> list[FakeTensor]:
    return [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode]


def _where_kept(fakes: list[FakeTensor], emptied: list[Any]) -> str | None:
    """The name of the first global, class attribute or cache of the program that stores one of these tensors.

    If there is none, "an object of" and the name of the class of an object that refers to one of the tensors.

    The result is None if only PyTorch, variables of running functions or emptied caches refer to these tensors.
    """
    frontier: list[Any] = [*fakes]
    seen = {id(each) for each in (*fakes, fakes, frontier, emptied, *emptied)}
    by_class, leads_to_emptied = None, False
    empty = set(map(id, emptied))
    for _ in range(MOST_STEPS):
        referrers = gc.get_referrers(*frontier)
        leads_to_emptied |= not empty.isdisjoint(map(id, referrers))
        reached = [each for each in referrers if id(each) not in seen]
        frontier = []
        seen |= {id(referrers), id(reached), id(frontier)}
        for each in reached:
            place = _name_of(each, seen)
            if place is not None:
                return place
            if not _is_end(each):
                frontier.append(each)
                if _is_programs(type(each)):
                    by_class = f"an object of {_full_name(type(each))}"
        seen |= {id(each) for each in frontier}
        if not frontier:
            break
    # `gc.get_referrers` does not find objects that `gc.freeze` has frozen, so the search may have missed that an
    # emptied cache holds the tensors. So if there are frozen objects, no class is reported.
    return None if leads_to_emptied or gc.get_freeze_count() else by_class


def _name_of(holder: Any, held: set[int]) -> str | None:
    """The name under which a class, a cache or a module's globals store a `held` object; None for other holders."""
    if isinstance(holder, _CACHE):
        return f"the cache of {_full_name(holder)}"
    if isinstance(holder, type):
        names, prefix, is_programs = dict(vars(holder)), _full_name(holder), _is_programs(holder)
    elif _is_of_module(holder):
        names, prefix = holder, holder["__name__"]
        is_programs = _is_outside_libraries(prefix)
    else:
        return None
    return next((f"{prefix}.{name}" for name, value in names.items() if is_programs and id(value) in held), None)


def _is_end(holder: Any) -> bool:
    """Whether the search for referrers stops at this object: at a class, a module, a module's globals or a frame. An
    object that refers to one of these is irrelevant, because it does not itself store the tensors."""
    return isinstance(holder, (type, types.ModuleType, types.FrameType)) or _is_of_module(holder)


def _is_of_module(holder: Any) -> bool:
    if type(holder) is not dict or not isinstance(holder.get("__name__"), str):
        return holder is sys.modules
    module = sys.modules.get(holder["__name__"])
    return isinstance(module, types.ModuleType) and vars(module) is holder


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
