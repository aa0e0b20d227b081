"""Find all modules, tensors and plain values of a model, including those that PyTorch does not register.

self.scale = torch.tensor(2.0)      # a tensor that is neither a parameter nor a buffer
self.others = [nn.Linear(4, 4)]     # a module outside of `_modules`
self.steps = 0                      # a number that calls may change
"""

from __future__ import annotations

import functools
import logging
import types
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
    """The modules, tensors and plain values of a model.

    Attributes:
        modules: all modules, each once; the first is the model itself.
        tensors: all tensors, each once, by path, such as "layers.0.weight" or "cache['keys']".
        plain: numbers, strings and similar values, by path.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Hashable] = field(default_factory=dict)
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
        elif isinstance(part, list | tuple | set | frozenset):
            self.plain[where] = len(part)
            for i, value in enumerate(part):
                self._look_at(value, f"{where}[{i}]", depth)
        elif isinstance(part, types.MethodType):
            self._look_at(part.__self__, f"{where}.__self__", depth)
        elif isinstance(part, functools.partial):
            self._look_at((part.func, part.args, part.keywords), where, depth)
        else:
            for name, value in getattr(part, "__dict__", {}).items():
                self._look_at(value, f"{where}.{name}", depth + 1)

    def _look_at_module(self, module: nn.Module, where: str) -> None:
        self.modules.append(module)
        for register in REGISTERS:
            for name, value in vars(module)[register].items():
                self._look_at(value, f"{where}.{name}" if where else name, 0)
        for name, value in vars(module).items():
            if name not in OWN and name not in REGISTERS:
                self._look_at(value, f"{where}.{name}" if where else name, 0)
