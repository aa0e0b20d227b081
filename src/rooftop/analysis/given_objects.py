"""Keeps the arguments of a step as they were given: caches of keys and values, states, lists, tensors.

A step is run many times. An object that it changes (a cache that grows by a token, a counter) would make another
problem of each run, and the caller would find it changed afterwards. So containers and attributes that the first runs
change are put back before each further one, and everything at the end. Tensors that are written in place are put back
before each run where they are small (positions, lengths), and else only at the end: they change no sizes.
"""

from __future__ import annotations

import os
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

MOST_ENTRIES = 200_000  # that are looked at
SMALL_BYTES = 4096  # of a tensor that is put back before each run
LOOKS = 2  # at what the first runs change: the first one may also make what later ones use

_CLOSED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType),
    *(str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Generator),
    *(nn.Module, torch.UntypedStorage, torch.TypedStorage),
)
"""Not entered: what has no parts."""
_ALIVE = (
    *("asyncio", "concurrent", "io", "_io", "logging", "multiprocessing", "queue", "selectors", "socket", "subprocess"),
    *("threading", "torch.cuda", "torch.distributed", "torch.profiler", "torch.utils.data"),
)
"""Packages whose objects are not entered either: threads and processes work on them."""
_TRAINING = ("torch.amp", "torch.optim")
"""And neither are theirs, as training goes on in them, except where nothing is computed."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CODE = (types.FunctionType, types.MethodType, partial)


class Held:
    """All containers and tensors that can be reached from some values through containers and attributes.

    Args:
        everything: also through functions (what they close over, the globals that they name), methods and modules.
        training: also through optimizers, their schedulers and gradient scalers.

    Attributes:
        containers: each with what it holds, in order. tensors: each once.
        complete: False if there are more than `MOST_ENTRIES` entries; the others are not known.
    """

    def __init__(self, roots: Iterable[Any], everything: bool = False, training: bool = False) -> None:
        self._everything, self._training = everything, training
        self.containers: list[Container] = []
        self.tensors: list[Tensor] = []
        self.complete = True
        seen, left, entries = set[int](), deque(roots), 0
        while left and self.complete:
            value = left.popleft()
            if id(value) in seen or not self._enters(value):
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append(value)
            for container in self._parts(value):
                self.containers.append(container)
                left.extend(container.items)
                entries += len(container.items)
            self.complete = entries <= MOST_ENTRIES

    def _enters(self, value: Any) -> bool:
        if self._everything and isinstance(value, (*_CODE, nn.Module)) and not _is_pytorchs(value):
            return True
        return not _is_closed(type(value), self._training)  # type: ignore[arg-type]

    def _parts(self, value: Any) -> Iterator[Container]:
        return iter(()) if isinstance(value, Tensor) else _containers_of(value)


@contextmanager
def left_as_it_was(target: Callable[..., Any]) -> Iterator[None]:
    """What a callable can reach is the same after a block in which nothing is computed: containers and attributes, also
    of optimizers; gradients, and which tensors require them."""
    held = Held([target], everything=True, training=True)
    gradients = [_Gradient(tensor) for tensor in held.tensors]
    try:
        yield
    finally:
        for container in held.containers:
            if container.is_changed():
                container.put_back()
        for gradient in gradients:
            gradient.put_back()


class _Gradient:
    """The gradient of a leaf of autograd's graph, and whether it requires one; of other tensors nothing."""

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
    """Whether objects of a class are not entered; iterators go on and cannot be put back."""
    if issubclass(kind, Tensor):
        return False
    if issubclass(kind, _CLOSED) or hasattr(kind, "__next__"):
        return True
    packages = {base.__module__ for base in kind.__mro__}
    if any(package.startswith("torch._") for package in packages):  # registries and caches of PyTorch itself
        return True
    closed = _ALIVE if training else (*_ALIVE, *_TRAINING)
    return any(f"{package}.".startswith(f"{each}.") for package in packages for each in closed)


def _is_pytorchs(value: Any) -> bool:
    """Whether a function is PyTorch's own: what its code names is PyTorch's state, and none of a program's."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(_TORCH)


class Container:
    """One container of an owner: its items now, and how to give it these again."""

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


def _containers_of(value: Any) -> Iterator[Container]:
    """The parts of a value that can change: its items, its attributes."""
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
        yield Container(value, lambda: [*value])
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield Container(value, lambda: [value.__self__, value.__func__])
    elif isinstance(value, partial):
        yield Container(value, lambda: [value.func, *value.args, *value.keywords.values()])
    attributes = attributes_of(value)
    if attributes is not None:
        yield mapping_of(attributes, value)
    for slot in _slots(type(value)):
        yield _place(value, partial(slot.__get__, value), partial(slot.__set__, value), partial(slot.__delete__, value))


def mapping_of(mapping: dict[Any, Any], owner: Any) -> Container:
    """Keys and values, one after the other; past what a subclass makes of changes."""
    kind: type[MutableMapping[Any, Any]] = OrderedDict if isinstance(mapping, OrderedDict) else dict

    def write(items: list[Any]) -> None:
        kind.clear(mapping)
        for key, item in zip(items[::2], items[1::2], strict=True):
            kind.__setitem__(mapping, key, item)

    return Container(owner, lambda: [part for entry in kind.items(mapping) for part in entry], write)


def _of_function(function: types.FunctionType) -> Iterator[Container]:
    """What it closes over, its defaults, and the globals that it names."""
    for cell in function.__closure__ or ():
        contents = partial(getattr, cell, "cell_contents")
        yield _place(cell, contents, partial(setattr, cell, "cell_contents"), partial(delattr, cell, "cell_contents"))
    yield Container(function, lambda: [*(function.__defaults__ or ())])
    for name, _ in globals_by_name(function):
        yield global_of(function.__globals__, name)


def named_globals(function: types.FunctionType) -> list[Any]:
    """The values of the globals that a function's code names."""
    return [value for _, value in globals_by_name(function)]


def globals_by_name(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Those globals with their names. A function names the attributes that it takes of them, too: see `code_names`."""
    names = function.__globals__
    return [(name, names[name]) for name in sorted(code_names(function.__code__) & names.keys())]


def code_names(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in a function's code, and in that of functions inside it."""
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
    """A slot or a cell, which may be empty."""

    def read() -> list[Any]:
        try:
            return [get()]
        except (AttributeError, ValueError):
            return []

    def write(items: list[Any]) -> None:
        if items:
            give(items[0])
        elif read():
            take()

    return Container(owner, read, write)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object has of its own; None if it can have none."""
    if isinstance(value, threading.local):
        return vars(value)  # those of this thread
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    """Those that Python code has declared."""
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [each for names in classes for each in names.values() if isinstance(each, types.MemberDescriptorType)]


def _refill(value: Any, kind: Any, fill: Callable[[Any, list[Any]], object], items: list[Any]) -> None:
    kind.clear(value)
    fill(value, items)


class GivenObjects:
    """The arguments of a step, as they were when this was made.

    Attributes:
        changed: class names of the objects that the first runs changed.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        held = Held(arguments)
        self.changed: list[str] = []
        self._complete = held.complete
        self._containers = held.containers
        predicted = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # nothing has values
        tensors = [] if predicted else held.tensors
        self._values = [value for tensor in tensors if (value := _value_of(tensor)) is not None]
        self._looks, self._writes = 0, False
        self._lost: list[str] = []
        self._changing: list[Container] = []
        self._small: list[_Value] = []
        self._moved: list[_Value] = []

    def put_back(self) -> None:
        """Before a run: what earlier ones have changed of containers, attributes and small tensors."""
        for container in self._changing:
            container.put_back()
        if self._small or self._moved:
            with _disable_current_modes(), torch.no_grad():
                for values in (self._small, self._moved):
                    values[:] = [value for value in values if self._is_laid_out(value)]
                if self._small:
                    torch._foreach_copy_([v.tensor for v in self._small], [v.here for v in self._small])

    def _is_laid_out(self, value: _Value) -> bool:
        """Whether the tensor has its shape again."""
        try:
            value.lay_out()
        except RuntimeError as error:  # a view that has become part of a graph
            self._lost.append(_first_line(error))
            return False
        return True

    def look(self) -> None:
        """After a run: what it has changed. Only the first runs are looked at."""
        if self._looks == LOOKS:
            return
        self._looks += 1
        known = {id(container) for container in self._changing}
        for container in self._containers:
            if id(container) not in known and container.is_changed():
                self._changing.append(container)
        small = {id(value) for value in self._small}
        self._small += [v for v in self._values if v.here is not None and id(v) not in small and v.is_changed()]
        moved = {id(value) for value in self._moved}
        self._moved += [v for v in self._values if v.here is None and id(v) not in moved and v.is_moved()]
        owners = [type(container.owner).__name__ for container in self._changing]
        self.changed = list(dict.fromkeys([name for name in owners if name not in _PLAIN] or owners))

    def put_all_back(self) -> None:
        """At the end: everything as it was."""
        for container in self._containers:
            if container.is_changed():
                container.put_back()
        self._writes = any(value.here is None and value.is_written() for value in self._values)
        for value in self._values:
            try:
                value.put_back()
            except RuntimeError as error:  # storage that is gone, or that nobody may write to
                self._lost.append(_first_line(error))

    @property
    def notes(self) -> list[str]:
        """What a report says of them."""
        notes = []
        if not self._complete:
            notes.append(
                f"The arguments hold more than {MOST_ENTRIES:,} objects: those beyond are not put back when the step "
                "changes them."
            )
        if self.changed:
            names = ", ".join(self.changed)
            notes.append(f"The step changes what it is given ({names}): each of its runs began with it as given.")
        if self._writes:
            notes.append(
                "The step writes to its inputs: each of its runs began with what the one before had left there."
            )
        elif self._small:
            notes.append("The step writes to its inputs: each of its runs began with them as given.")
        if self._lost:
            notes.append(
                f"What the step wrote to its inputs could not be taken back: {'; '.join(dict.fromkeys(self._lost))}."
            )
        return notes


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_PLAIN = {"dict", "list", "set", "deque"}


class _Value:
    """A tensor with its value before the first run, in the host's memory, as the step may need all of the device's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._storage, self._layout = tensor.untyped_storage(), _layout(tensor)
        self._before = tensor.detach().to("cpu", copy=True)
        small = self._version is not None and tensor.nbytes <= SMALL_BYTES
        self.here: Any = tensor.detach().clone() if small else None  # on its device

    def is_written(self) -> bool:
        """Whether the step wrote to it; of tensors made under `torch.inference_mode` that is not known."""
        return self._version is not None and self.tensor._version != self._version

    def is_changed(self) -> bool:
        return self.is_written() or self.is_moved()

    def is_moved(self) -> bool:
        """Whether it has another shape, shows other memory, or has become part of a graph."""
        same = _layout(self.tensor) == self._layout
        same = same and self.tensor.untyped_storage()._cdata == self._storage._cdata
        return not same or self.tensor.requires_grad

    def lay_out(self) -> None:
        """Undo that; gradients are off."""
        if not self.is_moved():
            return
        if self.tensor.grad_fn is not None:
            self.tensor.detach_()
        self.tensor.requires_grad_(False)
        self.tensor.set_(self._storage, *self._layout)  # type: ignore[call-overload]

    def put_back(self) -> None:
        if self._version is not None and not self.is_changed():
            return
        with torch.inference_mode() if self.tensor.is_inference() else torch.no_grad():
            self.lay_out()
            self.tensor.copy_(self._before)


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _value_of(tensor: Tensor) -> _Value | None:
    """None if a step does not write to it, or its value cannot be kept: weights change by optimizers alone."""
    try:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.device.type == "meta":
            return None
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return None
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return None
        return _Value(tensor)
    except (RuntimeError, NotImplementedError, AttributeError):  # a subclass that refuses to be copied: it stays alone
        return None
