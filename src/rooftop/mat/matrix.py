"""`Mat`: an array on the CPU or a GPU with the semantics of cv::Mat.

Names, arguments and results are OpenCV's, if OpenCV has them; docs/mat.md lists the differences. `views.py` defines
headers and views, `exports.py` the interfaces for other libraries, and `growth.py` adds and removes rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rooftop.mat import growth
from rooftop.mat.allocation import DeviceLike, MatAllocator, allocator_for, device_named, same_device
from rooftop.mat.blocks import Block, shape_arguments
from rooftop.mat.conversions import scales_wholes
from rooftop.mat.converting import convert
from rooftop.mat.copies import apart, copy_masked, fill
from rooftop.mat.evaluation import evaluate_into, store
from rooftop.mat.expressions import Arithmetic, MatExpr, Operand, leaf
from rooftop.mat.headers import Sizes
from rooftop.mat.interchange import is_foreign
from rooftop.mat.scalars import Scalar, ScalarLike, element
from rooftop.mat.type_codes import (
    CV_8S,
    CV_8U,
    CV_MAKETYPE,
    CV_MAT_CN,
    CV_MAT_DEPTH,
    CV_Bool,
    depth_of,
    type_code,
    typeToString,
)
from rooftop.mat.vector_products import cross, dot
from rooftop.mat.views import Range


class Mat(Block, Arithmetic):
    """An n-dimensional array of elements with 1 to 512 channels; other Mats may share its memory."""

    __slots__ = ()

    def __init__(
        self,
        *given: Any,
        type: int | None = None,
        value: ScalarLike | None = None,
        device: DeviceLike | None = None,
        allocator: MatAllocator | None = None,
        layout: Literal["hwc", "chw"] = "hwc",
    ) -> None:
        """Make an empty Mat, one with new memory, or a header on existing memory.

            Mat()
            Mat(rows, cols, type), Mat(rows, cols, type, value)
            Mat(sizes, type), Mat(sizes, type, value)      sizes: a tuple, rows first
            Mat(array), Mat(array, type)                   NumPy, OpenCV-Python, torch, DLPack, CUDA arrays: no copy
            Mat(other)                                     shares the memory of another Mat
            Mat(expression), Mat(expression, type)         its value, in new memory

        Args:
            type: for example CV_8UC3. If None, an array (H, W, C) of up to 512 channels becomes an image, and an array
                of any other shape gets one channel.
            value: written to every element of new memory; without it, new memory is not initialized.
            device: the device of new memory.
            allocator: allocator of new memory; if None, the default allocator or the device's allocator.
            layout: "chw" for an array (C, H, W) whose channels are interleaved in memory (channels_last).

        Raises:
            TypeError: an argument has a wrong type, or no depth has this dtype.
            ValueError: a size is negative or too large, the device does not exist, or the memory cannot be a Mat
                without a copy (the message names the call that copies).
            MemoryError: the host has too little memory. On a GPU, PyTorch raises `torch.OutOfMemoryError`.
        """
        if given and (isinstance(given[0], Arithmetic) or is_foreign(given[0])):
            self._init_from(given, type, value, device, allocator, layout)
            return
        if not given and type is None and value is None:
            self._set_empty(CV_8U, (), allocator_for(device, allocator).device)
            return
        sizes, type, value = shape_arguments(given, type, value)
        self._allocate(sizes, type, allocator_for(device, allocator))
        if value is not None:
            self.setTo(value)

    def _init_from(
        self,
        given: tuple[Any, ...],
        type: int | None,
        value: ScalarLike | None,
        device: DeviceLike | None,
        allocator: MatAllocator | None,
        layout: str,
    ) -> None:
        if len(given) == 2 and type is None:
            type = given[1]
        elif len(given) > 1:
            raise TypeError(
                f"Mat(array) takes an array and a type, got {len(given)} arguments: use m[rows, cols] to cut a region"
            )
        if value is not None or device is not None or allocator is not None:
            raise TypeError(
                "value, device and allocator apply to new memory, but this Mat shares the memory of its argument: "
                "call setTo(value), to(device) or clone() afterwards"
            )
        source = given[0]
        if isinstance(source, MatExpr):
            self._become(source.to_mat(type))
            return
        if isinstance(source, Mat):
            if type is not None and type != source._type:
                raise TypeError(
                    f"{source} cannot be viewed as {typeToString(type)}: convertTo another depth, or reshape to other "
                    "channels"
                )
            self._become(source)
            return
        self._look_at(source, type, layout)

    @classmethod
    def from_dlpack(cls, thing: Any, type: int | None = None) -> Mat:
        """A header on the memory that another library exports by DLPack, on its device."""
        return cls(from_dlpack(thing), type)

    @classmethod
    def zeros(cls, *shape: Any, device: DeviceLike | None = None, allocator: MatAllocator | None = None) -> Mat:
        """A Mat of zeros: `zeros(rows, cols, type)` or `zeros(sizes, type)`."""
        return cls(*shape, value=0, device=device, allocator=allocator)

    @classmethod
    def ones(cls, *shape: Any, device: DeviceLike | None = None, allocator: MatAllocator | None = None) -> Mat:
        """Like `zeros`, but with ones in the first channel, as in OpenCV; `Mat(..., value=1)` sets all channels."""
        m = cls(*shape, device=device, allocator=allocator)
        return m.setTo(m._first_channel(1))

    @classmethod
    def eye(cls, *shape: Any, device: DeviceLike | None = None, allocator: MatAllocator | None = None) -> Mat:
        """A matrix with ones on its diagonal, in the first channel."""
        m = cls(*shape, value=0, device=device, allocator=allocator)
        if m.dims != 2:
            raise ValueError(f"eye takes two sizes, got {m._sizes}")
        if m.total():
            m.diag().setTo(m._first_channel(1))
        return m

    # Copies.

    def __setitem__(self, index: Range | tuple[Range, ...], value: Any) -> None:
        """Write an element or a region from a Scalar, or from a Mat or array with the region's sizes and type.

        The value of an expression is stored as numbers of the region's depth.
        """
        place = self._indices(index)
        if isinstance(place, int):
            sizes, steps = (1,) * self.dims, self._steps
            self._header(sizes, steps, place, True).setTo(value)
            return
        region = self._cut(place)
        if isinstance(value, MatExpr):
            region._store(value)
            return
        if not isinstance(value, Mat) and not (isinstance(value, np.ndarray | Tensor) and value.ndim > 1):
            region.setTo(value)
            return
        source = value if isinstance(value, Mat) else Mat(value)
        if source._data is region._data and source._place_in_memory() == region._place_in_memory():
            return  # Python assigns the view to itself after `m[range] += 5`
        if source._sizes != region._sizes or source._type != region._type:
            raise ValueError(
                f"{source} cannot be assigned to a region {region}: sizes and types must be equal; "
                "convertTo changes the type"
            )
        source.copyTo(region)

    def assign(self, expression: Mat | MatExpr) -> Self:
        """Evaluate an expression into this Mat, like `m = expression` in C++. The Mat keeps its memory if size and type
        stay the same.

        If the argument is a Mat, this Mat shares the argument's memory, as `Mat(other)` does.
        """
        if isinstance(expression, Mat):
            self._become(expression)
            return self
        store(expression, self)
        return self

    # In-place operators write into this Mat's memory, as numbers of its depth. For two Mats, `*=` is the matrix
    # product, like `*`.

    def __iadd__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__add__(other))

    def __isub__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__sub__(other))

    def __imul__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__mul__(other))

    def __imatmul__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__matmul__(other))

    def __itruediv__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__truediv__(other))

    def __iand__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__and__(other))

    def __ior__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__or__(other))

    def __ixor__(self, other: Operand) -> Self:  # type: ignore[override]
        return self._stored(self.__xor__(other))

    def _stored(self, expression: MatExpr) -> Self:
        if expression is NotImplemented:
            return NotImplemented
        self._store(expression)
        return self

    def _place_in_memory(self) -> tuple[object, ...]:
        return self._type, self._sizes, self._steps, self._offset

    def _store(self, expression: MatExpr) -> None:
        """Store the value of an expression with this Mat's size, as numbers of its depth."""
        if expression._sizes != self._sizes or expression.channels() != self.channels():
            raise ValueError(f"{expression!r} cannot be assigned to a region {self}: sizes and channels must be equal")
        store(expression, self, self.depth())

    def copyTo(self, dst: Mat | None = None, mask: MatLike | None = None) -> Mat:
        """Copy all elements, or those whose mask is not 0.

        Args:
            dst: the target; None makes a new Mat. `create` sets the target's sizes and type, and keeps the target's
                device.
            mask: a Mat of 8 bits or Bool, with the same sizes, and with one channel or as many channels as this Mat.
                If the target's memory is new, the elements that the mask excludes are 0.

        Returns:
            dst.
        """
        dst = Mat(device=self._device) if dst is None else dst
        chosen = None if mask is None else self._mask(mask, dst._device)
        before = dst._data
        source = self._header_of_itself()
        dst.create(self._sizes, self._type)
        if dst.empty():
            return dst
        target = dst._writable_bits()
        given = apart(source._bits(), target)
        if chosen is None:
            target.copy_(given)
            return dst
        if dst._data is not before:
            target.zero_()
        copy_masked(given.to(target.device), target, apart(chosen, target))
        return dst

    def clone(self) -> Mat:
        """A contiguous copy, in memory from the same allocator."""
        if self.empty():
            return self._header_of_itself()
        return self.copyTo(Mat(self._sizes, self._type, allocator=self._own_allocator()))

    def convertTo(
        self,
        rtype: int | torch.dtype | np.dtype[Any] | None = None,
        alpha: float = 1,
        beta: float = 0,
        dst: Mat | None = None,
    ) -> Mat:
        """Convert to another depth: saturate(alpha * x + beta), rounded half to even; NaN becomes the least integer.

        Args:
            rtype: a depth, a type (its channels are ignored), or a dtype; None keeps the depth.
            dst: the target, which may be this Mat; None makes a new Mat. `create` sets the target's sizes and type.

        Returns:
            dst.
        """
        depth = self.depth() if rtype is None or rtype == -1 else CV_MAT_DEPTH(type_code(rtype))
        type = CV_MAKETYPE(depth, self.channels())
        source = self._header_of_itself()
        dst = Mat(device=self._device) if dst is None else dst
        dst.prepare_for(source._sizes, type, source._device)
        if dst.empty():
            return dst
        target = dst._writable()
        if scales_wholes(source.depth(), depth, alpha, beta):
            evaluate_into(leaf(source) * int(alpha) + int(beta), target, depth)
        else:
            convert(apart(source._tensor(), target), target, source.depth(), depth, alpha, beta)
        return dst

    def setTo(self, value: ScalarLike, mask: MatLike | None = None) -> Mat:
        """Set all elements, or those whose mask is not 0.

        Args:
            value: one number for all channels, one number per channel, or a Scalar of up to 4 numbers.
        """
        bits = element(value, self._type).view(depth_of(self._type).carrier)
        if self.empty():
            return self
        target = self._writable_bits()
        if mask is None:
            fill(target, bits)
        else:
            copy_masked(bits, target, apart(self._mask(mask, self._device), target))
        return self

    def release(self) -> None:
        """Make this an empty Mat; the memory is freed when no other header refers to it."""
        self._set_empty(self._type, (), self._device)

    # Vectors.

    def dot(self, other: MatLike) -> float:
        """The dot product: the sum over all elements and channels of the numbers' products, in float64."""
        return dot(self, as_mat(other))

    def cross(self, other: MatLike) -> Mat:
        """The cross product of two vectors of three floating-point numbers."""
        found = cross(self, as_mat(other))
        result = Mat(self.size, self.type(), device=self.device)
        result._writable().copy_(found.view(result._writable().shape))
        return result

    # Adding and removing rows.

    def push_back(self, value: Mat | MatLike | ScalarLike) -> None:
        """Append rows with the same type and length (a Mat, an array). A Mat with a single column also accepts one
        element.

        If there is no room, the Mat moves to memory for 1.5 times its present rows, or for all rows if the new rows
        need more. A region of a larger Mat is first copied to new memory, so the rows below the region do not change.
        """
        growth.push_back(self, value)

    def pop_back(self, nelems: int = 1) -> None:
        """Remove rows from the end."""
        growth.pop_back(self, nelems)

    def reserve(self, nelems: int) -> None:
        """Reserve memory for at least `nelems` rows. The rows themselves do not change."""
        growth.reserve(self, nelems)

    def resize(self, nelems: int, value: ScalarLike | None = None) -> None:
        """Change the number of rows. New rows are set to `value`; without a value, they are not initialized."""
        growth.resize(self, nelems, value)

    # Devices.

    def to(self, device: DeviceLike, *, non_blocking: bool = False, allocator: MatAllocator | None = None) -> Mat:
        """A copy on another device. If the Mat is on that device already and `allocator` is None, the result is a
        header on the same memory.

        Args:
            non_blocking: do not wait for a copy from pinned memory to a GPU. A copy to the host still waits, unless
                `allocator` makes pinned memory. In that case, synchronize the GPU's stream before you read the copy.
        """
        where = device_named(device)
        if same_device(where, self._device) and allocator is None:
            return self._header_of_itself()
        there = Mat(self._sizes, self._type, device=where, allocator=allocator)
        if not there.empty():
            there._bits().copy_(self._bits(), non_blocking=non_blocking)
        return there

    def cuda(self, device: DeviceLike | int | None = None, *, non_blocking: bool = False) -> Mat:
        """The Mat on a GPU, by default the current one, as `to` returns it: a copy only if it is not there already."""
        where = "cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device
        return self.to(where, non_blocking=non_blocking)

    def cpu(self) -> Mat:
        """The Mat in host memory, as `to` returns it: a copy only if it is on a GPU."""
        return self.to("cpu")

    @contextmanager
    def mapped(self, *, write: bool = True) -> Iterator[np.ndarray[Any, Any]]:
        """The elements as an array on the host during a `with` block, from any device.

        For host memory, the array is `numpy()`. For a GPU, the array is a copy in host memory. If `write`, this copy is
        written back to the GPU at the end of the `with` block, unless the block raises. Within the `with` block, the
        `mapping` of GPU memory is "host", and using the Mat on the GPU raises RuntimeError.
        """
        if self._data is None or self._device.type == "cpu":
            array = self.cpu().numpy()
            if not write:
                array.flags.writeable = False
            yield array
            return
        if self._data.mapping == "host":
            raise RuntimeError(f"{self} is mapped to the host already: leave that `with` block first")
        copy = self.cpu()
        array = copy.numpy()
        if not write:
            array.flags.writeable = False
        self._cached, self._data.mapping = None, "host"
        try:
            yield array
        finally:
            self._data.mapping = "device"
        if write:
            self._writable_bits().copy_(copy._bits())

    def __copy__(self) -> Mat:
        return self._header_of_itself()

    def __deepcopy__(self, memo: dict[int, Any]) -> Mat:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._tensor().clone(memory_format=torch.contiguous_format), self._sizes, self._type)

    # Internal.

    def _mask(self, mask: MatLike, device: torch.device) -> Tensor:
        """Check that a mask fits these elements and is on `device`, the target's device; return its tensor."""
        if isinstance(mask, (list, tuple)):
            raise TypeError(
                "a mask must be a Mat, an expression, an array or a tensor, got a list: convert it to an array"
            )
        mask = as_mat(mask)
        if mask.depth() not in (CV_8U, CV_8S, CV_Bool) or mask.channels() not in (1, self.channels()):
            raise TypeError(
                f"a mask must be CV_8U, CV_8S or CV_Bool, with 1 or {self.channels()} channels, got "
                f"{typeToString(mask._type)}: a comparison makes such a mask"
            )
        if mask._sizes != self._sizes:
            raise ValueError(f"a mask of {mask._sizes} for elements of {self._sizes}: the sizes must be equal")
        if not same_device(mask._device, device):
            raise ValueError(f"a mask on {mask._device} for elements on {device}: use mask.to({str(device)!r})")
        return mask._bits()

    def _first_channel(self, value: float) -> Sequence[float]:
        return Scalar(value) if self.channels() <= 4 else [value] + [0] * (self.channels() - 1)


MatLike = Mat | MatExpr | np.ndarray[Any, Any] | Tensor


def as_mat(given: MatLike) -> Mat:
    """Return a Mat unchanged, a header on the memory of an array, or the value of an expression."""
    return given if isinstance(given, Mat) else Mat(given)


def evaluate(expression: MatExpr, dst: Mat | None = None, rtype: Any = None) -> Mat:
    """Evaluate an expression and return the Mat with its value.

    Args:
        dst: the target; None makes a new Mat. `create` sets the target's size and type, and allocates nothing if both
            already match. `dst` may overlap the expression's Mats.
        rtype: the depth of the stored numbers: a depth, a type (its channels are ignored), or a dtype; None keeps the
            expression's depth.

    Returns:
        dst.
    """
    dst = Mat(device=expression._device) if dst is None else dst
    store(expression, dst, rtype)
    return dst


def _value_of(expression: MatExpr, rtype: int | None) -> Mat:
    return evaluate(expression, None, rtype)


MatExpr._value_as_mat = _value_of  # set here, because expressions must not import higher modules


def _rebuilt(elements: Tensor, sizes: Sizes, type: int) -> Mat:
    if not elements.numel():
        return Mat(sizes, type, device=elements.device)
    return Mat(elements, CV_MAKETYPE(CV_MAT_DEPTH(type), 1)).reshape(CV_MAT_CN(type), sizes)
