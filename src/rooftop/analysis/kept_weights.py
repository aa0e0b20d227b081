"""Restore the weights that a module changes in its own forward pass: a momentum encoder, clipped weights, codebooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

MOST_BYTES = 1 << 30  # if the weights have more bytes, none is copied: a copy of 1 GiB takes 0.1 to 0.3 s of a CPU


@contextmanager
def weights_kept(module: nn.Module, optimizer: torch.optim.Optimizer | None, notes: list[str]) -> Iterator[None]:
    """At the end of the block, restore the weights that the module changed in its own forward pass.

    Args:
        module: the module that the block runs.
        optimizer: the caller's optimizer. Its parameters are not restored.
        notes: gets a note if weights could not be restored, because all weights together were too large to be copied.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    weights = {name: _Weight(p) for name, p in module.named_parameters() if _is_plain(p) and id(p) not in stepped}
    if not all(type(p) is nn.Parameter or is_lazy(p) for p in module.parameters()):
        weights = {}  # a library (FSDP, say) moves these parameters itself
    copied = sum(weight.bytes for weight in weights.values()) <= MOST_BYTES
    for weight in weights.values() if copied else ():
        weight.copy()
    try:
        yield
    finally:
        lost = [name for name, weight in weights.items() if not weight.put_back()]
        if lost:
            notes.append(
                f"The model's forward pass changed its weights ({', '.join(lost[:3])}{', ...' if lost[3:] else ''}). "
                f"Models over {MOST_BYTES >> 30} GiB are not copied, so these weights stay changed: load them again."
            )


def _is_plain(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and not is_lazy(parameter) and not isinstance(parameter.data, FakeTensor)
    return plain and parameter.layout == torch.strided and not parameter.is_meta and not parameter.is_inference()


class _Weight:
    """A parameter, its memory, and a copy of its values on the host."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._data, self._version = parameter, parameter.data, parameter._version
        self._before: Tensor | None = None
        self.bytes = parameter.nbytes

    def copy(self) -> None:
        self._before = self._data.to("cpu", copy=True)

    def put_back(self) -> bool:
        """Restore the values; False if they changed but have no copy. Unchanged weights are not written."""
        moved = self._parameter.data_ptr() != self._data.data_ptr()
        if moved:
            self._parameter.data = self._data  # the values in the old memory may have changed as well
        if self._before is None:
            return not moved and self._parameter._version == self._version
        if not torch.equal(self._data.to("cpu"), self._before):  # a write to `.data` does not change the version
            with torch.no_grad():
                self._parameter.copy_(self._before)
        return True
