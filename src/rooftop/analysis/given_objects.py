"""Restore the arguments of a step: caches of keys and values, states, lists, tensors.

A step is run many times. If the step changes an object (a cache that grows by a token, a counter), each run would solve
a different problem, and the caller's object would stay changed. So Rooftop finds the containers and attributes that the
first runs change, and restores them before each further run. At the end Rooftop restores all objects. Small tensors
that a run writes in place (positions, lengths) are also restored before each run. Other tensors are restored only at
the end, because the work of a run hardly depends on their values.

The target's own state is restored in the same way: attributes of its modules, closures and globals of its functions.
Objects that the first run creates for later runs (a mask) stay until the end of the measurement, and are then removed.
Of this own state, logs are never restored: lists, dictionaries, sets, closure variables and globals that hold only
numbers and text. If a callable other than a module changes weights (trains), none of its own state is restored. NumPy
arrays are not restored either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rooftop.analysis import held_objects
from rooftop.analysis.held_objects import Container, Held
from rooftop.nn.fused_steps import after_fused_steps
from rooftop.words import first_line

SMALL_BYTES = 4096  # maximum size of a tensor that is restored before each run
# number of runs whose changes are checked: more than one, because the first run may create objects for later runs
LOOKS = 2


class GivenObjects:
    """The initial state of a step's arguments and of its target.

    Args:
        target: the target of the step; None ignores the target's own state.

    Attributes:
        changed: class names of the objects that the first runs changed.
    """

    def __init__(self, arguments: tuple[Any, ...], target: Any = None) -> None:
        held = Held(arguments)
        self.changed: list[str] = []
        self._complete = held.complete
        self._containers = held.containers
        # a prediction uses fake tensors, which have no values
        predicted = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        tensors = [] if predicted else held.tensors
        self._state = _State(target, {id(container.owner) for container in held.containers})
        tensors += [] if predicted else self._state.small_tensors(besides=held.tensors)
        written = [tensor for tensor in tensors if not _is_left(tensor)]
        values = [(tensor, _value_of(tensor)) for tensor in written]
        self._values = [value for _, value in values if value is not None]
        self._not_kept = [(tensor, _version_of(tensor)) for tensor, value in values if value is None]
        self._looks, self._writes = 0, False
        self._lost: list[str] = []
        self._changing: list[Container] = []
        self._small: list[_Value] = []
        self._moved: list[_Value] = []

    def put_back(self) -> None:
        """Undo the changes that earlier runs made to containers, attributes and small tensors. Called before a run."""
        for container in (*self._changing, *self._state.changing):
            container.put_back()
        if self._small or self._moved:
            with _disable_current_modes(), torch.no_grad():
                for values in (self._small, self._moved):
                    values[:] = [value for value in values if self._is_laid_out(value)]
                if self._small:
                    torch._foreach_copy_([v.tensor for v in self._small], [v.here for v in self._small])

    def _is_laid_out(self, value: _Value) -> bool:
        """Restore the tensor's original storage, shape and strides, but not its contents. Return whether that was
        possible."""
        try:
            value.lay_out()
        except RuntimeError as error:  # the tensor is a view that has become part of an autograd graph
            self._lost.append(first_line(error))
            return False
        return True

    def look(self) -> None:
        """Find the objects that a run changed. Called after each run, but only the first runs are inspected."""
        if self._looks == LOOKS:
            return
        self._looks += 1
        self._state.look()
        if self._state.trains:
            kept = {id(tensor) for tensor in self._state.tensors}
            self._values = [value for value in self._values if id(value.tensor) not in kept]
        known = {id(container) for container in self._changing}
        for container in self._containers:
            if id(container) not in known and container.is_changed():
                self._changing.append(container)
        small = {id(value) for value in self._small}
        self._small += [v for v in self._values if v.here is not None and id(v) not in small and v.is_changed()]
        moved = {id(value) for value in self._moved}
        self._moved += [v for v in self._values if v.here is None and id(v) not in moved and v.is_moved()]
        owners = [type(container.owner).__name__ for container in (*self._changing, *self._state.changing)]
        self.changed = list(dict.fromkeys([name for name in owners if name not in _PLAIN] or owners))

    def put_all_back(self) -> None:
        """Restore all objects at the end of the measurement."""
        self._state.end()
        for container in (*self._containers, *self._state.changed()):
            if container.is_changed():
                container.put_back()
        self._writes = any(value.here is None and value.is_written() for value in self._values)
        for value in self._values:
            try:
                value.put_back()
            except RuntimeError as error:  # the tensor's storage is freed or read-only
                self._lost.append(first_line(error))
        for tensor, version in self._not_kept:
            if _version_of(tensor) != version:
                self._lost.append(f"a {type(tensor).__name__} ({_layout_of(tensor)}) could not be copied beforehand")

    @property
    def notes(self) -> list[str]:
        """Notes about the changed objects for the report."""
        notes = []
        if not self._complete:
            notes.append(
                f"The arguments hold more than {held_objects.MOST_ENTRIES:,} objects: objects beyond that number are "
                "not restored when the step changes them."
            )
        if self.changed:
            changing = {"its arguments": self._changing, "its own state": self._state.changing}
            what, names = " and ".join(part for part, those in changing.items() if those), ", ".join(self.changed)
            notes.append(f"The step changes {what} ({names}), restored before each run.")
        if self._writes:
            notes.append("The step writes to its inputs: each run began with the values that the previous run left.")
        elif self._small:
            notes.append("The step writes to small tensors (its inputs or its own), restored before each run.")
        if self._lost:
            notes.append(f"Inputs that the step changed could not be restored: {'; '.join(dict.fromkeys(self._lost))}.")
        return notes


_PLAIN = {"dict", "list", "set", "deque", "cell", "type"}
"""Class names that the note about changed objects leaves out if it can name other classes."""


class _State:
    """State that lasts from run to run: attributes, closures and globals of a step's target.

    Args:
        target: a module or another callable; None: no state is kept.
        others: ids of the arguments and of the objects in them, which `GivenObjects` restores itself.

    Attributes:
        containers: containers with their initial contents.
        changing: containers that change not only in the first run, but also in later runs.
        trains: whether the target is a callable other than a module, and changes weights. If so, no state is restored.
    """

    def __init__(self, target: Any, others: set[int]) -> None:
        self._target, self._others = target, others
        held = self._held()
        self.containers = self._own(held)
        self.tensors = held.tensors
        self.changing: list[Container] = []
        self.trains = False
        weights = () if isinstance(target, nn.Module) else (t for t in held.tensors if t.requires_grad and t.is_leaf)
        self._weights = [(weight, weight._version) for weight in weights if not weight.is_inference()]
        self._stepped: set[int] = set()  # ids of parameters that a fused step has changed: versions do not show it
        self._noted = after_fused_steps(lambda tensors: self._stepped.update(map(id, tensors)))
        self._after_first: list[Container] | None = None

    def _held(self) -> Held:
        return Held([] if self._target is None else [self._target], everything=True, of_modules=False)

    def _own(self, held: Held) -> list[Container]:
        return [container for container in held.containers if id(container.owner) not in self._others]

    def small_tensors(self, besides: list[Tensor]) -> list[Tensor]:
        """Small tensors that may determine how a run starts (positions, lengths).

        Floating-point buffers and buffers of PyTorch's own modules are excluded.
        """
        modules = self._target.modules() if isinstance(self._target, nn.Module) else ()
        kept = {id(b) for m in modules for b in m._buffers.values() if b is not None and _is_statistic(m, b)}
        kept |= {id(tensor) for tensor in besides}
        dense = [t for t in self.tensors if t.layout == torch.strided and not t.is_nested]
        return [t for t in dense if id(t) not in kept and t.nbytes <= SMALL_BYTES]

    def look(self) -> None:
        """Find the state that a run changed. Called after each run, because the first run may create objects for later
        runs: only what later runs also change is restored."""
        if any(weight._version != version or id(weight) in self._stepped for weight, version in self._weights):
            self.trains = True
            self.containers, self.changing, self._weights = [], [], []
        if self.trains:
            return
        if self._after_first is None:
            self._after_first = self._own(self._held())
            return
        known = {id(container.owner) for container in self.containers}
        growing = [each for each in self._after_first if each.is_changed() and not each.logs()]
        self.changing = self.changed() if growing else []
        # Restore only what later runs also changed, so that objects that the first run created for later runs stay.
        if all(id(container.owner) in known for container in growing):
            owners = {id(container.owner) for container in growing}
            self.changing = [each for each in self.changing if id(each.owner) in owners]

    def end(self) -> None:
        """Call once after the last run."""
        self._noted.remove()

    def changed(self) -> list[Container]:
        """All changed containers, except logs (see `Container.logs`)."""
        return [each for each in self.containers if each.is_changed() and not each.logs()]


def _is_statistic(module: nn.Module, buffer: Tensor) -> bool:
    """Whether a buffer counts as a statistic, not as a position: it is a floating-point buffer, or a buffer of one of
    PyTorch's modules."""
    return buffer.is_floating_point() or type(module).__module__.startswith("torch.")


class _Value:
    """A tensor and a copy of its value before the first run. The copy is in host memory, because the step may need all
    device memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = _version_of(tensor)
        self._storage, self._layout = tensor.untyped_storage(), _layout(tensor)
        self._before = tensor.detach().to("cpu", copy=True)
        small = self._version is not None and tensor.nbytes <= SMALL_BYTES
        self.here: Any = tensor.detach().clone() if small else None  # a copy on the tensor's device

    def is_written(self) -> bool:
        """Whether the step wrote to the tensor; False if unknown (tensors made under `torch.inference_mode`)."""
        return self._version is not None and self.tensor._version != self._version

    def is_changed(self) -> bool:
        return self.is_written() or self.is_moved()

    def is_moved(self) -> bool:
        """Whether the tensor's storage, shape or strides differ from those before the first run, or it now requires
        gradients."""
        same = _layout(self.tensor) == self._layout
        same = same and self.tensor.untyped_storage()._cdata == self._storage._cdata
        return not same or self.tensor.requires_grad

    def lay_out(self) -> None:
        """Restore the tensor's storage, shape and strides, and detach the tensor from the autograd graph."""
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


def _is_left(tensor: Tensor) -> bool:
    """Whether the tensor is never restored: a weight, because only an optimizer's step changes weights, and training is
    not undone; or a meta tensor, because it has no values."""
    with torch._C.DisableTorchFunctionSubclass():  # a tensor subclass may raise on these attributes
        return isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.device.type == "meta"


def _version_of(tensor: Tensor) -> int | None:
    """The number of writes to the tensor; None if PyTorch does not count them (tensors made under
    `torch.inference_mode`)."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.is_inference() else tensor._version


def _layout_of(tensor: Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return str(tensor.layout).removeprefix("torch.")


def _value_of(tensor: Tensor) -> _Value | None:
    """A copy of the tensor; None if it cannot be copied. If the step writes to a tensor that cannot be copied, a note
    in the report says so.
    """
    try:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or repeats_elements(tensor):
            return None
        return _Value(tensor)
    except (RuntimeError, NotImplementedError, AttributeError):  # a tensor subclass that refuses to be copied
        return None


def repeats_elements(tensor: Tensor) -> bool:
    """Whether a tensor is expanded, so that PyTorch does not allow in-place writes to it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
