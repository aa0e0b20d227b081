"""Element types as numbers: a depth (the type of one channel) and the number of channels, packed as in OpenCV 5.

A code is `depth | (channels - 1) << 5`, so CV_8UC3 is 64. OpenCV 4 shifts by 3, so CV_8UC3 is 16 there; `type_code` and
`from_opencv4` convert between the two. OpenCV 5 itself allows at most 128 channels. Here, the same rule encodes up to
512 channels, so that all types of OpenCV 4 have a code.

Source: opencv2/core/hal/interface.h of OpenCV 5.0 and 4.x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

__all__ = [
    "CV_8S", "CV_8SC", "CV_8SC1", "CV_8SC2", "CV_8SC3", "CV_8SC4",
    "CV_8U", "CV_8UC", "CV_8UC1", "CV_8UC2", "CV_8UC3", "CV_8UC4",
    "CV_16BF", "CV_16BFC", "CV_16BFC1", "CV_16BFC2", "CV_16BFC3", "CV_16BFC4",
    "CV_16F", "CV_16FC", "CV_16FC1", "CV_16FC2", "CV_16FC3", "CV_16FC4",
    "CV_16S", "CV_16SC", "CV_16SC1", "CV_16SC2", "CV_16SC3", "CV_16SC4",
    "CV_16U", "CV_16UC", "CV_16UC1", "CV_16UC2", "CV_16UC3", "CV_16UC4",
    "CV_32F", "CV_32FC", "CV_32FC1", "CV_32FC2", "CV_32FC3", "CV_32FC4",
    "CV_32S", "CV_32SC", "CV_32SC1", "CV_32SC2", "CV_32SC3", "CV_32SC4",
    "CV_32U", "CV_32UC", "CV_32UC1", "CV_32UC2", "CV_32UC3", "CV_32UC4",
    "CV_64F", "CV_64FC", "CV_64FC1", "CV_64FC2", "CV_64FC3", "CV_64FC4",
    "CV_64S", "CV_64SC", "CV_64SC1", "CV_64SC2", "CV_64SC3", "CV_64SC4",
    "CV_64U", "CV_64UC", "CV_64UC1", "CV_64UC2", "CV_64UC3", "CV_64UC4",
    "CV_CN_MAX", "CV_CN_SHIFT", "CV_DEPTH_MAX", "CV_ELEM_SIZE", "CV_ELEM_SIZE1",
    "CV_MAKETYPE", "CV_MAT_CN", "CV_MAT_DEPTH",
    "CV_Bool", "CV_BoolC", "CV_BoolC1", "CV_BoolC2", "CV_BoolC3", "CV_BoolC4",
    "depthToString", "from_opencv4", "numpy_dtype", "torch_dtype", "typeToString", "type_code",
]  # fmt: skip

CV_8U: Final = 0
CV_8S: Final = 1
CV_16U: Final = 2
CV_16S: Final = 3
CV_32S: Final = 4
CV_32F: Final = 5
CV_64F: Final = 6
CV_16F: Final = 7
CV_16BF: Final = 8
CV_Bool: Final = 9
CV_64U: Final = 10
CV_64S: Final = 11
CV_32U: Final = 12

CV_CN_MAX: Final = 512
CV_CN_SHIFT: Final = 5
CV_DEPTH_MAX: Final = 1 << CV_CN_SHIFT
_OPENCV4_SHIFT = 3
_OPENCV4_DEPTHS = range(8)  # CV_8U ... CV_16F, whose numbers are the same in OpenCV 4 and here


@dataclass(frozen=True)
class Depth:
    """The type of one channel.

    Attributes:
        name: the name without the prefix, such as "8U" for CV_8U.
        dtype: torch's dtype.
        carrier: a torch dtype of the same width that every operator on every device supports; used to copy bits. torch
            has few operators for uint16, uint32 and uint64.
        numpy: NumPy's dtype; None if NumPy has none.
        limits: least and greatest value, for integers.
    """

    name: str
    dtype: torch.dtype
    carrier: torch.dtype
    numpy: np.dtype[np.generic] | None
    limits: tuple[int, int] | None

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize


def _depth(name: str, dtype: torch.dtype, numpy: str | None, limits: tuple[int, int] | None = None) -> Depth:
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return Depth(name, dtype, carriers[dtype.itemsize], None if numpy is None else np.dtype(numpy), limits)


def _signed(bits: int) -> tuple[int, int]:
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def _unsigned(bits: int) -> tuple[int, int]:
    return 0, (1 << bits) - 1


DEPTHS: Final[tuple[Depth, ...]] = (  # the index of a depth is its code
    _depth("8U", torch.uint8, "uint8", _unsigned(8)),
    _depth("8S", torch.int8, "int8", _signed(8)),
    _depth("16U", torch.uint16, "uint16", _unsigned(16)),
    _depth("16S", torch.int16, "int16", _signed(16)),
    _depth("32S", torch.int32, "int32", _signed(32)),
    _depth("32F", torch.float32, "float32"),
    _depth("64F", torch.float64, "float64"),
    _depth("16F", torch.float16, "float16"),
    _depth("16BF", torch.bfloat16, None),
    _depth("Bool", torch.bool, "bool"),
    _depth("64U", torch.uint64, "uint64", _unsigned(64)),
    _depth("64S", torch.int64, "int64", _signed(64)),
    _depth("32U", torch.uint32, "uint32", _unsigned(32)),
)
_BY_DTYPE = {depth.dtype: number for number, depth in enumerate(DEPTHS)}
_BY_NUMPY = {depth.numpy: number for number, depth in enumerate(DEPTHS) if depth.numpy is not None}


def CV_MAKETYPE(depth: int, cn: int) -> int:
    """The code of `cn` channels of a depth.

    Raises:
        ValueError: no such depth, or not 1 to 512 channels.
    """
    if not 0 <= depth < len(DEPTHS):
        raise ValueError(
            f"{depth} is not a depth: depths are CV_8U = 0 to CV_32U = 12; CV_MAT_DEPTH(type) returns the depth of a "
            "type"
        )
    if not 1 <= cn <= CV_CN_MAX:
        raise ValueError(f"a type has 1 to {CV_CN_MAX} channels, got {cn}")
    return depth | (cn - 1) << CV_CN_SHIFT


def CV_MAT_DEPTH(type: int) -> int:
    """The depth of a type."""
    return type & (CV_DEPTH_MAX - 1)


def CV_MAT_CN(type: int) -> int:
    """The number of channels of a type."""
    return (type >> CV_CN_SHIFT) + 1


def CV_ELEM_SIZE1(type: int) -> int:
    """Bytes of one channel."""
    return depth_of(type).size_bytes


def CV_ELEM_SIZE(type: int) -> int:
    """The size in bytes of one element with all its channels."""
    return depth_of(type).size_bytes * CV_MAT_CN(type)


def depth_of(type: int) -> Depth:
    """The depth of one channel of a type.

    Raises:
        TypeError, ValueError: `type` is not the code of a type.
    """
    if not isinstance(type, int) or isinstance(type, bool):
        raise TypeError(
            f"a type is a number such as CV_8UC3, got {type!r}: type_code(dtype, channels) makes one from a dtype"
        )
    if not 0 <= type < CV_CN_MAX << CV_CN_SHIFT or CV_MAT_DEPTH(type) >= len(DEPTHS):
        raise ValueError(
            f"{type} is not the code of a type: make a code with CV_MAKETYPE(depth, channels), such as "
            "CV_MAKETYPE(CV_8U, 3)"
        )
    return DEPTHS[type & (CV_DEPTH_MAX - 1)]


def typeToString(type: int) -> str:
    """The name of a type, such as "CV_8UC3", or "CV_8UC(5)" for more than four channels, as OpenCV prints it.

    Raises:
        TypeError, ValueError: `type` is not the code of a type.
    """
    channels = CV_MAT_CN(type) if isinstance(type, int) else 0
    return f"CV_{depth_of(type).name}C{channels if channels <= 4 else f'({channels})'}"


def depthToString(depth: int) -> str:
    """The name of a depth, such as "CV_8U"."""
    return f"CV_{depth_of(CV_MAT_DEPTH(depth)).name}"


def type_code(
    of: int | torch.dtype | np.dtype[np.generic] | type[np.generic], channels: int | None = None, *, opencv: int = 5
) -> int:
    """The code of a type, a torch dtype or a NumPy dtype.

    Args:
        of: a type of this package, or a dtype.
        channels: the number of channels. The default is the number of the type's channels, or 1 for a dtype.
        opencv: 5 for this package's codes, 4 for OpenCV 4's codes of the same types.

    Raises:
        TypeError: no depth has this dtype, such as complex or float128.
        ValueError: OpenCV 4 does not have the depth, or `of` is not a type.
    """
    if isinstance(of, int) and not isinstance(of, bool):
        depth_of(of)
        code = CV_MAKETYPE(CV_MAT_DEPTH(of), CV_MAT_CN(of) if channels is None else channels)
    else:
        code = CV_MAKETYPE(_depth_of_dtype(of), 1 if channels is None else channels)
    if opencv == 5:
        return code
    if opencv != 4:
        raise ValueError(f"opencv must be 4 or 5, got {opencv}")
    if CV_MAT_DEPTH(code) not in _OPENCV4_DEPTHS:
        raise ValueError(
            f"OpenCV 4 has no {typeToString(code)}: its depths are CV_8U to CV_16F, so convertTo one of these"
        )
    return CV_MAT_DEPTH(code) | (CV_MAT_CN(code) - 1) << _OPENCV4_SHIFT


def from_opencv4(code: int) -> int:
    """Convert a type code of OpenCV 4 to this package's code. In OpenCV 4, 16 is CV_8UC3."""
    if not 0 <= code < CV_CN_MAX << _OPENCV4_SHIFT:
        raise ValueError(
            f"{code} is not the code of a type of OpenCV 4: codes are 0 to {(CV_CN_MAX << _OPENCV4_SHIFT) - 1}"
        )
    return CV_MAKETYPE(code & (len(_OPENCV4_DEPTHS) - 1), (code >> _OPENCV4_SHIFT) + 1)


def torch_dtype(type: int) -> torch.dtype:
    """torch's dtype for the channels of a type."""
    return depth_of(type).dtype


def numpy_dtype(type: int) -> np.dtype[np.generic]:
    """NumPy's dtype for the channels of a type.

    Raises:
        TypeError: the depth is CV_16BF, which NumPy lacks.
    """
    found = depth_of(type).numpy
    if found is None:
        raise TypeError(f"NumPy has no dtype for {typeToString(type)}: convertTo(CV_32F) first, or use tensor()")
    return found


def _depth_of_dtype(dtype: object) -> int:
    if isinstance(dtype, torch.dtype):
        if dtype in _BY_DTYPE:
            return _BY_DTYPE[dtype]
        raise TypeError(f"no depth has the dtype {dtype}: convert it, for example to torch.float32")
    try:
        found = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"expected a type, or a dtype of torch or NumPy, got {dtype!r}") from None
    if not found.isnative:
        raise TypeError(
            f"{found} is not in this machine's byte order: convert the array with "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if found not in _BY_NUMPY:
        raise TypeError(f"no depth has NumPy's dtype {found}: convert it, for example array.astype('float32')")
    return _BY_NUMPY[found]


# OpenCV's constants, written out so that editors and type checkers see their names.
CV_8UC1: Final = CV_8U
CV_8UC2: Final = CV_8U | 1 << CV_CN_SHIFT
CV_8UC3: Final = CV_8U | 2 << CV_CN_SHIFT
CV_8UC4: Final = CV_8U | 3 << CV_CN_SHIFT
CV_8SC1: Final = CV_8S
CV_8SC2: Final = CV_8S | 1 << CV_CN_SHIFT
CV_8SC3: Final = CV_8S | 2 << CV_CN_SHIFT
CV_8SC4: Final = CV_8S | 3 << CV_CN_SHIFT
CV_16UC1: Final = CV_16U
CV_16UC2: Final = CV_16U | 1 << CV_CN_SHIFT
CV_16UC3: Final = CV_16U | 2 << CV_CN_SHIFT
CV_16UC4: Final = CV_16U | 3 << CV_CN_SHIFT
CV_16SC1: Final = CV_16S
CV_16SC2: Final = CV_16S | 1 << CV_CN_SHIFT
CV_16SC3: Final = CV_16S | 2 << CV_CN_SHIFT
CV_16SC4: Final = CV_16S | 3 << CV_CN_SHIFT
CV_32SC1: Final = CV_32S
CV_32SC2: Final = CV_32S | 1 << CV_CN_SHIFT
CV_32SC3: Final = CV_32S | 2 << CV_CN_SHIFT
CV_32SC4: Final = CV_32S | 3 << CV_CN_SHIFT
CV_32FC1: Final = CV_32F
CV_32FC2: Final = CV_32F | 1 << CV_CN_SHIFT
CV_32FC3: Final = CV_32F | 2 << CV_CN_SHIFT
CV_32FC4: Final = CV_32F | 3 << CV_CN_SHIFT
CV_64FC1: Final = CV_64F
CV_64FC2: Final = CV_64F | 1 << CV_CN_SHIFT
CV_64FC3: Final = CV_64F | 2 << CV_CN_SHIFT
CV_64FC4: Final = CV_64F | 3 << CV_CN_SHIFT
CV_16FC1: Final = CV_16F
CV_16FC2: Final = CV_16F | 1 << CV_CN_SHIFT
CV_16FC3: Final = CV_16F | 2 << CV_CN_SHIFT
CV_16FC4: Final = CV_16F | 3 << CV_CN_SHIFT
CV_16BFC1: Final = CV_16BF
CV_16BFC2: Final = CV_16BF | 1 << CV_CN_SHIFT
CV_16BFC3: Final = CV_16BF | 2 << CV_CN_SHIFT
CV_16BFC4: Final = CV_16BF | 3 << CV_CN_SHIFT
CV_BoolC1: Final = CV_Bool
CV_BoolC2: Final = CV_Bool | 1 << CV_CN_SHIFT
CV_BoolC3: Final = CV_Bool | 2 << CV_CN_SHIFT
CV_BoolC4: Final = CV_Bool | 3 << CV_CN_SHIFT
CV_64UC1: Final = CV_64U
CV_64UC2: Final = CV_64U | 1 << CV_CN_SHIFT
CV_64UC3: Final = CV_64U | 2 << CV_CN_SHIFT
CV_64UC4: Final = CV_64U | 3 << CV_CN_SHIFT
CV_64SC1: Final = CV_64S
CV_64SC2: Final = CV_64S | 1 << CV_CN_SHIFT
CV_64SC3: Final = CV_64S | 2 << CV_CN_SHIFT
CV_64SC4: Final = CV_64S | 3 << CV_CN_SHIFT
CV_32UC1: Final = CV_32U
CV_32UC2: Final = CV_32U | 1 << CV_CN_SHIFT
CV_32UC3: Final = CV_32U | 2 << CV_CN_SHIFT
CV_32UC4: Final = CV_32U | 3 << CV_CN_SHIFT


def CV_8UC(n: int) -> int:
    """The type with `n` channels of CV_8U."""
    return CV_MAKETYPE(CV_8U, n)


def CV_8SC(n: int) -> int:
    """The type with `n` channels of CV_8S."""
    return CV_MAKETYPE(CV_8S, n)


def CV_16UC(n: int) -> int:
    """The type with `n` channels of CV_16U."""
    return CV_MAKETYPE(CV_16U, n)


def CV_16SC(n: int) -> int:
    """The type with `n` channels of CV_16S."""
    return CV_MAKETYPE(CV_16S, n)


def CV_32SC(n: int) -> int:
    """The type with `n` channels of CV_32S."""
    return CV_MAKETYPE(CV_32S, n)


def CV_32FC(n: int) -> int:
    """The type with `n` channels of CV_32F."""
    return CV_MAKETYPE(CV_32F, n)


def CV_64FC(n: int) -> int:
    """The type with `n` channels of CV_64F."""
    return CV_MAKETYPE(CV_64F, n)


def CV_16FC(n: int) -> int:
    """The type with `n` channels of CV_16F."""
    return CV_MAKETYPE(CV_16F, n)


def CV_16BFC(n: int) -> int:
    """The type with `n` channels of CV_16BF."""
    return CV_MAKETYPE(CV_16BF, n)


def CV_BoolC(n: int) -> int:
    """The type with `n` channels of CV_Bool."""
    return CV_MAKETYPE(CV_Bool, n)


def CV_64UC(n: int) -> int:
    """The type with `n` channels of CV_64U."""
    return CV_MAKETYPE(CV_64U, n)


def CV_64SC(n: int) -> int:
    """The type with `n` channels of CV_64S."""
    return CV_MAKETYPE(CV_64S, n)


def CV_32UC(n: int) -> int:
    """The type with `n` channels of CV_32U."""
    return CV_MAKETYPE(CV_32U, n)
