"""Make headers on other libraries' arrays without a copy. If that is impossible, the error names a call that makes a
copy.

A Mat can be a header on memory whose elements are contiguous along the last dimension with all their channels. The
steps of the other dimensions must be positive, must not make elements overlap, and must grow toward the first
dimension. Slices of rows and columns of an image meet these rules. A single channel of such an image breaks these
rules, as does a transposed, reversed or broadcast array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rooftop.mat.allocation import MatData, MatDataFlag
from rooftop.mat.headers import Sizes, natural_steps, span_bytes
from rooftop.mat.type_codes import (
    CV_CN_MAX,
    CV_MAKETYPE,
    CV_MAT_CN,
    CV_MAT_DEPTH,
    depth_of,
    type_code,
    typeToString,
)


class Parts(NamedTuple):
    """What a header on another library's array needs: memory, type, sizes, steps, offset and device. `data` is None if
    the array has no elements.
    """

    data: MatData | None
    type: int
    sizes: Sizes
    steps: Sizes
    offset: int
    device: torch.device


def is_foreign(thing: object) -> bool:
    """Whether an object may be an array of another library, which `parts_of` accepts."""
    if isinstance(thing, np.generic):  # one number, such as a count of rows, not an array
        return False
    return isinstance(thing, (np.ndarray, Tensor)) or any(
        hasattr(thing, name) for name in ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    )


def parts_of(thing: Any, type: int | None, layout: str) -> Parts:
    """The fields of a header on a NumPy array, a tensor, or an object with DLPack or one of the array interfaces.

    Args:
        type: If the type has more than one channel, the array's last dimension (with layout "chw", its first) is the
            channels. If `type` is None, a three-dimensional array with at most 512 numbers along this dimension is an
            image with channels; any other array has one channel.
        layout: "hwc", or "chw" if the shape is (C, H, W) while the channels are interleaved in memory.

    Raises:
        TypeError, ValueError: no header can describe the memory.
    """
    if isinstance(thing, np.ndarray):
        return _of_array(thing, type, layout)
    if isinstance(thing, Tensor):
        return _of_tensor(thing, type, layout)
    if hasattr(thing, "__dlpack__"):
        return _of_tensor(from_dlpack(thing), type, layout)
    if hasattr(thing, "__cuda_array_interface__"):
        return _of_tensor(torch.as_tensor(thing, device="cuda"), type, layout)
    if not isinstance(thing.__array_interface__.get("data"), tuple):  # bytes, as in Pillow's images
        raise TypeError(f"{thing.__class__.__name__} returns a copy of its memory: pass np.array(...) of it")
    return _of_array(np.asarray(thing), type, layout)


def _of_array(array: np.ndarray[Any, Any], type: int | None, layout: str) -> Parts:
    copied = (
        "np.ascontiguousarray(array)" if layout == "hwc" else "array.transpose(1, 2, 0).copy(), passed without layout=,"
    )
    code = type_code(array.dtype)
    if not array.flags.aligned:
        raise ValueError(f"the array is not aligned to its {array.dtype} numbers: pass array.copy()")
    array = _channels_last(array, layout)
    type, sizes, steps = _header(array.shape, array.strides, code, type, copied)
    if 0 in sizes:
        return Parts(None, type, sizes, steps, 0, torch.device("cpu"))
    flags = MatDataFlag.USER_GIVEN
    if not array.flags.writeable:
        flags |= MatDataFlag.READ_ONLY
        array = np.asarray(_WritableAlias(array))  # torch warns about read-only arrays; here Mat refuses the writes
    storage = torch.from_numpy(array).untyped_storage()
    assert storage.data_ptr() == array.ctypes.data
    return Parts(MatData(storage, span_bytes(sizes, steps), None, flags), type, sizes, steps, 0, storage.device)


def _of_tensor(x: Tensor, type: int | None, layout: str) -> Parts:
    if x.layout != torch.strided:
        raise TypeError(f"expected a strided tensor, got {x.layout}: use x.to_dense()")
    if x.requires_grad:
        raise ValueError("the tensor requires grad, but a Mat records no gradients: pass x.detach()")
    code = type_code(x.dtype)  # raises an error for complex dtypes, so x is not a lazy conjugate below
    if x.is_neg():
        raise TypeError("the tensor is a lazy negative: pass x.resolve_neg()")
    x = _channels_last(x, layout)
    item = x.element_size()
    strides = tuple(stride * item for stride in x.stride())
    copied = "x.contiguous()" if layout == "hwc" else "x.permute(1, 2, 0).contiguous(), passed without layout=,"
    type, sizes, steps = _header(tuple(x.shape), strides, code, type, copied)
    if 0 in sizes:
        return Parts(None, type, sizes, steps, 0, x.device)
    start = int(x.storage_offset()) * item
    data = MatData(x.untyped_storage(), span_bytes(sizes, steps), None, MatDataFlag.USER_GIVEN, start_bytes=start)
    return Parts(data, type, sizes, steps, start, x.device)


def _channels_last(array: Any, layout: str) -> Any:
    if layout not in ("hwc", "chw"):
        raise ValueError(f"layout must be 'hwc' or 'chw', got {layout!r}")
    if layout == "hwc":
        return array
    if array.ndim != 3:
        raise ValueError(f"layout='chw' takes three dimensions, got shape {tuple(array.shape)}")
    return array.transpose(1, 2, 0) if isinstance(array, np.ndarray) else array.permute(1, 2, 0)


def _header(shape: Sizes, strides: Sizes, code: int, type: int | None, copied: str) -> tuple[int, Sizes, Sizes]:
    """Type, sizes and steps of an array with this shape and these strides. Strides and steps are in bytes."""
    if not shape:
        raise ValueError("a Mat has at least one dimension, got a single number: reshape it to (1, 1)")
    if type is None:
        channels = shape[-1] if len(shape) == 3 and 1 <= shape[-1] <= CV_CN_MAX else 0
        type = CV_MAKETYPE(code, max(channels, 1))
    else:
        depth_of(type)
        if CV_MAT_DEPTH(type) != code:
            raise TypeError(
                f"numbers of CV_{depth_of(code).name} cannot be seen as {typeToString(type)}: leave out the type, "
                "and call convertTo afterwards"
            )
        channels = CV_MAT_CN(type) if CV_MAT_CN(type) > 1 else 0
        if channels and (len(shape) < 2 or shape[-1] != channels):
            raise ValueError(f"{typeToString(type)} needs {channels} as the last dimension, got shape {shape}")
    item = depth_of(type).size_bytes
    sizes = shape[:-1] if channels else shape
    if 0 in shape:
        return type, sizes, natural_steps(sizes, item * max(channels, 1))
    if channels > 1 and strides[-1] != item:
        raise ValueError(
            f"the channels of an element must be contiguous in memory, but are {strides[-1]} bytes apart (shape "
            f"{shape}, strides {strides} bytes): copy the array by {copied}"
        )
    return type, sizes, _steps(sizes, strides[: len(sizes)], item * max(channels, 1), copied)


def _steps(sizes: Sizes, strides: Sizes, elem_bytes: int, copied: str) -> Sizes:
    """Check the strides, and return them. The strides of dimensions of size 1 do not matter; each is replaced by
    the least valid step: the next dimension's step times its size."""
    steps: list[int] = []
    least = elem_bytes
    for axis in range(len(sizes) - 1, -1, -1):
        last = axis == len(sizes) - 1
        step = strides[axis] if sizes[axis] > 1 else least
        wrong = step != elem_bytes if last else step < least
        if wrong:
            kind = (
                "reversed" if step < 0 else "broadcast" if step == 0 else "not contiguous" if last else
                "transposed or overlapping"
            )  # fmt: skip
            raise ValueError(
                f"dimension {axis} of {sizes} is {kind}: a step of {step} bytes, where a Mat needs "
                f"{'' if last else 'at least '}{least}. Copy the array by {copied}"
            )
        steps.append(step)
        least = step * sizes[axis]
    return tuple(reversed(steps))


class _WritableAlias:
    """The memory of a read-only array as a writable array, which keeps the original array alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
