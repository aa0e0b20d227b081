"""Find every container, attribute, variable and tensor that values, functions and modules refer to, and restore earlier
contents of containers.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper, cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.source_lines import LIBRARIES

MOST_ENTRIES = 200_000  # largest number of entries that a search visits

_CLOSED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType),
    *(str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Generator),
    *(nn.Module, torch.UntypedStorage, torch.TypedStorage),
)
"""Classes of objects whose contents the search does not follow."""
_ALIVE = (
    *("asyncio", "concurrent", "io", "_io", "logging", "multiprocessing", "queue", "selectors", "socket", "subprocess"),
    *("threading", "torch.cuda", "torch.distributed", "torch.profiler", "torch.utils.data"),
)
"""Packages whose objects are not followed, because threads and processes use them."""
_TRAINING = ("torch.amp", "torch.optim")
"""Packages whose objects hold the state of training. The search follows these objects only if the block computes
nothing."""
_CODE = (types.FunctionType, types.MethodType, partial, _lru_cache_wrapper, staticmethod, classmethod, property, type)
_OF_ANY_MODULE = {*vars(nn.Module()), "_is_full_backward_hook"}
"""Attributes that every module has: its submodules, parameters, hooks and mode."""


class Held:
    """All containers and tensors that can be reached from some values through containers and attributes.

    Args:
        everything: follow functions (their closures and the globals that they name), classes, modules and hooks of
            tensors as well.
        of_modules: whether all attributes of modules are restored. If False, only parameters, submodules and, unless
            a module's class is PyTorch's, the attributes that not every `nn.Module` has are restored. Buffers and hooks
            are then followed, but not restored.
        training: follow optimizers, schedulers and gradient scalers as well.
        installed: follow globals that are functions or classes of installed packages as well.

    Attributes:
        containers: the containers with their initial contents, in the order of the search.
        tensors: the tensors, each only once.
        complete: False if there are more than `MOST_ENTRIES` entries. Entries beyond this limit are not visited.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        everything: bool = False,
        of_modules: bool = True,
        training: bool = False,
        installed: bool = False,
    ) -> None:
        self._everything, self._of_modules = everything, of_modules
        self._training, self._installed = training, installed
        self.containers: list[Container] = []
        self.tensors: list[Tensor] = []
        self.complete = True
        seen, left, entries = set[int](), deque(roots), 0
        while left and self.complete:
            value = _undecorated(left.popleft())
            if id(value) in seen or not self._enters(value):
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append(value)
                left.extend(hooks_of(value) if everything else ())
            elif everything and not isinstance(value, type):
                left.extend(base for base in type(value).__mro__ if not _is_of_libraries(base))
            for container in self._parts(value):
                self.containers.append(container)
                left.extend(container.items)
                entries += len(container.items)
            self.complete = entries <= MOST_ENTRIES

    def _enters(self, value: Any) -> bool:
        if self._everything and isinstance(value, (*_CODE, nn.Module)) and not _is_of_libraries(value):
            return True
        return not _is_closed(type(value), self._training)  # type: ignore[arg-type]

    def _parts(self, value: Any) -> Iterator[Container]:
        return iter(()) if isinstance(value, Tensor) else _containers_of(value, self._of_modules, self._installed)


@contextmanager
def left_as_they_were(targets: Iterable[Any], logs: bool = True) -> Iterator[None]:
    """At the end of the block, restore everything that the targets refer to: containers, attributes, optimizers,
    gradients and `requires_grad`. The values of tensors are not restored, so the block must not change them.

    Args:
        targets: values and functions.
        logs: restore containers that hold only numbers and text as well.
    """
    held = Held(targets, everything=True, training=True)
    gradients = [_Gradient(tensor) for tensor in held.tensors]
    try:
        yield
    finally:
        for container in held.containers:
            if container.is_changed() and (logs or not container.logs()):
                container.put_back()
        for gradient in gradients:
            gradient.put_back()


class _Gradient:
    """`grad` and `requires_grad` of a tensor at the time of construction. `put_back` restores them if the tensor was a
    leaf at that time and still is one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self._is_leaf = tensor.is_leaf
            self._before = (tensor.grad, tensor.requires_grad) if self._is_leaf else (None, False)

    def put_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if self._is_leaf and self._tensor.is_leaf:
                gradient, required = self._before
                if self._tensor.requires_grad != required:
                    self._tensor.requires_grad_(required)
                if self._tensor.grad is not gradient:
                    self._tensor.grad = gradient


@cache
def _is_closed(kind: type[Any], training: bool = False) -> bool:
    """Whether the search stops at objects of this class. For example, the search stops at iterators, because iterators
    cannot be set back.
    """
    if issubclass(kind, Tensor):
        return False
    if issubclass(kind, _CLOSED) or hasattr(kind, "__next__"):
        return True
    packages = {base.__module__ for base in kind.__mro__}
    if any(package.startswith("torch._") for package in packages):  # registries and caches of PyTorch itself
        return True
    closed = _ALIVE if training else (*_ALIVE, *_TRAINING)
    return any(f"{package}.".startswith(f"{each}.") for package in packages for each in closed)


def _undecorated(value: Any) -> Any:
    """The program's own function, inside the wrappers of library decorators such as `torch.no_grad()`."""
    while isinstance(value, types.FunctionType) and _is_of_libraries(value) and "__wrapped__" in vars(value):
        value = vars(value)["__wrapped__"]
    return value


def _is_of_libraries(value: Any) -> bool:
    """Whether a function or a class belongs to PyTorch, Rooftop or Python, and so has no state of the program."""
    if isinstance(value, type):
        package = value.__module__.partition(".")[0]
        return package in ("torch", "rooftop") or (package in sys.stdlib_module_names and package != "__main__")
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(LIBRARIES)


def _is_installed(value: Any) -> bool:
    """Whether a function or a class belongs to an installed package. Following such an object would traverse the whole
    package.
    """
    return isinstance(value, (types.FunctionType, type)) and _is_in_site_packages(value.__module__)


@cache
def _is_in_site_packages(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return file.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *LIBRARIES))


def hooks_of(tensor: Tensor) -> list[Any]:
    """The hooks that `register_hook` and `register_post_accumulate_grad_hook` registered on a tensor."""
    hooks = (getattr(tensor, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for each in hooks for hook in each.values()]


class Container:
    """One container of an owner: the items that the container had when this object was created, and how to restore
    them.
    """

    def __init__(
        self, owner: Any, read: Callable[[], list[Any]], write: Callable[[list[Any]], object] = lambda items: None
    ) -> None:
        self.owner, self.now, self._write = owner, read, write
        self.items = read()

    def is_changed(self) -> bool:
        now = self.now()
        return len(now) != len(self.items) or any(a is not b for a, b in zip(now, self.items, strict=True))

    def put_back(self) -> None:
        self._write(self.items)

    def logs(self) -> bool:
        """Whether this is a plain container or a variable that contained only numbers and text, at the start and
        now."""
        plain = type(self.owner) in (list, dict, set, deque, OrderedDict, defaultdict, types.CellType)
        return plain and all(map(_is_plain, chain(self.items, self.now())))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bytes, int, float, complex, types.NoneType, torch.dtype, torch.device))


def _passed(owner: Any, items: Iterable[Any]) -> Container:
    """A container of items that the search follows, but never restores."""
    kept = [*items]
    return Container(owner, lambda: kept)


def _containers_of(value: Any, of_modules: bool, installed: bool) -> Iterator[Container]:
    """The containers that the search follows from a value: its items, its attributes, and what a function refers to."""
    if isinstance(value, type):
        yield from _of_class(value)
        return
    if isinstance(value, nn.Module) and not of_modules:
        yield from _of_module(value)
        return
    if isinstance(value, dict):
        yield mapping_of(value, value)
    elif isinstance(value, list):
        yield Container(value, lambda: [*list.__iter__(value)], lambda items: _refill(value, list, list.extend, items))
    elif isinstance(value, set):
        yield Container(value, lambda: [*set.__iter__(value)], lambda items: _refill(value, set, set.update, items))
    elif isinstance(value, deque):
        yield Container(
            value, lambda: [*deque.__iter__(value)], lambda items: _refill(value, deque, deque.extend, items)
        )
    elif isinstance(value, (tuple, frozenset)):
        yield _passed(value, value)
    elif isinstance(value, _lru_cache_wrapper):
        yield _passed(value, [value.__wrapped__])  # `fake_leftovers` removes fake tensors from the cached results
    elif isinstance(value, (staticmethod, classmethod)):
        yield _passed(value, [value.__func__])
    elif isinstance(value, property):
        yield _passed(value, [value.fget, value.fset])
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, installed)
    elif isinstance(value, types.MethodType):
        yield _passed(value, [value.__self__, value.__func__])
    elif isinstance(value, partial):
        yield _passed(value, [value.func, *value.args, *value.keywords.values()])
    attributes = attributes_of(value)
    if attributes is not None:
        yield mapping_of(attributes, value)
    for slot in _slots(type(value)):
        yield _place(value, partial(slot.__get__, value), partial(slot.__set__, value), partial(slot.__delete__, value))


def mapping_of(mapping: dict[Any, Any], owner: Any) -> Container:
    """A container of a mapping's keys and values, alternating. The container writes with the methods of `dict`, even if
    a subclass overrides these methods."""
    kind: type[MutableMapping[Any, Any]] = OrderedDict if isinstance(mapping, OrderedDict) else dict

    def write(items: list[Any]) -> None:
        kind.clear(mapping)
        for key, item in zip(items[::2], items[1::2], strict=True):
            kind.__setitem__(mapping, key, item)

    return Container(owner, lambda: [part for entry in kind.items(mapping) for part in entry], write)


def _of_module(module: nn.Module) -> Iterator[Container]:
    """A module's parameters, its submodules and, unless its class is PyTorch's, the attributes that not every
    `nn.Module` has. The search follows buffers and hooks, but never restores them."""
    state = vars(module)
    common = [part for name, part in state.items() if name in _OF_ANY_MODULE and isinstance(part, dict)]
    for part in (state.get("_parameters"), state.get("_modules")):
        if type(part) is dict and not any(type(each).__module__.startswith("torch.dist") for each in part.values()):
            yield mapping_of(part, module)
    yield _passed(module, chain.from_iterable(part.values() for part in common))
    if type(module).__module__.startswith("torch."):
        return

    def own() -> dict[str, Any]:
        return {name: part for name, part in state.items() if name not in _OF_ANY_MODULE}

    def write(items: list[Any]) -> None:
        for name in own():
            del state[name]
        state.update(zip(items[::2], items[1::2], strict=True))

    yield Container(module, lambda: [part for entry in own().items() for part in entry], write)


def _of_class(kind: type) -> Iterator[Container]:
    """The attributes of a class. The search follows methods, but never restores them; the other attributes can be
    restored."""
    code = (*_CODE, types.BuiltinFunctionType, types.MemberDescriptorType, types.GetSetDescriptorType)
    named = {name: part for name, part in vars(kind).items() if not (name.startswith("__") and name.endswith("__"))}
    yield _passed(kind, [part for part in vars(kind).values() if isinstance(part, _CODE)])
    for name in [name for name, part in named.items() if not isinstance(part, code)]:
        yield _place(
            kind, partial(vars(kind).__getitem__, name), partial(setattr, kind, name), partial(delattr, kind, name)
        )


def _of_function(function: types.FunctionType, installed: bool) -> Iterator[Container]:
    """A function's closure, its defaults, and the globals that it names."""
    for cell in function.__closure__ or ():
        contents = partial(getattr, cell, "cell_contents")
        yield _place(cell, contents, partial(setattr, cell, "cell_contents"), partial(delattr, cell, "cell_contents"))
    yield _passed(function, [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
    for name, value in globals_by_name(function):
        if not isinstance(value, types.ModuleType) and (installed or not _is_installed(value)):
            yield global_of(function.__globals__, name)


def named_globals(function: types.FunctionType) -> list[Any]:
    """The values of the globals that a function's code names."""
    return [value for _, value in globals_by_name(function)]


def globals_by_name(function: types.FunctionType) -> list[tuple[str, Any]]:
    """(name, value) of the globals that a function's code names. A global with the name of an attribute in this code is
    included, too (see `code_names`)."""
    names = function.__globals__
    return [(name, names[name]) for name in sorted(code_names(function.__code__) & names.keys())]


def code_names(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in a function's code and in the code of its inner functions."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(code_names, inner))


def global_of(names: dict[str, Any], name: str) -> Container:
    """One global of a module."""
    return Container(
        names,
        lambda: [names[name]] if name in names else [],
        lambda items: names.__setitem__(name, items[0]) if items else names.pop(name, None),
    )


def _place(owner: Any, get: Callable[[], Any], give: Callable[[Any], object], take: Callable[[], object]) -> Container:
    """The container of a slot or a cell, which may be empty."""

    def read() -> list[Any]:
        try:
            return [get()]
        except (AttributeError, KeyError, ValueError):
            return []

    def write(items: list[Any]) -> None:
        if items:
            give(items[0])
        elif read():
            take()

    return Container(owner, read, write)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object itself, without its class's; None if the object cannot have attributes."""
    if isinstance(value, threading.local):
        return vars(value)  # `vars` of a `threading.local` returns the attributes of this thread
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    """The slots that a class and its bases declare."""
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [each for names in classes for each in names.values() if isinstance(each, types.MemberDescriptorType)]


def _refill(value: Any, kind: Any, fill: Callable[[Any, list[Any]], object], items: list[Any]) -> None:
    kind.clear(value)
    fill(value, items)
