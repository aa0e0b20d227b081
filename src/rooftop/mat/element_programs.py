"""Translate an expression of Mats to an expression of `rooftop.kernels`, which describes the operations on one element
from its loads to its store.

The CPU's loops (`loop_programs.py`) and a GPU's kernel (`kernel_programs.py`) are generated from the translated
expression.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.elementwise import expressions
from rooftop.kernels.elementwise.expressions import NAMES, Expression, apply, argument, constant
from rooftop.kernels.elementwise.programs import Program
from rooftop.mat.conversions import Scaling
from rooftop.mat.exactness import Bounds, BoundsOf, depth_bounds, limits_in, rounded_bounds, trusted
from rooftop.mat.expressions import BITWISE, COMPARISONS, MatExpr, is_one, same_number, topological
from rooftop.mat.remembered import remember
from rooftop.mat.type_codes import CV_16U, CV_32U, CV_64S, CV_64U, DEPTHS, CV_Bool

# depths that are read as signed numbers and then masked
_UNSIGNED = {CV_16U: ("int32", 0xFFFF), CV_32U: ("int64", 0xFFFFFFFF)}
_TOP = 1 << 63
_NEAREST_IN_FLOAT32 = 1 << 22
_LESS_THAN_HALF = Fraction(1, 4)


def signed(x: Tensor) -> Tensor:
    """View x in a signed dtype that kernels support."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    carriers = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return x.view(carriers[x.dtype]) if x.dtype in carriers else x


class Numbers:
    """Build a program that computes in one dtype. It converts the elements that it loads from Mats to this dtype, and
    its result to the dtype in which the result is stored. The program's arguments are the Mats, then rows of numbers
    (one number per channel), then single numbers.

    Args:
        dtype: the dtype of the computation.
        for_kernel: whether a GPU kernel runs the program, not a CPU loop. Kernels take float64 numbers as integers of
            the same bits. Kernels convert 32-bit numbers to float64 and back without conversion instructions, because a
            GPU's conversion instructions have a quarter of the throughput of additions.

    Attributes:
        result: the expression to store.
        about: bounds of the value before the final rounding and saturation, including the errors of earlier roundings.
            None if unknown.
        rows: numbers that differ between channels.
        rows_dtype: the dtype of the tensors of `rows`.
        numbers: numbers that are equal for all channels, not converted to the dtype.
    """

    result: Expression
    about: Bounds | None = None
    first_number = 1

    def __init__(self, dtype: torch.dtype, for_kernel: bool) -> None:
        self.for_kernel = for_kernel
        self.rows: list[tuple[int | float, ...]] = []
        self.rows_dtype = dtype
        self.numbers: list[int | float] = []
        self.compute_in(dtype)

    def compute_in(self, dtype: torch.dtype) -> None:
        self.dtype, self.name = dtype, NAMES[dtype]
        self.floating = dtype.is_floating_point

    @cached_property
    def program(self) -> Program:
        """The element expression as a `Program` that `rooftop.kernels` can run."""
        return Program("t" * self.first_number + "n" * len(self.numbers), (self.result,), ("",))

    @cached_property
    def operations(self) -> int:
        """The number of nodes in the program's expression, including arguments and constants."""
        return len(expressions.topological([self.result]))

    def cast(self, x: Expression) -> Expression:
        return apply(self.name, x)

    def plain(self, number: int | float) -> Expression:
        """A constant that is compiled into the program, as a float in floating-point programs and as an int in
        others.
        """
        return constant(float(number) if self.floating else int(number))

    def given(self, number: int | float, dtype: torch.dtype) -> Expression:
        """An argument of the program that is converted to `dtype`. Each launch passes it `number`, so another number
        needs no new compilation.
        """
        number_of = argument(self.first_number + len(self.numbers))
        if dtype == torch.float64 and self.for_kernel:
            (bits,) = struct.unpack("<q", struct.pack("<d", number))
            self.numbers.append(bits)
            return apply("float64_of_bits", number_of)
        self.numbers.append(number)
        return apply(NAMES[dtype], number_of)

    def loaded(self, x: Expression, depth: int) -> Expression:
        """Convert a loaded element of a Mat of this depth to the program's dtype."""
        if depth == CV_32U and self.for_kernel and self.dtype == torch.float64:
            x = apply("float64", x)
            return apply("where", apply("lt", x, 0.0), apply("add", x, 2.0**32), x)
        if depth in _UNSIGNED:
            name, ones = _UNSIGNED[depth]
            x = apply("bitwise_and", apply(name, x), ones)
        elif depth == CV_64U:  # float64 represents each 32-bit half exactly, and the sum of both is rounded once
            low = apply("bitwise_and", x, 0xFFFFFFFF)
            high = apply("float64", apply("sub", x, low))
            high = apply("where", apply("lt", high, 0.0), apply("add", high, 2.0**64), high)
            x = apply("add", high, apply("float64", low))
        return self.cast(x)

    def stored(self, x: Expression, known: Bounds | None, depth: int) -> Expression:
        """Convert a value to a depth, in the dtype in which memory stores that depth."""
        if depth == CV_Bool:
            return apply("ne", x, self.plain(0))
        limits = depth_bounds(depth)
        carrier = NAMES[signed(torch.empty(0, dtype=DEPTHS[depth].dtype, device="cpu")).dtype]
        if limits is None:
            exact = self.floating or (known is not None and known.within(torch.float32))
            return apply(carrier, x if exact else apply("float64", x))
        if self.floating and (known is None or not limits.contain(known)):
            if DEPTHS[depth].size_bytes == 8:
                return _stored_64(apply("round", apply("float64", x)), depth)
            if DEPTHS[depth].size_bytes == 4 and self.dtype == torch.float32:  # float32 cannot represent the limits
                x, self.dtype, self.name = apply("float64", x), torch.float64, "float64"
        if self.floating and self.for_kernel and DEPTHS[depth].size_bytes <= 4:
            return apply(carrier, self.nearest(x, known, limits))
        x = self.within_limits(x, known, depth)
        return apply(carrier, apply("int64" if DEPTHS[depth].size_bytes > 2 else "int32", x))

    def nearest(self, x: Expression, known: Bounds | None, limits: Bounds) -> Expression:
        """Round half to even and saturate to the limits; the result is an int32 with the lower 32 bits of this integer.
        NaN becomes the least value."""
        if known is not None and limits.low <= known.low and known.high <= limits.high:
            return apply("nearest", x if known.largest <= _NEAREST_IN_FLOAT32 else apply("float64", x))
        if self.about is not None:
            rounded = apply("nearest", x)
            if self.about.low < limits.low - _LESS_THAN_HALF:
                rounded = apply("maximum", rounded, int(limits.low))
            if self.about.high > limits.high + _LESS_THAN_HALF:
                rounded = apply("minimum", rounded, int(limits.high))
            return rounded
        low, high = self.plain(int(limits.low)), self.plain(int(limits.high))  # rounding does not change the limits
        below = apply("where", apply("lt", x, high), x, high)
        return apply("nearest", apply("where", apply("gt", x, low), below, low))

    def within_limits(self, x: Expression, known: Bounds | None, depth: int) -> Expression:
        """Round half to even and saturate to the range of a depth; NaN becomes the depth's least value."""
        if depth == CV_Bool:
            return self.cast(apply("ne", x, self.plain(0)))
        limits = depth_bounds(depth)
        assert limits is not None
        if self.floating and (known is None or known.unit):
            x = apply("round", x)
        # An unnecessary limit costs time, and can be wrong: if both limits are applied to a 16-bit -x, the code from
        # ptxas saturates x = -32768 wrongly.
        low, high = map(self.plain, limits_in(self.dtype, depth))
        below = x
        if known is None or known.high > limits.high:
            below = apply("where", apply("lt", x, high), x, high)
        if known is None or known.low < limits.low:
            return apply("where", apply("gt", x, low), below, low)
        return below


class ElementProgram(Numbers):
    """An expression as a program that computes one element.

    Args:
        root: an expression of Mats, numbers and elementwise operations.
        bounds: bounds of each node's value, by the node's id.
        dtype: the dtype of the computation.
        leaves: the Mats among the nodes.
        depth: the depth of the result, which is stored in the dtype that `signed` returns for this depth.
        for_kernel: see `Numbers`.

    Attributes:
        values: for each node of `root`, by the node's id, the expression that computes the node's value.
    """

    def __init__(
        self, root: MatExpr, bounds: BoundsOf, dtype: torch.dtype, leaves: Sequence[MatExpr], depth: int,
        for_kernel: bool,
    ) -> None:  # fmt: skip
        super().__init__(dtype, for_kernel)
        self.bounds = trusted(bounds, dtype)
        nodes = topological(root)
        if dtype == torch.float64:
            self.about = rounded_bounds(root, bounds)
        for each in nodes:
            if each._operation == "numbers" and not is_one(each) and self._row_of(each) is None:
                self.rows.append(self._numbers(each))
        if for_kernel and self.rows and not self.floating:
            self.rows_dtype = _narrowest([number for row in self.rows for number in row], dtype)
        self.first_number = len(leaves) + len(self.rows)
        self.first_row = len(leaves)
        place = {id(each): n for n, each in enumerate(leaves)}
        self.values: dict[int, Expression] = {}
        for each in nodes:
            if each._operation == "mat":
                self.values[id(each)] = self.loaded(argument(place[id(each)]), each.depth())
            elif each._operation == "numbers":
                self.values[id(each)] = self._number(each)
            else:
                self.values[id(each)] = self._computed(each, [self.values[id(o)] for o in each._operands])
        self.result = self.stored(self.values[id(root)], self.bounds[id(root)], depth)

    # Operands.

    def _numbers(self, each: MatExpr) -> tuple[int | float, ...]:
        return tuple(float(value) if self.floating else int(value) for value in each._value)

    def _row_of(self, each: MatExpr) -> int | None:
        """The index of the channel row in `rows` that equals the numbers of a node (one per channel), or None if there
        is no such row.
        """
        numbers = self._numbers(each)
        return next((n for n, row in enumerate(self.rows) if all(map(same_number, row, numbers))), None)

    def _number(self, each: MatExpr) -> Expression:
        numbers = self._numbers(each)
        if not is_one(each):
            row = self._row_of(each)
            assert row is not None
            return self.cast(argument(self.first_row + row))
        return self.given(numbers[0], self.dtype)

    # Operations.

    def _computed(self, each: MatExpr, of: list[Expression]) -> Expression:
        operation = each._operation
        if operation in COMPARISONS:
            return apply("mul", self.cast(apply(operation, *of)), self.plain(255))
        if operation in BITWISE:
            return self._bits(each, of)
        if operation == "div":
            quotient = apply("div", *of)
            if DEPTHS[each.depth()].limits is None and each.depth() != CV_Bool:
                return quotient
            return apply("where", apply("eq", of[1], 0.0), 0.0, quotient)
        if operation in ("min", "max"):
            a, b = of if each._operands[0]._operation != "numbers" else of[::-1]
            if not self.floating:
                return apply("minimum" if operation == "min" else "maximum", a, b)
            if any(map(is_one, each._operands)):
                kept = apply("le" if operation == "min" else "ge", a, b)  # a if both are zeros, as in torch.clamp
                return apply("where", kept, a, apply("where", apply("ne", a, a), a, b))  # NaN if a or b is NaN
            chosen = apply("lt" if operation == "min" else "gt", a, b)
            return apply("where", apply("bitwise_or", chosen, apply("ne", a, a)), a, b)  # NaN if a or b is NaN
        return apply(operation, *of)

    def _bits(self, each: MatExpr, of: list[Expression]) -> Expression:
        """Compute a bitwise operation on the operands as stored: rounded and saturated to integers of the node's
        depth.
        """
        whole = {torch.float32: "int32", torch.float64: "int64"}.get(self.dtype, self.name)
        limits = depth_bounds(each.depth())
        assert limits is not None
        operands = [
            apply(whole, self.within_limits(x, self.bounds[id(operand)], each.depth()))
            for x, operand in zip(of, each._operands, strict=True)
        ]
        if each._operation == "not":
            return self.cast(apply("bitwise_xor", operands[0], -1 if limits.low < 0 else int(limits.high)))
        return self.cast(apply(f"bitwise_{each._operation}", *operands))


class ConversionProgram(Numbers):
    """Converts and scales elements of one depth to another as in `conversions.py`, for depths other than CV_64S, CV_64U
    and half precision."""

    def __init__(self, depth: int, new_depth: int, scaling: Scaling | None, for_kernel: bool) -> None:
        known = depth_bounds(depth)
        wholes = (torch.int16, torch.int32, torch.int64)
        dtype = DEPTHS[depth].dtype if known is None else next(each for each in wholes if known.within(each))
        super().__init__(dtype, for_kernel)
        loaded = self.loaded(argument(0), depth)
        if scaling is None:
            self.result = self.stored(loaded, known, new_depth)
            return
        self.compute_in(scaling.dtype)
        x = self.cast(loaded)
        both = scaling.dtype == torch.float64 or (scaling.beta != 0 and scaling.alpha != 1)
        alpha, beta = (
            self.given(number, torch.float64 if both else scaling.dtype) for number in (scaling.alpha, scaling.beta)
        )
        if both:
            x = self.cast(apply("add", apply("mul", apply("float64", x), alpha), beta))
        elif scaling.beta == 0:
            x = apply("mul", x, alpha)
        else:
            x = apply("add", x, beta)
        self.result = self.stored(x, None, new_depth)


def conversion_program(depth: int, new_depth: int, scaling: Scaling | None, for_kernel: bool) -> ConversionProgram:
    """Return the program of a conversion, cached by the arguments."""
    key = (depth, new_depth, repr(scaling), for_kernel)  # repr distinguishes -0.0 from 0.0
    found = _conversions.get(key)
    if found is None:
        found = ConversionProgram(depth, new_depth, scaling, for_kernel)
        remember(_conversions, key, found, _MOST_CONVERSIONS)
    return found


_MOST_CONVERSIONS = 1024
_conversions: dict[Any, ConversionProgram] = {}


def _narrowest(numbers: Sequence[int | float], dtype: torch.dtype) -> torch.dtype:
    """The narrowest of uint8, int16 and int32 that represents all the numbers, or else `dtype`."""
    for each in (torch.uint8, torch.int16, torch.int32):
        limits = torch.iinfo(each)
        if limits.min <= min(numbers) and max(numbers) <= limits.max:
            return each
    return dtype


def _stored_64(x: Expression, depth: int) -> Expression:
    """Convert a rounded float64 value to a 64-bit integer. float64 cannot represent 2^63 - 1 and 2^64 - 1, so values
    beyond the limit are handled separately."""
    top, greatest = float(_TOP), float(_TOP - 1024)  # the greatest float64 below 2^63

    def converted(y: Expression, least: float) -> Expression:
        inside = apply("where", apply("lt", y, greatest), y, greatest)
        return apply("int64", apply("where", apply("gt", y, least), inside, least))

    if depth == CV_64S:
        return apply("where", apply("ge", x, top), _TOP - 1, converted(x, -top))
    # 2^63, which int64 cannot represent, is subtracted in two steps
    upper = apply("sub", apply("sub", converted(apply("sub", x, top), 0.0), _TOP - 1), 1)
    bits = apply("where", apply("ge", x, top), upper, converted(x, 0.0))
    return apply("where", apply("ge", x, 2 * top), -1, bits)
