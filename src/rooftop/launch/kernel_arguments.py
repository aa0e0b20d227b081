"""Read the parameters of a CUDA C++ kernel from its mangled name, and check Python values against them.

    pointers    a tensor with the pointer's dtype, on the launch's device or in pinned memory; None for a null pointer
    integers    an int within the type's range
    floats      a float or an int that does not overflow

A pointer carries no strides: pass the strides that the kernel needs as integers.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

Converter = Callable[[Any, int], Any]
"""A function from (value, index of the device) to the argument for `cuda.core.launch`."""


@dataclass(frozen=True)
class Pointee:
    """The tensors that a kernel's pointer parameter accepts: their possible dtypes (None: any dtype), and the number of
    bytes of which their address must be a multiple.
    """

    dtypes: tuple[torch.dtype, ...] | None
    alignment: int = 1


def _scalar(dtype: torch.dtype) -> Pointee:
    return Pointee((dtype,), dtype.itemsize)


def _vectors(name: str, dtype: torch.dtype, *also: torch.dtype) -> dict[str, Pointee]:
    """The vector types of a scalar type, such as float2 and float4. Vectors of three elements are aligned like scalars.
    No vector is aligned to more than 16 bytes.
    """
    found = {f"{name}{n}": min(16, n * dtype.itemsize) for n in (2, 4)} | {f"{name}{n}": dtype.itemsize for n in (1, 3)}
    return {vector: Pointee((dtype, *also), alignment) for vector, alignment in found.items()}


INTEGERS = {
    "char": torch.int8,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "short": torch.int16,
    "unsigned short": torch.uint16,
    "int": torch.int32,
    "unsigned int": torch.uint32,
    "long": torch.int64,
    "unsigned long": torch.uint64,
    "long long": torch.int64,
    "unsigned long long": torch.uint64,
}
FLOATS = {"float": torch.float32, "double": torch.float64, "__half": torch.float16}
POINTEES: dict[str, Pointee] = {
    "void": Pointee(None),
    "bool": _scalar(torch.bool),
    **{name: _scalar(dtype) for name, dtype in (INTEGERS | FLOATS).items()},
    "__nv_bfloat16": _scalar(torch.bfloat16),
    "__half2": Pointee((torch.float16,), 4),
    "__nv_bfloat162": Pointee((torch.bfloat16,), 4),
    "__nv_fp8_e4m3": _scalar(torch.float8_e4m3fn),
    "__nv_fp8_e5m2": _scalar(torch.float8_e5m2),
    **_vectors("float", torch.float32, torch.complex64),
    **_vectors("double", torch.float64, torch.complex128),
    **_vectors("int", torch.int32),
    **_vectors("uint", torch.uint32),
    **_vectors("longlong", torch.int64),
    **_vectors("short", torch.int16),
    **_vectors("char", torch.int8),
    **_vectors("uchar", torch.uint8),
}


@dataclass(frozen=True)
class Signature:
    """The parameters of a kernel: the C++ type of each parameter, and the conversion of a Python value to that type."""

    kernel: str
    types: tuple[str, ...]
    converters: tuple[Converter, ...]

    def values(self, arguments: tuple[Any, ...], device: int) -> list[Any]:
        """Convert arguments for `cuda.core.launch`.

        Args:
            device: index of the launch's device. Tensors must be on this device, or in pinned memory.

        Raises:
            TypeError: the number of arguments or a type is wrong.
            ValueError: a tensor is on another device or misaligned, or a scalar is out of range.
        """
        if len(arguments) != len(self.converters):
            takes = f"{len(self.types)} arguments ({', '.join(self.types)})"
            raise TypeError(f"kernel {self.kernel} takes {takes}, got {len(arguments)}")
        return [convert(value, device) for convert, value in zip(self.converters, arguments, strict=True)]


def signature(kernel: str, types: tuple[str, ...]) -> Signature:
    """The signature of a kernel whose parameters have these C++ types.

    Raises:
        TypeError: no Python value can be passed for a type (a struct by value, a pointer to a pointer).
    """
    converters = tuple(_converter(kernel, index, type_) for index, type_ in enumerate(types, 1))
    return Signature(kernel, types, converters)


def parameter_types(demangled: str) -> tuple[str, ...]:
    """Return the parameter types of the function pointer in a demangled name such as `void f<void (*)(float const*,
    int)>()`, in the usual spelling ("const float*", "int").
    """
    inner = demangled[demangled.index("(*)(") + len("(*)(") : demangled.rindex(")>()")]
    types, depth, start = [], 0, 0
    for position, character in enumerate(inner + ","):
        depth += (character in "<([") - (character in ">)]")
        if character == "," and depth == 0:
            types.append(inner[start:position].strip())
            start = position + 1
    return tuple(_readable(each) for each in types if each)


def _readable(type_: str) -> str:
    """Spell `float const*` as const float*, without `restrict`, which is not part of a type."""
    type_ = type_.replace(" __restrict__", "").replace(" __restrict", "")
    return f"const {type_[: -len(' const*')]}*" if type_.endswith(" const*") else type_


def first_device(arguments: tuple[Any, ...]) -> int | None:
    """The device index of the first tensor that is on a GPU; None if no tensor is on a GPU."""
    for value in arguments:
        if isinstance(value, Tensor) and (index := value.get_device()) >= 0:
            return index
    return None


# ---- one converter for each kind of parameter ------------------------------------------------------------------


def _converter(kernel: str, index: int, type_: str) -> Converter:
    what = f"kernel {kernel}: argument {index} ({type_})"
    if type_.endswith("*"):
        pointee = POINTEES.get(type_.removeprefix("const ").removesuffix("*"))
        if pointee is None:
            raise TypeError(
                f"{what}: no tensor has such elements: use void* or a pointer to numbers or to vectors (float4)"
            )
        return _pointer(what, pointee)
    if type_ == "bool":
        return _boolean(what)
    if type_ in INTEGERS:
        return _integer(what, INTEGERS[type_])
    if type_ in FLOATS:
        return _float(what, FLOATS[type_])
    raise TypeError(f"{what}: cannot be passed from Python by value: use a number, a bool or a pointer")


def _pointer(what: str, pointee: Pointee) -> Converter:
    dtypes, alignment = pointee.dtypes, pointee.alignment

    def convert(value: Any, device: int) -> int:
        if value is None:
            return 0
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}: expected a tensor or None, got {type(value).__name__}")
        if value.layout != torch.strided:
            raise TypeError(f"{what}: expected a dense tensor, got layout {value.layout}: use .to_dense()")
        if dtypes is not None and value.dtype not in dtypes:
            raise TypeError(f"{what}: expected a tensor of {dtypes[0]}, got {value.dtype}: convert it")
        if value.get_device() != device and not (value.device.type == "cpu" and value.is_pinned()):
            where = "the CPU" if device < 0 else f"cuda:{device}"
            raise ValueError(f"{what}: the tensor is on {value.device}, the launch on {where}: move it there")
        address = value.data_ptr()
        if address % alignment:
            raise ValueError(
                f"{what}: the tensor begins {address % alignment} bytes off a multiple of {alignment}, probably "
                "because it is a view: clone() it, or use a pointer to single elements"
            )
        return address

    return convert


def _boolean(what: str) -> Converter:
    def convert(value: Any, device: int) -> bool:
        if not isinstance(value, bool | numpy.bool_):
            raise TypeError(f"{what}: expected True or False, got {value!r}")
        return bool(value)

    return convert


def _integer(what: str, dtype: torch.dtype) -> Converter:
    """Make the function that converts an int to a kernel argument of this dtype. `cuda.core` copies eight bytes of
    the int; the kernel reads as many of the lowest bytes as its dtype has. Values of 2^63 or more need an
    explicit type, so the converter wraps them in `ctypes.c_uint64`.
    """
    limits = torch.iinfo(dtype)
    least, most = limits.min, limits.max

    def convert(value: Any, device: int) -> Any:
        if type(value) is not int:
            value = _as_integer(what, value)
        if not least <= value <= most:
            raise ValueError(f"{what}: {value:,} is outside of {least:,} to {most:,}")
        return value if value < 1 << 63 else ctypes.c_uint64(value)

    return convert


def _as_integer(what: str, value: Any) -> int:
    if isinstance(value, Tensor):
        _refuse_tensor(what)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: expected an integer, got {value!r}") from None


def _float(what: str, dtype: torch.dtype) -> Converter:
    most = torch.finfo(dtype).max
    make: Any = {torch.float32: ctypes.c_float, torch.float64: float, torch.float16: numpy.float16}[dtype]

    def convert(value: Any, device: int) -> Any:
        if not isinstance(value, numbers.Real):
            if isinstance(value, Tensor):
                _refuse_tensor(what)
            raise TypeError(f"{what}: expected a number, got {value!r}")
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{what}: the integer is beyond the largest value {most:.6g}") from None
        if abs(number) > most and math.isfinite(number):
            raise ValueError(f"{what}: {number!r} is beyond the largest value {most:.6g}")
        return make(number)

    return convert


def _refuse_tensor(what: str) -> NoReturn:
    raise TypeError(
        f"{what}: expected a number, got a tensor: use a pointer parameter, or pass tensor.item(), which waits for "
        "the GPU"
    )
