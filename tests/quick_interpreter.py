"""Triton's interpreter, several times faster and with the same results.

The interpreter computes with NumPy. An operation on a tile of the tests takes a few microseconds, but the work around
it takes a hundred:
it builds types again, wraps shapes element by element, and searches all of Triton's language for functions to replace
at every call of a device function. This module does each of these steps once. The module computes reductions by a
function of the kernel for whole tiles, not for one element at a time.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

Semantic = semantic.TritonSemantic


def quicken() -> None:
    """Replaces the slow parts of the interpreter in this process."""
    interpreter._patch_lang = _replace_the_language
    interpreter._patch_attr = _replace
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._convert_float = _converted
    interpreter.ReduceOps.generic_reduce = _reduce
    core.block_type.__init__ = _init_block_type
    core.block_type.with_element_ty = _with_element_ty
    core.block_type.name = property(lambda type_: f"<{type_.shape}, {type_.element_ty}>")
    core.tensor.__init__ = _init_tensor
    interpreter.TensorHandle.__init__ = _init_handle
    core._unwrap_if_constexpr = _unwrapped
    core.dtype.__eq__ = _same_dtype
    core.dtype.is_int = lambda dtype: dtype.name in INTEGERS
    Semantic.computation_type_impl = functools.cache(Semantic.computation_type_impl)
    Semantic.binary_op_type_checking_impl = _checked
    Semantic.broadcast_impl_value = _broadcast
    Semantic.to_tensor = _to_tensor
    # The interpreter compares every sum of integers with the sum in 64 bits, for a device assertion that is only used
    # in debugging.
    Semantic.binary_op_sanitize_overflow_impl = lambda *_: None


_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_convert_float = interpreter._convert_float
_unwrap_if_constexpr = core._unwrap_if_constexpr
_dtype_eq = core.dtype.__eq__
_binary_op_type_checking_impl = Semantic.binary_op_type_checking_impl
_broadcast_impl_value = Semantic.broadcast_impl_value
_semantic_to_tensor = Semantic.to_tensor

NUMBERS = (bool, int, float)
INTEGERS = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)


def _replace_the_language(kernel: Any) -> Any:
    """Replaces the language once for all kernels, since no kernel is compiled in this process."""
    _for_good()
    return interpreter._LangPatchScope()


@functools.cache
def _for_good() -> None:
    _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))


def _replace(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    member = getattr(member, "__wrapped__", member)  # without the check whether a semantic exists

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*arguments, **options)

    if place is core.tensor and name in OPERATORS:
        scope.set_attr(place, name, _quick_operator(*OPERATORS[name], interpreted))
    elif place is core.tensor and name == "__getitem__":
        scope.set_attr(place, name, _quick_getitem(interpreted))
    else:
        scope.set_attr(place, name, interpreted)


OPERATORS = {
    "__add__": (numpy.add, "same"),
    "__radd__": (numpy.add, "same"),
    "__sub__": (numpy.subtract, "same"),
    "__mul__": (numpy.multiply, "same"),
    "__rmul__": (numpy.multiply, "same"),
    "__and__": (numpy.bitwise_and, "bits"),
    "__or__": (numpy.bitwise_or, "bits"),
    "__lt__": (numpy.less, "truth"),
    "__le__": (numpy.less_equal, "truth"),
    "__gt__": (numpy.greater, "truth"),
    "__ge__": (numpy.greater_equal, "truth"),
    "__eq__": (numpy.equal, "truth"),
    "__ne__": (numpy.not_equal, "truth"),
}
"""Operators that NumPy computes like Triton if both operands have the same of these dtypes, with the kind of result."""

EXACT = {
    "int32": numpy.int32,
    "int64": numpy.int64,
    "uint32": numpy.uint32,
    "fp32": numpy.float32,
    "fp64": numpy.float64,
}
EXACT_BITS = {"int1": numpy.bool_, "int32": numpy.int32, "int64": numpy.int64, "uint32": numpy.uint32}
CONSTANTS = {
    "int32": (int, 1 << 31),
    "int64": (int, 1 << 63),
    "fp32": (float, float("inf")),
    "fp64": (float, float("inf")),
}


def _quick_operator(compute: Any, kind: str, interpreted: Any) -> Any:
    """An operator without Triton's conversions for operands that need none; `interpreted` handles all others."""
    exact = EXACT_BITS if kind == "bits" else EXACT

    def operator(one: Any, other: Any, **options: Any) -> Any:
        dtype = one.dtype
        number = exact.get(dtype.name)
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is core.tensor:
            a, b = one.handle.data, other.handle.data
            if other.dtype is dtype and a.dtype == number and b.dtype == number:
                sizes = _joint_sizes(_sizes(one.type), _sizes(other.type))
                if sizes is not None:
                    return _tensor(compute(a, b), core.int1 if kind == "truth" else dtype, sizes)
            elif compute is numpy.add and type(dtype) is core.pointer_type and b.dtype in OFFSETS:
                sizes = _joint_sizes(_sizes(one.type), _sizes(other.type))
                if sizes is not None:
                    size = max(1, dtype.element_ty.primitive_bitwidth // 8)
                    return _tensor(a + size * b.astype(numpy.uint64), dtype, sizes)
        elif number is not None and kind != "bits":
            of_type, most = CONSTANTS.get(dtype.name, (None, 0))
            if type(other) is of_type and -most < other < most and one.handle.data.dtype == number:
                found = compute(one.handle.data, number(other))
                return _tensor(found, core.int1 if kind == "truth" else dtype, _sizes(one.type))
        return interpreted(one, other, **options)

    return operator


OFFSETS = (numpy.dtype(numpy.int32), numpy.dtype(numpy.int64))


def _quick_getitem(interpreted: Any) -> Any:
    """`x[:, None]` and other new dimensions of a tile."""

    def getitem(x: Any, slices: Any, **options: Any) -> Any:
        sizes, index = _sizes(x.type), slices.values if type(slices) is core.tuple else slices
        if sizes and type(index) in (tuple, list) and all(each is None or each == slice(None) for each in index):
            data = x.handle.data[tuple(index)]
            return _tensor(data, x.dtype, data.shape)
        return interpreted(x, slices, **options)

    return getitem


def _tensor(data: Any, dtype: Any, sizes: tuple[int, ...]) -> Any:
    type_ = _block_of(dtype, sizes) if sizes else dtype
    return core.tensor(interpreter.TensorHandle(data, dtype), type_)


def _joint_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    return one if one == other else _common_sizes(one, other)


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    return x if type(x) is core.tensor else _semantic_to_tensor(self, x, check_type)


_dtypes: dict[str, Any] = {}


def _numpy_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _get_np_dtype(dtype.scalar)
    return _dtypes[name]


def _converted(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Converts between bfloat16 and float32 by moving bits if nothing is rounded. The interpreter's own code handles
    denormals."""
    names = (input_dtype.name, output_dtype.name)
    if rounding_mode is None and names == ("bf16", "fp32"):
        bits = input.view(numpy.uint16).astype(numpy.uint32) << 16
        if not _has_denormals(bits):
            return bits
    if rounding_mode is None and names == ("fp32", "bf16"):
        bits = input.view(numpy.uint32)
        if not _has_denormals(bits):
            return (bits >> 16).astype(numpy.uint16)
    return _convert_float(input, input_dtype, output_dtype, rounding_mode)


def _has_denormals(bits: Any) -> bool:
    """Whether float32 numbers include denormals: the sign is shifted out, and 0 becomes the largest number."""
    return bool((((bits << 1) - 1) < (1 << 24) - 1).any())


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return _unwrap_if_constexpr(value) if _may_hold_constexpr(kind) else value


@functools.cache
def _may_hold_constexpr(kind: type) -> bool:
    return issubclass(kind, (list, tuple, core.tuple, core.constexpr))


def _same_dtype(one: Any, other: Any) -> bool:
    return one is other or _dtype_eq(one, other)


@functools.cache
def _shape_of_block(sizes: tuple[int, ...]) -> tuple[Any, int]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), core.validate_block_shape(sizes)


@functools.cache
def _shape_of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numpy.prod(sizes, dtype=int).item())


def _init_block_type(type_: Any, element_ty: Any, shape: Any) -> None:
    type_.element_ty = element_ty
    type_.sizes = tuple([_unwrapped(size) for size in _unwrapped(shape)])
    type_.shape, type_.numel = _shape_of_block(type_.sizes)


def _with_element_ty(type_: Any, element_ty: Any) -> Any:
    made = core.block_type.__new__(core.block_type)
    made.element_ty, made.sizes, made.shape, made.numel = element_ty, type_.sizes, type_.shape, type_.numel
    return made


def _sizes(type_: Any) -> tuple[int, ...]:
    return type_.sizes if type_.is_block() else ()


def _checked(
    self: Any, one: Any, other: Any, one_ptr: bool = False, other_ptr: bool = False, arithmetic: bool = True,
    division: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return two tensors that already have the result's type unchanged, and remember the tensors of constants."""
    if type(one) in NUMBERS and type(other) is core.tensor:
        return _with_constant(self, one, other, True, (one_ptr, other_ptr, arithmetic, division))
    if type(other) in NUMBERS and type(one) is core.tensor:
        return _with_constant(self, other, one, False, (one_ptr, other_ptr, arithmetic, division))
    if type(one) is core.tensor and type(other) is core.tensor:
        dtype = one.dtype
        if dtype is other.dtype and not dtype.is_ptr():
            result = self.computation_type_impl(dtype, False, dtype, False, division) if arithmetic else dtype
            if result == dtype:
                return _broadcast(self, one, other)
    return _binary_op_type_checking_impl(self, one, other, one_ptr, other_ptr, arithmetic, division)


_constants: dict[Any, tuple[Any, Any, Any]] = {}


def _with_constant(
    self: Any, number: float, x: Any, number_is_first: bool, rest: tuple[bool, bool, bool, bool]
) -> tuple[Any, Any]:
    """Return the operands of a number and a tensor, in their order. If the tensor stays as it is, the number is the
    same tile the next time."""
    key = (type(number), number, number_is_first, x.dtype.name, _sizes(x.type), rest)
    if key in _constants:
        data, dtype, type_ = _constants[key]
        constant = core.tensor(interpreter.TensorHandle(data, dtype), type_)
        return (constant, x) if number_is_first else (x, constant)
    given = (number, x) if number_is_first else (x, number)
    found: tuple[Any, Any] = _binary_op_type_checking_impl(self, *given, *rest)
    constant, same = found if number_is_first else found[::-1]
    if same is x and number != 0:  # 0.0 and -0.0 are equal
        constant.handle.data.flags.writeable = False
        _constants[key] = (constant.handle.data, constant.handle.dtype, constant.type)
    return found


def _broadcast(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
    sizes = _sizes(one.type), _sizes(other.type)
    if sizes[0] == sizes[1]:
        return one, other
    common = _common_sizes(*sizes)
    if common is None:
        return _broadcast_impl_value(self, one, other)
    return _spread(one, sizes[0], common), _spread(other, sizes[1], common)


@functools.cache
def _common_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes of both operands together; None where Triton adds dimensions or refuses."""
    if not one or not other:
        return one or other
    pairs = list(zip(one, other, strict=False))
    fits = len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in pairs)
    return tuple(b if a == 1 else a for a, b in pairs) if fits else None


def _spread(x: Any, sizes: tuple[int, ...], common: tuple[int, ...]) -> Any:
    if sizes == common:
        return x
    data = x.handle.data
    repeated = numpy.empty(common, data.dtype if sizes else _numpy_dtype(x.handle.dtype))
    repeated[...] = data
    return core.tensor(interpreter.TensorHandle(repeated, x.handle.dtype), _block_of(x.dtype, common))


def _block_of(dtype: Any, sizes: tuple[int, ...]) -> Any:
    """The type of a tile, the same object each time."""
    key = dtype.name, sizes
    if key not in _blocks:
        _blocks[key] = core.block_type(dtype, sizes)
    return _blocks[key]


_blocks: dict[Any, Any] = {}


def _init_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


def _init_tensor(tensor: Any, handle: Any, type_: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar
    tensor.shape, tensor.numel = _shape_of_tensor(type_.sizes if type_.is_block() else ())


def _reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """Combines neighbours, then neighbours of the results: Triton's sizes are powers of two and its reduction functions
    are associative."""
    values, axis = self.unravel(input, self.axis)
    dtypes = [value.dtype for value in values]
    parts = [numpy.moveaxis(value.handle.data, axis, -1) for value in values]
    while parts[0].shape[-1] > 1:
        halves = [
            self.to_tensor(part[..., start::2], dtype)
            for start in (0, 1)
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        combined = self.combine_fn.fn(*halves)
        combined = combined if isinstance(combined, (tuple, core.tuple)) else (combined,)
        parts = [each.handle.data.astype(part.dtype) for each, part in zip(combined, parts, strict=True)]
    found = []
    for part, dtype, value in zip(parts, dtypes, input, strict=True):
        if self.keep_dims:
            rank = value.handle.data.ndim
            result = numpy.moveaxis(part, -1, axis) if self.axis is not None else part.reshape((1,) * rank)
        else:
            result = part[..., 0] if self.axis is not None else part.item()
        found.append(self.to_tensor(result, dtype))
    return found
