"""Restore tensors if a flag on the device is set, without waiting for the device.

    kept = PutBack()
    kept.take(tensors)       # copies
    ...                      # change the tensors
    kept.put_back(skip)      # skip is a bool tensor, (): if True, restores the earlier values

So a step with non-finite numbers changes no tensor, with any optimizer. Tensors of one dtype are copied together, with
three kernel launches per dtype instead of three per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class PutBack:
    """Keeps copies of tensors.

    The copies need twice the memory of the tensors. This memory is allocated once, and again only if the shapes change.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.dtype, torch.device], _Room] = {}

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Store a copy of the tensors' current values, which `put_back` restores."""
        sorted_in: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            sorted_in.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._rooms = {
            key: room if (room := self._rooms.get(key)) is not None and room.fits(each) else _Room(each)
            for key, each in sorted_in.items()
        }
        for room in self._rooms.values():
            torch._foreach_copy_(room.before, room.tensors)

    @torch.no_grad()
    def put_back(self, where: Tensor) -> None:
        """Restore the values that `take` has copied if the bool tensor `where` is True."""
        for room in self._rooms.values():
            torch._foreach_copy_(room.after, room.tensors)
            before, after = _bits(room.all_before), _bits(room.all_after)
            torch.where(where, before, after, out=after)
            torch._foreach_copy_(room.tensors, room.after)


class _Room:
    """Memory for two copies, the earlier and the current values, of tensors of one dtype on one device."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        shapes = [tensor.shape for tensor in tensors]
        self.all_before = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        self.all_after = torch.empty_like(self.all_before)
        self.before, self.after = (
            [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
            for whole in (self.all_before, self.all_after)
        )

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether the new tensors have the same shapes as those that use this memory now. If so, the new tensors use
        the memory from now on."""
        same = [each.shape for each in tensors] == [each.shape for each in self.tensors]
        if same:
            self.tensors = tensors
        return same


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers, because `torch.where` does not take all dtypes (PyTorch 2.11: no uint16)."""
    size = min(tensor.element_size(), 8)
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
