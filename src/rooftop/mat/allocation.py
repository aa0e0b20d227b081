"""The memory of Mats: blocks that headers share, and the allocators that make blocks.

A block (`MatData`) lives as long as any header, tensor or array refers to it. Python counts these references;
`data.headers` is the number of Mats among them. An allocator (`MatAllocator`) makes the blocks of
one device: pageable or pinned host memory, a GPU's memory through torch's caching allocator, or any function that
returns bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Literal

import torch
from torch import Tensor

from rooftop.words import counted

DeviceLike = str | torch.device
_ALIGNMENT_BYTES = 8  # size of a number of the widest depths: 64F, 64S and 64U


class MatDataFlag(Flag):
    """Special properties of a block of memory."""

    NONE = 0
    USER_GIVEN = auto()  # memory of another owner, such as a NumPy array; never grown in place
    READ_ONLY = auto()  # a read-only array
    PINNED = auto()  # page-locked host memory, for asynchronous copies to a GPU


class _Share:
    """An object to which a block and each of the block's Mats refer, so that its reference count tells how many Mats
    there are.
    """

    __slots__ = ()


class MatData:
    """One block of memory, shared by the headers that refer to it.

    Attributes:
        allocator: the allocator that made the block; None for memory that the caller passed in.
        start_bytes: offset of the block in its storage. An allocator may return slices of a larger tensor.
        size_bytes: size of the block.
        device: the device of the block.
        flags: `MatDataFlag`s of the block.
        mapping: the side that may access the block now: "host" for host memory, "device" for a GPU's memory. Within
            `Mat.mapped()`, a GPU's block is "host" too, and the data in GPU memory is out of date.
        used_bytes: offset in the storage up to which headers have had rows, including deleted headers. If the block has
            only one header, the end of that header's last row. A header grows in place only if its last row ends at
            this offset. So two headers of one block never push different rows to the same position. (In OpenCV, they
            can.)
    """

    __slots__ = ("__weakref__", "_bases", "allocator", "device", "flags", "mapping", "share", "size_bytes",
                 "start_bytes", "storage", "used_bytes")  # fmt: skip

    def __init__(
        self,
        storage: torch.UntypedStorage,
        size_bytes: int,
        allocator: MatAllocator | None = None,
        flags: MatDataFlag = MatDataFlag.NONE,
        start_bytes: int = 0,
    ) -> None:
        self.start_bytes = start_bytes
        self.storage, self.size_bytes, self.allocator, self.flags = storage, size_bytes, allocator, flags
        self.device = storage.device
        self.mapping: Literal["host", "device"] = "host" if self.device.type == "cpu" else "device"
        self.used_bytes = start_bytes + size_bytes
        self.share = _Share()
        self._bases: dict[torch.dtype, Tensor] = {}

    @property
    def headers(self) -> int:
        """The number of Mats that share the block."""
        return sys.getrefcount(self.share) - _REFERENCES_OF_ITS_OWN

    @property
    def read_only(self) -> bool:
        return MatDataFlag.READ_ONLY in self.flags

    @property
    def user_given(self) -> bool:
        return MatDataFlag.USER_GIVEN in self.flags

    def data_ptr(self) -> int:
        """The address of the block's first byte."""
        return self.storage.data_ptr() + self.start_bytes

    def check_mapping(self) -> None:
        """Check that the block may be used on its device.

        Raises:
            RuntimeError: this GPU block is mapped to the host.
        """
        if self.mapping == "host" and self.device.type != "cpu":
            raise RuntimeError(
                "this block is mapped to the host, so the copy on the device is outdated: leave the `with "
                "mat.mapped()` block first"
            )

    def strided(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
        """A tensor on the block. Strides and offset count elements of the dtype. The offset begins at the storage, not
        at the block."""
        self.check_mapping()
        base = self._bases.get(dtype)
        if base is None:
            # a tensor created in inference mode cannot be written outside of that mode
            with torch.inference_mode(False):
                base = torch.empty(0, dtype=dtype, device=self.device)
                base.set_(self.storage, 0, (0,), (1,))
            self._bases[dtype] = base
        return base.as_strided(shape, strides, offset)

    def __repr__(self) -> str:
        flags = "" if self.flags is MatDataFlag.NONE else f", {self.flags.name}"
        return f"MatData({self.size_bytes:,} bytes on {self.device}, headers: {self.headers}{flags})"


@dataclass(frozen=True, eq=False)
class MatAllocator:
    """Allocates the memory blocks of Mats.

    Attributes:
        name: a readable name.
        device: the device of the allocator's blocks.
        get_bytes: called with a size in bytes; returns a contiguous 1-D uint8 tensor of at least that size on the
            device. The tensor's storage decides how the memory is freed.
        flags: the flags of the allocator's blocks.
    """

    name: str
    device: torch.device
    get_bytes: Callable[[int], Tensor] = field(repr=False)
    flags: MatDataFlag = MatDataFlag.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_named(self.device))

    def allocate(self, size_bytes: int) -> MatData:
        """Allocate a block with undefined content.

        Raises:
            ValueError: `get_bytes` did not return a contiguous 1-D uint8 tensor of at least that size on the device, or
                the tensor's memory is not aligned.
        """
        given = self.get_bytes(size_bytes)
        fits = (
            isinstance(given, Tensor)
            and given.dtype == torch.uint8
            and given.dim() == 1
            and given.is_contiguous()
            and given.numel() >= size_bytes
            and same_device(given.device, self.device)
        )
        if not fits:
            raise ValueError(
                f"allocator {self.name!r} must give a contiguous 1-D uint8 tensor of {size_bytes} bytes or more on "
                f"{self.device}, got {_described(given)}"
            )
        if given.data_ptr() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"allocator {self.name!r} returned memory {given.data_ptr() % _ALIGNMENT_BYTES} bytes past a "
                f"multiple of {_ALIGNMENT_BYTES}: align it, because numbers of up to {_ALIGNMENT_BYTES} bytes are "
                "stored in it"
            )
        return MatData(given.untyped_storage(), size_bytes, self, self.flags, start_bytes=int(given.storage_offset()))


def getStdAllocator(device: DeviceLike = "cpu", *, pinned: bool = False) -> MatAllocator:
    """The allocator of a device: for pageable or pinned host memory, or for a GPU's memory through torch's caching
    allocator.

    Raises:
        ValueError: `pinned` was requested for GPU memory, or on a machine without a GPU; or the device does not exist.
    """
    where = device_named(device)
    if (found := _STANDARD.get((where, pinned))) is not None:  # checking for a GPU takes longer than an allocation
        return found
    if pinned and where.type != "cpu":
        raise ValueError(f"only host memory can be pinned, got device {where}: leave out pinned=True")
    if pinned and not torch.accelerator.is_available():
        raise ValueError(f"no GPU here (torch {torch.__version__}) for which to pin memory: leave out pinned=True")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"no CUDA device here (torch {torch.__version__}): use device='cpu'")
        if where.index is not None and where.index >= torch.cuda.device_count():
            raise ValueError(
                f"no device {where} here: torch can use {counted(torch.cuda.device_count(), 'GPU')}, from cuda:0 on"
            )
        where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    if (where, pinned) not in _STANDARD:
        _STANDARD[where, pinned] = _pinned_host() if pinned else _standard(where)
    return _STANDARD[where, pinned]


def getDefaultAllocator() -> MatAllocator:
    """The allocator that is used if the caller names neither an allocator nor a device."""
    return _WITHIN.get() or _DEFAULT[0]


def setDefaultAllocator(allocator: MatAllocator | None) -> None:
    """Set the default allocator for the whole program; None restores pageable host memory."""
    _DEFAULT[0] = _checked(allocator) if allocator is not None else getStdAllocator()


@contextmanager
def using_allocator(allocator: MatAllocator) -> Iterator[MatAllocator]:
    """Set the default allocator within a `with` block, only for this thread or task."""
    token = _WITHIN.set(_checked(allocator))
    try:
        yield allocator
    finally:
        _WITHIN.reset(token)


def allocator_for(device: DeviceLike | None, allocator: MatAllocator | None) -> MatAllocator:
    """Choose the allocator of a new Mat: the given allocator, else the default allocator if it is for that device, else
    the device's standard allocator."""
    if allocator is not None:
        _checked(allocator)
        if device is not None and not same_device(device_named(device), allocator.device):
            raise ValueError(f"got device {device} and an allocator of {allocator.device}: pass only one of the two")
        return allocator
    default = getDefaultAllocator()
    if device is None or same_device(device_named(device), default.device):
        return default
    return getStdAllocator(device)


def device_named(device: DeviceLike) -> torch.device:
    """Convert the name of a device to a `torch.device`.

    Raises:
        TypeError, ValueError: this is not a device's name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"a device is 'cpu', 'cuda', 'cuda:0' and so on, or a torch.device; got {device!r}") from error


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean the same device; "cuda" means the current GPU."""
    if one == other:
        return True
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    current = torch.cuda.current_device() if one.type == "cuda" and None in (one.index, other.index) else None
    return (current if one.index is None else one.index) == (current if other.index is None else other.index)


def _standard(device: torch.device) -> MatAllocator:
    return MatAllocator(
        "host" if device.type == "cpu" else str(device),
        device,
        lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8, device=device),
    )


def _pinned_host() -> MatAllocator:
    return MatAllocator(
        "pinned host",
        torch.device("cpu"),
        lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True, device="cpu"),
        MatDataFlag.PINNED,
    )


def _checked(allocator: MatAllocator) -> MatAllocator:
    if not isinstance(allocator, MatAllocator):
        raise TypeError(
            f"expected a MatAllocator as allocator, got {type(allocator).__name__}: getStdAllocator(device) returns "
            "the allocator of a device"
        )
    return allocator


def _described(given: object) -> str:
    if not isinstance(given, Tensor):
        return type(given).__name__
    return f"{given.dtype} {tuple(given.shape)} on {given.device}"


_REFERENCES_OF_ITS_OWN = 0
_REFERENCES_OF_ITS_OWN = MatData(torch.UntypedStorage(0), 0).headers  # the reference count for a block without Mats
_STANDARD: dict[tuple[torch.device, bool], MatAllocator] = {}
_DEFAULT = [getStdAllocator()]
_WITHIN: ContextVar[MatAllocator | None] = ContextVar("rooftop_mat_allocator", default=None)
