"""Base class of `Mat`: headers that can allocate memory, without operators and copies."""

from __future__ import annotations

from typing import Any, Self

import torch

from rooftop.hardware.large_tensors import MOST_BYTES, check_host_memory, too_large
from rooftop.mat import headers
from rooftop.mat.allocation import DeviceLike, MatAllocator, allocator_for, same_device
from rooftop.mat.exports import ExportedHeader
from rooftop.mat.headers import Sizes
from rooftop.mat.interchange import parts_of
from rooftop.mat.type_codes import CV_MAT_CN, depth_of, typeToString
from rooftop.mat.views import Header, is_integer


class Block(ExportedHeader):
    """A header that can get memory: new memory, another header's memory, or the memory of another library's array."""

    __slots__ = ()

    def create(
        self, *shape: Any, type: int | None = None, device: DeviceLike | None = None,
        allocator: MatAllocator | None = None,
    ) -> Self:  # fmt: skip
        """Make this a Mat of the given sizes and type: `create(rows, cols, type)` or `create(sizes, type)`.

        If sizes, type and device stay the same, nothing is allocated, so results can be written into regions. If sizes,
        type or device change, this Mat drops its reference to the old memory and gets new, uninitialized memory from
        `allocator`. By default, `allocator` is this Mat's own allocator, or on another device the one that
        `allocator_for` chooses. If the allocation fails, this Mat becomes empty, and the error is raised.
        """
        sizes, type, _ = shape_arguments(shape, type, None)
        where = self._device if device is None and allocator is None else allocator_for(device, allocator).device
        if sizes == self._sizes and type == self._type and same_device(where, self._device):
            return self
        if allocator is None and same_device(where, self._device):
            allocator = self._own_allocator()
        self._allocate(sizes, type, allocator or allocator_for(where, None))
        return self

    def prepare_for(self, sizes: Sizes, type: int, device: torch.device) -> None:
        """Call `create` for a result of these sizes on this device.

        Raises:
            ValueError: this Mat has elements on another device than the result.
        """
        fits = same_device(self._device, device)
        if not fits and not self.empty():
            raise ValueError(f"a result on {device} cannot be stored in {self}: move one of them with to(device)")
        if not (fits and self._sizes == sizes and self._type == type):
            self.create(sizes, type, device=device)

    # Internal.

    def _allocate(self, sizes: Sizes, type: int, allocator: MatAllocator) -> None:
        self._set_empty(type, sizes, allocator.device)
        size_bytes = self.total() * self.elemSize()
        if size_bytes:
            try:
                self._data = allocator.allocate(size_bytes)
            except BaseException as error:
                self._set_empty(type, (), allocator.device)  # no Mat has elements without memory
                check_host_memory(_told(sizes, type), size_bytes, error)
                raise
            self._share, self._device = self._data.share, self._data.device
            self._offset = self._start = self._data.start_bytes
            self._finish()

    def _set_empty(self, type: int, sizes: Sizes, device: torch.device) -> None:
        self._type, self._sizes, self._device = type, sizes, device
        self._steps = headers.natural_steps(sizes, depth_of(type).size_bytes * CV_MAT_CN(type))
        self._data = self._share = self._cached = None
        self._offset = self._start = self._end = self._limit = 0
        self._submatrix = False

    def _finish(self) -> None:
        """Set `_end`, where the last row ends, and `_limit`, up to where rows can be appended. The header must not be a
        region of another header.
        """
        self._end = self._offset + headers.span_bytes(self._sizes, self._steps)
        self._limit = self._offset + self._sizes[0] * self._steps[0] if self._data is not None else self._offset

    def _become(self, other: Header) -> None:
        for name in Header.__slots__:
            if name != "__weakref__":
                setattr(self, name, getattr(other, name))

    def _look_at(self, thing: Any, type: int | None, layout: str) -> None:
        """Make this a header on the memory of another library's array."""
        parts = parts_of(thing, type, layout)
        self._type, self._sizes, self._steps, self._device = parts.type, parts.sizes, parts.steps, parts.device
        self._data, self._share = parts.data, parts.data and parts.data.share
        self._offset = self._start = parts.offset
        self._submatrix, self._cached = False, None
        self._finish()

    def _own_allocator(self) -> MatAllocator:
        if self._data is not None and self._data.allocator is not None:
            return self._data.allocator
        return allocator_for(self._device, None)


def new_block(sizes: Sizes, type: int, device: torch.device) -> Block:
    """Allocate uninitialized memory with the device's allocator."""
    new = Block()
    new._allocate(sizes, type, allocator_for(device, None))
    return new


def block_on(thing: Any) -> Block:
    """A header on another library's array.

    Raises:
        TypeError, ValueError: as in `Mat(array)`.
    """
    new = Block()
    new._look_at(thing, None, "hwc")
    return new


def shape_arguments(given: tuple[Any, ...], type: int | None, value: Any) -> tuple[Sizes, int, Any]:
    """Parse (rows, cols, type, value) or (sizes, type, value) to sizes, type and value."""
    sizes: Sizes
    rest: tuple[Any, ...]
    if len(given) >= 2 and all(is_integer(each) for each in given[:2]):
        sizes, rest = (int(given[0]), int(given[1])), given[2:]
    elif given and isinstance(given[0], (tuple, list, torch.Size)) and all(is_integer(each) for each in given[0]):
        sizes, rest = tuple(int(each) for each in given[0]), given[1:]
    else:
        is_umat = bool(given) and given[0].__class__.__name__ == "UMat"
        raise TypeError(
            "expected (rows, cols, type), (sizes, type) or an array, got "
            f"{', '.join(map(repr, given)) or 'no sizes'}; "
            + ("its get() copies it to an array" if is_umat else "np.array(...) makes an array of numbers")
        )
    if rest and type is None:
        type, rest = rest[0], rest[1:]
    if rest and value is None:
        value, rest = rest[0], rest[1:]
    if rest:
        raise TypeError(f"{len(rest)} arguments too many: expected (rows, cols, type, value) or (sizes, type, value)")
    if type is None:
        raise TypeError(f"sizes {sizes} came without a type: pass one, such as CV_8UC3")
    span_bytes = depth_of(type).size_bytes * CV_MAT_CN(type)
    for size in sizes:
        if size < 0:
            raise ValueError(f"sizes must be at least 0, got {sizes}")
        span_bytes *= size or 1  # PyTorch's strides also count a size of 0 as 1
    if span_bytes > MOST_BYTES:
        raise ValueError(too_large(_told(sizes, type), span_bytes))
    return sizes, type, value


def _told(sizes: Sizes, type: int) -> str:
    return f"a Mat of {' x '.join(map(str, sizes))} {typeToString(type)}"
