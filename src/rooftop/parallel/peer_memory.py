"""Memory on each rank's GPU that the other ranks' GPUs can write to. Kernels get the addresses of this memory.

Each rank allocates memory by the CUDA driver, and sends a CUDA IPC handle to the other ranks, which map the memory.
Kernels can then store to the mapped memory over NVLink or PCIe. The memory is never freed before the process ends,
because another rank may still have it mapped. NVLink multicast is not used.

Source: NVIDIA, CUDA Driver API, "Unified Addressing" and "Memory Management" (cuIpcGetMemHandle, cuIpcOpenMemHandle).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rooftop.hardware.device import gpu_uuid
from rooftop.hardware.streams import ensure_context
from rooftop.parallel.process_states import Process

ALIGNMENT_BYTES = 2 << 20
"""Sizes are rounded up to multiples of this number. Allocations smaller than this number may share a block, whose
handle would expose all allocations in the block."""
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


@dataclass(frozen=True)
class PeerMemory:
    """The memory of all ranks of a process group, as one rank sees it.

    Attributes:
        addresses: address of each rank's memory, by index in the group, valid on this rank's GPU; empty if refused.
        refused: why the ranks cannot write into each other's memory, the same on all ranks; empty if they can.
    """

    addresses: tuple[int, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class Offer:
    """A rank's message to the other ranks: its machine, its GPU, and the handle of its memory. Without memory, `failed`
    says why."""

    machine: str
    gpu: str
    handle: bytes = b""
    failed: str = ""


def peer_memory(bytes: int, group: ProcessGroup, device: torch.device, lacking: str = "") -> PeerMemory:
    """On each rank's GPU, allocate memory of size `bytes`, filled with zeros, and map it on all ranks. All ranks must
    call this. The call waits for all ranks and for the GPU.

    Args:
        lacking: why this rank cannot use such memory (e.g. a missing compiler), or "" if it can. If any rank cannot use
            it, all ranks are refused.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # makes the CUDA context current, in which the driver allocates
        own, offer = _offered(bytes, device, lacking)
        offers = of_all(offer, group)
        refused = refusal(offers)
        if refused:
            return PeerMemory(refused=refused)
        addresses, failed = [], ""
        for rank, each in enumerate(offers):
            try:
                addresses.append(own if rank == group.rank() else mapped(each.handle))
            except OSError as error:
                failed = f"rank {group.rank()} cannot map the memory of rank {rank}: {error}"
                break
        failures = [each for each in of_all(failed, group) if each]
        return PeerMemory(refused=failures[0]) if failures else PeerMemory(tuple(addresses))


def refusal(offers: list[Offer]) -> str:
    """The reason why the ranks that sent these offers cannot map each other's memory; "" if no reason is known yet."""
    failures = [f"rank {rank}: {offer.failed}" for rank, offer in enumerate(offers) if offer.failed]
    if failures:
        return failures[0]
    if len({offer.machine for offer in offers}) > 1:
        return "the ranks are on several machines or in several containers"
    if len({offer.gpu for offer in offers}) < len(offers):
        return "some ranks share a GPU"
    return ""


def _offered(bytes: int, device: torch.device, lacking: str) -> tuple[int, Offer]:
    """Allocate `bytes` of memory on this rank's GPU. Return its address (0 if that failed), and the offer that this
    rank sends to the other ranks."""
    machine, gpu = Process.here().machine, gpu_uuid(torch.cuda.current_device()) or str(device)
    if lacking:
        return 0, Offer(machine, gpu, failed=lacking)
    try:
        address, handle = allocated(bytes)
    except OSError as error:
        return 0, Offer(machine, gpu, failed=str(error))
    # the zeros must be written before other ranks get the offer, after which they may write
    torch.cuda.synchronize(device)
    return address, Offer(machine, gpu, handle)


def of_all(own: Any, group: ProcessGroup) -> list[Any]:
    """The value `own` of every rank, in a list by the rank's index in the group. All ranks must make this call."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


# ---- waits that end ------------------------------------------------------------------------------------------------

_stops: list[Tensor] = []
"""The stop tensors of all groups so far. The tensors are kept for kernels that still wait after their group has
ended."""


def stop_of_waits() -> Tensor:
    """A pinned tensor (1,), int32, which kernels poll while they wait for other ranks. `end_waits` sets it to 1."""
    _stops.append(torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available()))
    return _stops[-1]


def end_waits() -> None:
    """End all waits of kernels for other ranks, now and later, after a group has failed. The kernels' results are then
    undefined.
    """
    for stop in _stops:
        stop.fill_(1)


# ---- the driver ----------------------------------------------------------------------------------------------------


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def allocated(bytes: int) -> tuple[int, bytes]:
    """Allocate zeros on the current device. Return their address, and the handle by which other processes map them.

    Raises:
        OSError: there is no driver, or the driver refuses the allocation.
    """
    size = -(-bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    address, handle = ctypes.c_uint64(), _Handle()
    if torch.cuda.is_available():
        ensure_context()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address.value, memoryview(handle).tobytes()


def mapped(handle: bytes) -> int:
    """Map another process's memory, and return its address on the current device.

    Raises:
        OSError: the driver refuses the mapping, for example between GPUs that cannot access each other.
    """
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def _call(function: str, *arguments: object) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, function)(*arguments)
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise OSError(f"{function} failed: {(name.value or b'unknown error').decode()}")
