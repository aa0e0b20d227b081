"""Restore the user's model and the random state bit for bit, whatever rules and models have changed in them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.nn.contents import Contents
from rooftop.optimization.outcomes import same_each, same_values


@dataclass(frozen=True)
class _Was:
    """The saved state of one tensor, to restore later. `place` shares the tensor's memory; `values` is a copy of its
    values.
    """

    tensor: Tensor
    place: Tensor
    values: Tensor
    requires_grad: bool
    gradient: _Was | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Was:
        gradient = tensor.grad if tensor.is_leaf else None
        of_gradient = None if gradient is None else cls.of(gradient)
        return cls(tensor, tensor.detach(), tensor.detach().clone(), tensor.requires_grad, of_gradient)

    def differs(self, same: bool | None = None) -> bool:
        """Whether the tensor differs from its earlier state.

        Args:
            same: whether the tensor has its earlier values; None: compare them.
        """
        if self.moved() or not (same_values(self.tensor.detach(), self.values) if same is None else same):
            return True
        if not self.tensor.is_leaf:
            return False
        if self.tensor.requires_grad != self.requires_grad or self.tensor.grad is not self._gradient():
            return True
        return self.gradient is not None and self.gradient.differs()

    def restore(self) -> None:
        """Restore the tensor if it differs from its earlier state. Otherwise do not write to it, since a write of equal
        values also raises its version counter.
        """
        tensor, gradient = self.tensor, self.gradient
        if not self.differs():
            return
        with torch.no_grad():
            if self.moved():
                tensor.grad = None
                tensor.data = self.place
            if not same_values(tensor.detach(), self.values):
                tensor.copy_(self.values)
            if tensor.is_leaf:
                tensor.requires_grad_(self.requires_grad)
                if gradient is not None:
                    gradient.restore()
                tensor.grad = self._gradient()

    def _gradient(self) -> Tensor | None:
        return None if self.gradient is None else self.gradient.tensor

    def moved(self) -> bool:
        """Whether the tensor now has other memory, or another layout, dtype or shape."""
        tensor, place = self.tensor, self.place
        if tensor.layout != torch.strided or tensor.dtype != place.dtype or tensor.shape != place.shape:
            return tensor.layout != place.layout or tensor.dtype != place.dtype or tensor.shape != place.shape
        return tensor.data_ptr() != place.data_ptr() or tensor.stride() != place.stride()


class Originals:
    """The original state of the user's model: tensors, gradients, and training modes."""

    def __init__(self, model: nn.Module) -> None:
        contents = Contents.of(model)
        self.modes = [(module, module.training) for module in contents.modules]
        self.tensors = {where: _Was.of(tensor) for where, tensor in contents.tensors.items()}

    def restore(self) -> str:
        """Restore all tensors. Return the name of a tensor that had changed, or ""."""
        there = {where: was for where, was in self.tensors.items() if not was.moved()}
        same = dict(zip(there, same_each([(was.tensor.detach(), was.values) for was in there.values()]), strict=True))
        changed = [where for where, was in self.tensors.items() if was.differs(same.get(where))]
        for where in changed:
            self.tensors[where].restore()
        return changed[0] if changed else ""


@contextmanager
def as_before(model: nn.Module) -> Iterator[Originals]:
    """After the block, restore a model's tensors, gradients and modes, and the random state of the process."""
    originals = Originals(model)
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy: Any = numpy.random.get_state() if numpy is not None else None
    devices = sorted({was.tensor.device.index for was in originals.tensors.values() if was.tensor.is_cuda})
    flags = torch.is_grad_enabled(), torch.get_default_dtype()
    with torch.random.fork_rng(devices):
        try:
            yield originals
        finally:
            torch.set_grad_enabled(flags[0])
            torch.set_default_dtype(flags[1])
            originals.restore()
            for module, mode in originals.modes:
                module.training = mode
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
