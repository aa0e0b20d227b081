"""Host memory that the device uses: rows that kernels read, and a copy of a tensor.

If there are few rows, a copy to the device would take the host more time.
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
    """Rows that the host writes and a kernel reads.

    PyTorch's allocator does not know when kernels read the rows. So memory that is no longer needed is kept, and the
    next `HostRows` with the same shape reuses it.

    Attributes:
        rows: the rows, as an array of NumPy. Call `wait` before you write.
        there: the same rows, as an array of Warp on the device.
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
    """A copy of a tensor on the host, always in the same memory.

    Args:
        count: number of the tensor's elements, of int32.
        device: device of the tensor.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._here = torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def send(self, tensor: Tensor) -> None:
        """Start to copy the tensor, after the work queued so far."""
        self._here.copy_(tensor, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> NDArray[np.int32]:
        """Return the values that were sent last; the next call of `send` overwrites them. This method waits only for
        the copy, not for work queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: NDArray[np.int32] = self._here.numpy()
        return values


_kept: dict[tuple[Any, ...], list[tuple[Tensor, torch.cuda.Event | None]]] = {}
