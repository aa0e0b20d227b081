"""Show the memory in use (`memory_summary`), measure the memory that a block of code needs (`track`), and give memory
back (`release`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rooftop.hardware.device import gpu_uuid
from rooftop.hardware.nvml import nvml_session
from rooftop.hardware.observing import ObservingMode
from rooftop.words import counted


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device in bytes; None means unknown.

    Attributes:
        device: "cuda:0", ..., or "cpu".
        allocated_bytes: bytes held by live tensors of this process.
        reserved_bytes: bytes that PyTorch's caching allocator holds on the device, including unused memory that it
            keeps for later.
        peak_bytes: most bytes allocated since the start or the last reset (`track` resets it).
        free_bytes: free memory on the device.
        total_bytes: memory of the device.
        limit_bytes: the most that this process may reserve (`torch.cuda.set_per_process_memory_fraction`); None: no
            limit.
    """

    device: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    free_bytes: int | None
    total_bytes: int
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Released:
    """How many bytes of one GPU `release` freed, and how many it could not free.

    Attributes:
        device: "cuda:0", ...
        released_bytes: bytes given back to the device.
        allocated_bytes: bytes kept, because live tensors hold them.
        fragmented_bytes: bytes kept although no tensor holds them, because a live tensor is in the same allocator
            segment.
    """

    device: str
    released_bytes: int
    allocated_bytes: int
    fragmented_bytes: int


@dataclass
class TrackedMemory:
    """Memory of a block of code, in bytes. The values are complete when the block has ended.

    Attributes:
        device: the device.
        before_bytes, after_bytes: bytes allocated at the start and at the end of the block.
        peak_bytes: most bytes allocated at any time in the block.
    """

    device: torch.device
    before_bytes: int
    after_bytes: int
    peak_bytes: int

    @property
    def peak_increase_bytes(self) -> int:
        """The peak minus the bytes allocated at the start."""
        return self.peak_bytes - self.before_bytes


def memory_summary() -> list[DeviceMemory]:
    """The memory of each GPU, then of the CPU. The CPU's allocated, reserved and peak bytes are None, because PyTorch
    does not count them.
    """
    with nvml_session() as nvml:
        found = []
        for index in range(torch.cuda.device_count()):
            # The driver reports free memory without a CUDA context. torch.cuda.mem_get_info would create a context on
            # each GPU.
            free = nvml.gpu(gpu_uuid(index), lambda nvml, h: nvml.nvmlDeviceGetMemoryInfo(h).free)
            found.append(gpu_memory(index, free))
    host = psutil.virtual_memory()
    return [*found, DeviceMemory("cpu", None, None, None, host.available, host.total)]


def gpu_memory(index: int, free_bytes: int | None) -> DeviceMemory:
    """The memory of one GPU; the caller passes the GPU's free bytes, or None if they are unknown."""
    total = torch.cuda.get_device_properties(index).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    return DeviceMemory(
        f"cuda:{index}",
        torch.cuda.memory_allocated(index),
        torch.cuda.memory_reserved(index),
        torch.cuda.max_memory_allocated(index),
        free_bytes,
        total,
        int(fraction * total) if fraction < 1 else None,
    )


def release() -> list[Released]:
    """Give back to each GPU the memory that the caching allocator holds but no tensor needs. Without a GPU the result
    is [].

    Collects garbage first, so that tensors in reference cycles are freed.
    """
    gc.collect()
    indices = range(torch.cuda.device_count())
    before = [torch.cuda.memory_reserved(index) for index in indices]
    torch.cuda.empty_cache()
    found = []
    for index in indices:
        reserved, allocated = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
        found.append(Released(f"cuda:{index}", before[index] - reserved, allocated, reserved - allocated))
    return found


@contextmanager
def track(device: torch.device | str | None = None) -> Iterator[TrackedMemory]:
    """Measure the memory of a block of code. Blocks may be nested.

    On a GPU, tracking reads counters of the allocator, which cover all threads. Tracking resets PyTorch's peak counter
    at the start; enclosing blocks on that GPU keep their peak. On the CPU, tracking counts, from 0, the bytes of
    storages that PyTorch operators create in the block. Earlier storages, workspaces of kernels, and allocations of
    compiled code (`torch.compile`) are not counted.

    Args:
        device: by default the current GPU, or the CPU if there is no GPU.

    Raises:
        ValueError: the device is not on this machine.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpus = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise ValueError(
            f"track({device}): expected cpu or a GPU of this machine; torch can use {counted(gpus, 'GPU')}"
        )
    with _tracked_gpu(device) if device.type == "cuda" else _tracked_cpu(device) as tracked:
        yield tracked


_open_blocks: list[TrackedMemory] = []
"""The running blocks on GPUs. Before the peak counter is reset, each block must get the counter's value."""


@contextmanager
def _tracked_gpu(device: torch.device) -> Iterator[TrackedMemory]:
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    before, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    for outer in _open_blocks:
        if outer.device == device:
            outer.peak_bytes = max(outer.peak_bytes, peak)
    torch.cuda.reset_peak_memory_stats(device)
    tracked = TrackedMemory(device, before, before, before)
    _open_blocks.append(tracked)
    try:
        yield tracked
    finally:
        _open_blocks[:] = [block for block in _open_blocks if block is not tracked]
        tracked.after_bytes = torch.cuda.memory_allocated(device)
        tracked.peak_bytes = max(tracked.peak_bytes, torch.cuda.max_memory_allocated(device))


@contextmanager
def _tracked_cpu(device: torch.device) -> Iterator[TrackedMemory]:
    tracked = TrackedMemory(device, 0, 0, 0)
    with _StorageCount(tracked) as count:
        try:
            yield tracked
        finally:
            count.close()


class _StorageCount(ObservingMode):
    """Count the bytes of the storages that operators allocate in the block. The bytes of a freed storage are
    subtracted.
    """

    def __init__(self, tracked: TrackedMemory) -> None:
        super().__init__()
        self._tracked = tracked
        # address of a storage in C++ -> its bytes; None if the storage existed before the block
        self._sizes: dict[int, int | None] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._closed = False

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # for torch.tensor(...) the new tensor is the argument of lift_fresh
        if func is not torch.ops.aten.lift_fresh.default:
            for storage in self._storages((args, kwargs)):
                if storage._cdata not in self._sizes:
                    self._watch(storage, None)
        result = func(*args, **kwargs)
        for storage in self._storages(result):
            if storage._cdata not in self._sizes:
                self._watch(storage, storage.nbytes())
            elif (counted := self._sizes[storage._cdata]) is not None:  # the storage may have been resized
                self._add(storage.nbytes() - counted)
                self._sizes[storage._cdata] = storage.nbytes()
        return result

    def close(self) -> None:
        """Stop counting. Storages that are freed later do not change the count."""
        self._closed = True
        self._alive.clear()

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]

    def _watch(self, storage: torch.UntypedStorage, size_bytes: int | None) -> None:
        key = storage._cdata

        def freed(_: object) -> None:
            if not self._closed:
                del self._alive[key]
                self._add(-(self._sizes.pop(key) or 0))

        self._sizes[key] = size_bytes
        self._alive[key] = weakref.ref(storage, freed)
        self._add(size_bytes or 0)

    def _add(self, size_bytes: int) -> None:
        self._tracked.after_bytes += size_bytes
        self._tracked.peak_bytes = max(self._tracked.peak_bytes, self._tracked.after_bytes)
