"""Find all modules, tensors, arrays and plain values of a model, including those that PyTorch does not register.

self.scale = torch.tensor(2.0)      # a tensor that is neither a parameter nor a buffer
self.others = [nn.Linear(4, 4)]     # a module outside of `_modules`
self.steps = 0                      # a number that calls may change
self.seen = np.zeros(10)            # an array that calls may change
"""

from __future__ import annotations

import array
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
REGISTERS = ("_parameters", "_buffers", "_modules")
OWN = frozenset(vars(nn.Module())) - set(REGISTERS)
"""Attributes that every module has, such as its mode and its hooks."""
OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
DEEPEST = 8
"""Maximum depth of nested objects that are searched. Modules and containers do not count as levels."""


@dataclass
class Contents:
    """The modules, tensors, arrays and plain values of a model.

    Attributes:
        modules: all modules, each once; the first is the model itself.
        tensors: all tensors, each once, by path, such as "layers.0.weight" or "cache['keys']".
        plain: numbers, strings and similar values, by path.
        arrays: arrays and numbers of NumPy, `array.array` and `bytearray`, each once, by path.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Hashable] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> Contents:
        """List what a model contains: search the model and the objects that it refers to."""
        found = cls()
        found._look_at(model, "", 0)
        return found

    def _look_at(self, part: Any, where: str, depth: int) -> None:
        if type(part) in PLAIN:
            self.plain[where] = type(part), repr(part)
            return
        if isinstance(part, OPAQUE) or id(part) in self._seen or depth > DEEPEST:
            return
        self._seen[id(part)] = part  # keeps the object alive, so that no other object gets its id
        if isinstance(part, Tensor):
            self.tensors[where] = part
        elif isinstance(part, nn.Module):
            self._look_at_module(part, where)
        elif isinstance(part, torch.Generator):
            self.plain[where] = part.get_state().numpy().tobytes()
        elif isinstance(part, dict):
            self.plain[where] = len(part)
            for key, value in part.items():
                self._look_at(value, f"{where}[{key!r}]", depth)
        elif _is_array(part):
            if getattr(getattr(part, "dtype", None), "hasobject", False):  # a NumPy array of Python objects
                self._look_at(part.tolist(), where, depth)
            else:
                self.arrays[where] = part
        elif isinstance(part, list | tuple | set | frozenset | deque):
            self.plain[where] = len(part)
            for i, value in enumerate(part):
                self._look_at(value, f"{where}[{i}]", depth)
        elif isinstance(part, types.MethodType):
            self._look_at(part.__self__, f"{where}.__self__", depth)
        elif isinstance(part, functools.partial):
            self._look_at((part.func, part.args, part.keywords), where, depth)
        else:
            for name, value in _attributes(part).items():
                self._look_at(value, f"{where}.{name}", depth + 1)

    def _look_at_module(self, module: nn.Module, where: str) -> None:
        self.modules.append(module)
        for register in REGISTERS:
            for name, value in vars(module)[register].items():
                self._look_at(value, f"{where}.{name}" if where else name, 0)
        for name, value in vars(module).items():
            if name not in OWN and name not in REGISTERS:
                self._look_at(value, f"{where}.{name}" if where else name, 0)


def _is_array(part: Any) -> bool:
    """Whether an object is an array or a number of NumPy, an `array.array` or a `bytearray`."""
    if isinstance(part, bytearray | array.array):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(part, numpy.ndarray | numpy.generic)


def _attributes(part: Any) -> dict[str, Any]:
    """The attributes of an object, including those in `__slots__`."""
    found = dict(getattr(part, "__dict__", {}))
    for kind in type(part).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[name] = slot.__get__(part)
                except AttributeError:  # the slot is empty
                    continue
    return found
