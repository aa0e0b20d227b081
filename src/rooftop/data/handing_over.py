"""Asynchronous copies of batches to a device: neither the host nor the previous training step waits for a copy.

Tensors are copied from pinned memory on a separate CUDA stream. The stream that uses a batch waits on the GPU for the
copy's event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Copied(NamedTuple):
    """A value on the device, and the event that marks the end of its copy; the event is None if nothing was copied."""

    value: Any
    ready: torch.cuda.Event | None


class Copies:
    """Copies values to a device.

    Args:
        device: the target; None: values stay on the CPU.

    Attributes:
        copied_bytes: total bytes of the CPU tensors that were copied to another device.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device, self.copied_bytes = device, 0
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    @property
    def pins(self) -> bool:
        """Whether the copies need values in pinned memory."""
        return self._stream is not None

    def stream(self) -> AbstractContextManager[Any]:
        """Context manager that makes the copy stream the current stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def begin(self, value: Any) -> Copied:
        """Start to copy the tensors of a batch, `value`, to the device. Any thread may call this."""
        if self._device is None or self._device.type == "cpu":
            return Copied(value, None)
        with self.stream():
            copied = pytree.tree_map(self._moved, value)
            return Copied(copied, self._stream.record_event() if self._stream is not None else None)

    def begin_joined(self, tensors: Sequence[Tensor], then: Callable[[Tensor], Any]) -> Copied:
        """Start to copy tensors of one dtype to the device, into one flat tensor that holds their values in order.
        Return what `then` makes of this flat tensor; on a GPU, the kernels of `then` run on the copy stream.

        The device's memory is allocated once, and not for each tensor.
        """
        flat = [each.reshape(-1) for each in tensors]
        if self._stream is None:
            copied = self.begin(torch.cat(flat))
            return Copied(then(copied.value), copied.ready)
        with self.stream():
            sizes = [each.numel() for each in flat]
            joined = torch.empty(sum(sizes), dtype=flat[0].dtype, device=self._device)
            for part, each in zip(joined.split(sizes), flat, strict=True):
                part.copy_(each, non_blocking=True)
            self.copied_bytes += joined.nbytes
            return Copied(then(joined), self._stream.record_event())

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._stream is not None and leaf.device.type == "cpu" and not leaf.is_pinned():
            leaf = leaf.pin_memory()
        if leaf.device.type == "cpu":
            self.copied_bytes += leaf.nbytes
        return leaf.to(self._device, non_blocking=self._stream is not None)

    def hand_over(self, copied: Copied) -> Any:
        """Return the batch from `begin`, on the device. The caller's current stream waits for the copy; the host does
        not."""
        if copied.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied.ready)
            for leaf in pytree.tree_leaves(copied.value):
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    leaf.record_stream(stream)
        return copied.value
