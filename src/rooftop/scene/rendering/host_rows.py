"""Host memory that the device accesses directly.

`HostRows` are rows that the host writes and kernels read. For few rows, this takes the host less time than a copy to
the device. `HostCopy` is memory into which the device copies a small tensor, such as a frame's counters, for the host
to read.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray
from torch import Tensor


class HostRows:
    """An array of rows in host memory, which the host writes and kernels read.

    PyTorch's allocator does not know when kernels read the rows. So the memory of a deleted `HostRows` is not freed.
    The next `HostRows` with the same shape, dtype and device reuses it, and its `wait` also waits for the kernels that
    were launched for the deleted one.

    Attributes:
        rows: the rows, as a NumPy array. Call `wait` before you write to it.
        there: the same memory, as a Warp array that kernels on the device can read.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        kept = _kept.setdefault((shape, dtype, device), [])
        self._read: torch.cuda.Event | None
        try:
            memory, self._read = kept.pop()
        except IndexError:
            memory = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
            self._read = torch.cuda.Event() if on_gpu else None
        self._device = device
        self.rows: Any = memory.numpy()
        # a GPU reads pinned memory at the memory's host address
        self.there: Any = wp.array(
            ptr=memory.data_ptr(), dtype=wp.dtype_from_torch(dtype), shape=shape, device=wp.device_from_torch(device)
        )
        weakref.finalize(self, kept.append, (memory, self._read))

    def wait(self) -> None:
        """Wait until the kernels that were launched before `launched` have read the rows. Usually these kernels
        have finished already."""
        if self._read is not None:
            self._read.synchronize()

    def launched(self) -> None:
        """Record that kernels that read the rows were launched on the current stream."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))


class HostCopy:
    """Host memory into which the device copies an int32 tensor, such as a frame's counters. Each copy overwrites the
    previous one.

    Args:
        count: number of elements of the tensor.
        device: device of the tensor.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._here = torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def send(self, tensor: Tensor) -> None:
        """Start to copy the tensor to the host. The copy runs after the work that the current stream has queued so
        far."""
        self._here.copy_(tensor, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> NDArray[np.int32]:
        """Return the values of the most recently sent tensor. The next call of `send` overwrites them. This method
        waits only for the copy, not for work that was queued after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: NDArray[np.int32] = self._here.numpy()
        return values


_kept: dict[tuple[Any, ...], list[tuple[Tensor, torch.cuda.Event | None]]] = {}
