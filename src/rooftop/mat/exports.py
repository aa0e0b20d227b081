"""Give other libraries access to a Mat's memory without a copy: as tensor, array, DLPack capsule or CUDA array
interface."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.type_codes import depth_of, numpy_dtype
from rooftop.mat.views import Header


class ExportedHeader(Header):
    """A header whose memory other libraries can use."""

    __slots__ = ()

    def tensor(self, layout: Literal["hwc", "chw"] = "hwc") -> Tensor:
        """The elements as a tensor on the same memory: (H, W, C), or (*sizes, C) for other numbers of dimensions. With
        a single channel, C is 1. A Mat without sizes, such as `Mat()`, gives (0, C).

        Args:
            layout: "chw" returns the same memory as (C, H, W).

        Raises:
            ValueError: the Mat shares the memory of a read-only array, and tensors cannot be read-only.
        """
        if layout not in ("hwc", "chw"):
            raise ValueError(f"layout must be 'hwc' or 'chw', got {layout!r}")
        self._refuse_read_only("tensor() of")
        elements = self._strided(depth_of(self._type).dtype)
        return elements if layout == "hwc" else elements.movedim(-1, 0)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as an array on the same memory, in OpenCV-Python's shape: (H, W) for one channel, (H, W, C) for
        several. A Mat without sizes, such as `Mat()`, gives (0,) or (0, C).

        Raises:
            ValueError: the Mat is on a GPU; use `cpu().numpy()` or `mapped()`.
            TypeError: the depth is CV_16BF, which NumPy lacks.
        """
        if self._device.type != "cpu":
            raise ValueError(
                f"NumPy arrays cannot be on {self._device}: cpu().numpy() copies the Mat; `with m.mapped() "
                "as array` also writes changes of the copy back"
            )
        numpy_dtype(self._type)
        array = self._array_shaped(self._tensor()).numpy()
        if self._data is not None and self._data.read_only:
            array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"{self} cannot become an array of {dtype} without a copy")
        return np.array(array, dtype=dtype, copy=True if copy else None)

    def __dlpack__(self, **options: Any) -> Any:
        """Export a DLPack capsule with the shape of `numpy()`'s array; supports every device."""
        if self._data is not None and self._data.read_only:
            raise BufferError(f"{self} is read-only, which DLPack cannot express: clone() first")
        return self._array_shaped(self._tensor()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._tensor().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device.type != "cuda":
            raise AttributeError(f"{self} is not on a CUDA device and has no __cuda_array_interface__")
        sizes = self._sizes or (0,)  # an array without dimensions would have one element
        shape = sizes if self.channels() == 1 else (*sizes, self.channels())
        steps = self._steps if self.channels() == 1 else (*self._steps, self.elemSize1())
        # In this protocol, 1 means the default stream, whose handle is 0.
        stream = torch.cuda.current_stream(self._device).cuda_stream or 1
        return {
            "shape": shape,
            "typestr": numpy_dtype(self._type).str,
            "data": (self.data_ptr(), self._data is not None and self._data.read_only),
            "strides": None if self.isContinuous() else steps,
            "version": 3,
            "stream": stream,
        }

    def _array_shaped(self, elements: Tensor) -> Tensor:
        return elements.squeeze(-1) if self.channels() == 1 else elements
