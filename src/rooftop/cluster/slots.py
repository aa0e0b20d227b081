"""The memory that a decoding process shares with its worker, in slots, and how tensors get into a slot and out of it.

    arena = Arena()                                     # before the fork
    writer = Writer(file, arena.slots()[slot])          # in the decoding process: tensors go into the slot
    writer.add(value)
    Lending(content, arena.lend(slot, writer.end, arena.free)).load()     # in the worker: tensors are the slot's memory

`decoders.py` decides which slot a task uses, and when a slot is pinned.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

COPIED_SLOTS, LENT_SLOTS = 2, 8  # slots per process: to copy tensors from, and for tensors in place; a task uses one
COPIED_BYTES, LENT_BYTES = 256 << 20, 48 << 20  # bytes of each such slot; only written pages take memory
SPARE = 1.25  # number of bytes to pin in a slot, as a multiple of the bytes that its present contents occupy
PAGE = 4096
ALIGNMENT = 64
END = struct.Struct("q")  # the last bytes of a task's result: the number of bytes that its tensors occupy in the slot


class Arena:
    """The memory that a decoding process shares with the worker.

    Attributes:
        free: the slots that can be lent now: all tensors that used them before are freed.
        freed: slots whose tensors a function of the user, which uses the GPU, has freed. The GPU may still read these
            slots.
    """

    def __init__(self) -> None:
        size = COPIED_SLOTS * COPIED_BYTES + LENT_SLOTS * LENT_BYTES
        self._file = os.memfd_create("rooftop decoder")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self.free = deque(range(COPIED_SLOTS, COPIED_SLOTS + LENT_SLOTS))
        self.freed = deque[int]()
        self._pinned: dict[int, tuple[int, int]] = {}  # slot -> its address, and the bytes that are pinned

    def slots(self) -> list[Any]:
        """Map the arena's memory in the decoding process, and return the bytes of each slot. The worker's mapping is
        not used, since memory that CUDA has pinned is not always inherited."""
        memory = mmap.mmap(self._file, len(self._memory))
        places = map(_place, range(COPIED_SLOTS + LENT_SLOTS))
        return [np.frombuffer(memory, np.uint8, size, first) for first, size in places]

    def read(self, slot: int, size: int) -> Any:
        """The first `size` bytes of a slot, from which tensors are copied."""
        return np.frombuffer(self._memory, np.uint8, size, _place(slot)[0])

    def lend(self, slot: int, size: int, free: deque[int]) -> Any:
        """Lend the first `size` bytes of a slot to tensors. When all these tensors are freed, the slot is added to
        `free`."""
        bytes_ = (ctypes.c_char * size).from_buffer(self._memory, _place(slot)[0])
        weakref.finalize(bytes_, free.append, slot).atexit = False
        return bytes_

    def pinned(self, slot: int) -> int:
        """The number of bytes at the beginning of a slot that are pinned."""
        return self._pinned.get(slot, (0, 0))[1]

    def pin(self, slot: int, size: int) -> bool:
        """Pin at least the first `size` bytes of a slot, so that a GPU reads them directly. Return whether the system
        allows pinning."""
        address, pinned = self._pinned.get(slot, (0, 0))
        if size <= pinned:
            return True
        if pinned:
            unregister(address)
            del self._pinned[slot]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, _place(slot)[0]))
        pinned = min(LENT_BYTES, -(-int(SPARE * size) // PAGE) * PAGE)
        if not register(address, pinned):
            return False
        self._pinned[slot] = address, pinned
        return True

    def close(self) -> None:
        """Unpin the memory. The memory is unmapped when all tensors that use it are freed."""
        for address, _ in self._pinned.values():
            unregister(address)
        self._pinned.clear()
        os.close(self._file)


def _place(slot: int) -> tuple[int, int]:
    """Return (first byte, size in bytes) of a slot. The COPIED_SLOTS, from which the worker copies tensors, come before
    the LENT_SLOTS, whose memory the worker's tensors use."""
    if slot < COPIED_SLOTS:
        return slot * COPIED_BYTES, COPIED_BYTES
    return COPIED_SLOTS * COPIED_BYTES + (slot - COPIED_SLOTS) * LENT_BYTES, LENT_BYTES


def register(address: int, size: int) -> bool:
    """Pin memory for CUDA. Return False if the system does not allow pinning."""
    return not int(torch.cuda.cudart().cudaHostRegister(address, size, 0))


def unregister(address: int) -> None:
    """Unpin memory that was pinned by `register`."""
    torch.cuda.cudart().cudaHostUnregister(address)


# ---- values -------------------------------------------------------------------------------------------------------


class Writer(pickle.Pickler):
    """A pickler that writes tensors to a slot if they fit there. The pickled bytes contain all other tensors.

    Attributes:
        end: number of bytes at the beginning of the slot that tensors occupy so far.
    """

    def __init__(self, file: io.BytesIO, slot: Any) -> None:
        super().__init__(file, protocol=5)
        self._file, self._slot, self.end = file, slot, 0

    def add(self, value: Any) -> None:
        """Write a value, which a reader's next `load` returns. The writer keeps no reference to the value.

        If the value cannot be pickled, nothing of it is written, and the pickler's error is raised.
        """
        written, end = self._file.tell(), self.end
        try:
            self.dump(value)
        except BaseException:
            self._file.seek(written)
            self._file.truncate()
            self.end = end
            raise
        finally:
            self.clear_memo()

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.requires_grad or not value.numel():
            return None
        content = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        first = self.end
        if first + len(content) > len(self._slot):
            return None
        np.copyto(self._slot[first : first + len(content)], content)
        self.end += -(-len(content) // ALIGNMENT) * ALIGNMENT
        return first, len(content), value.dtype, tuple(value.shape)


class Reader:
    """Reads the pickled values of a `Writer` that has put no tensors into its slot of shared memory."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)

    def load(self) -> Any:
        """Unpickle the next value that the writer has added."""
        return _Unpickler(self._file, self.tensor).load()

    def tensor(self, place: Any) -> Tensor:
        """Return the tensor at a place in the slot, which the writer has pickled instead of the tensor. This class has
        no slot, so it raises UnpicklingError."""
        raise pickle.UnpicklingError(f"found a tensor at {place}, but this task wrote no tensors to its slot")


class _Unpickler(pickle.Unpickler):
    """Unpickles one value. Each value needs an unpickler of its own, since the writer numbers its objects from 0."""

    def __init__(self, file: io.BytesIO, tensor: Callable[[Any], Tensor]) -> None:
        super().__init__(file)
        self._tensor = tensor

    def persistent_load(self, place: Any) -> Tensor:
        return self._tensor(place)


class Lending(Reader):
    """A reader whose tensors are the memory of a slot.

    Each tensor has its own storage, so saving one tensor does not save the others.

    Args:
        slot: the object from `Arena.lend`.
    """

    def __init__(self, content: bytes, slot: Any) -> None:
        super().__init__(content)
        self._slot = slot

    def tensor(self, place: Any) -> Tensor:
        first, size, dtype, shape = place
        return torch.frombuffer(self._slot, dtype=dtype, count=size // dtype.itemsize, offset=first).reshape(shape)


class Copying(Reader):
    """A reader that copies tensors out of a slot.

    If `pinned` is set, all tensors of a task are copied together into pinned memory. A copy for each tensor would be
    slower: each copy releases the GIL, and waits for the GIL again while the worker's main thread computes. Unpinned
    tensors may be passed to a user's function, which may keep or save one of them. So each unpinned tensor has its own
    memory.
    """

    def __init__(self, content: bytes, slot: Any, pinned: bool) -> None:
        super().__init__(content)
        self._slot = slot
        self._pinned = _copied(slot, pinned=True) if pinned and len(slot) else None

    def tensor(self, place: Any) -> Tensor:
        first, size, dtype, shape = place
        part = slice(first, first + size)
        own = _copied(self._slot[part]) if self._pinned is None else self._pinned[part]
        return own.view(dtype).reshape(shape)


def _copied(content: Any, pinned: bool = False) -> Tensor:
    own = torch.empty(len(content), dtype=torch.uint8, pin_memory=pinned)
    np.copyto(own.numpy(), content)
    return own
