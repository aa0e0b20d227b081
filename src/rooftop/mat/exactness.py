"""Choose the narrowest dtype that computes an expression with the same result as float64, from the bounds of all its
values.

The reference is float64: each operation is rounded to float64, and the final value is rounded once to the target's
depth. If every value is known to be a multiple of 2^unit that a narrower dtype represents exactly, computing in that
dtype gives exactly the same numbers. So 8-bit images are added in int16, and `a * 0.5` in float32.

Floating elements have no bounds. An expression of floating elements, computed in float32 and stored as float32, gives
the same bits as in float64 if each path from an element to the result contains at most one operation that rounds, and
no comparison has a rounded operand. min, max, abs, negation and comparisons do not round. One sum, difference, product
or quotient of float32 numbers, rounded to float32, equals the float64 result rounded to float32, since 53 >= 2 * 24 + 2
(Figueroa 1995, "When is double rounding innocuous?"). The same applies to half precision computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from rooftop.mat.expressions import BITWISE, COMPARISONS, MatExpr, topological
from rooftop.mat.type_codes import CV_16BF, CV_16F, CV_32F, CV_64U, DEPTHS, CV_Bool

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_FLOAT32_BITS = 24
_SMALL = 1 << 29  # float64 rounds values of up to 2 * _SMALL by at most 2^-23
_ROUNDED = Fraction(1, 1 << 23)
# if two integers have at most this magnitude, their float32 quotient rounds to the same integer as the exact quotient
_SMALL_QUOTIENT = 1 << 11


@dataclass(frozen=True)
class Bounds:
    """Bounds of a value: low <= value <= high, and the value is a multiple of 2^unit with unit <= 0."""

    low: Fraction
    high: Fraction
    unit: int = 0

    @property
    def largest(self) -> Fraction:
        return max(abs(self.low), abs(self.high))

    def contain(self, other: Bounds) -> bool:
        """Whether `other` describes only integers, and all of them lie between this low and this high."""
        return other.unit == 0 and self.low <= other.low and other.high <= self.high

    def within(self, dtype: torch.dtype) -> bool:
        """Whether the dtype represents every value within these bounds exactly."""
        if dtype.is_floating_point:
            bits = _FLOAT32_BITS if dtype == torch.float32 else 53
            return self.largest <= Fraction(2) ** (bits + self.unit) and self.unit > -100
        limits = torch.iinfo(dtype)
        return self.unit == 0 and limits.min <= self.low and self.high <= limits.max


BoundsOf = dict[int, Bounds | None]  # bounds by the node's id; None if unknown
TRUTH = Bounds(Fraction(0), Fraction(255))


def bounds_of(root: MatExpr) -> BoundsOf:
    """The bounds of each node's value, by the node's id."""
    found: BoundsOf = {}
    for each in topological(root):
        found[id(each)] = _bounds(each, [found[id(operand)] for operand in each._operands])
    return found


def trusted(bounds: BoundsOf, dtype: torch.dtype) -> BoundsOf:
    """The bounds that hold for values computed in a dtype; None for values that this dtype may have rounded."""
    return {n: known if known is not None and known.within(dtype) else None for n, known in bounds.items()}


def rounded_bounds(root: MatExpr, bounds: BoundsOf) -> Bounds | None:
    """Bounds of the value that float64 computes, with the rounding errors of all operations.

    None if the bounds are unknown or too large.
    """
    beyond: dict[int, Fraction] = {}  # how far each value may lie outside its exact bounds
    for each in topological(root):
        known = bounds[id(each)]
        if known is None or known.largest > _SMALL:
            return None
        of = [beyond[id(operand)] for operand in each._operands]
        if each._operation in ("add", "sub"):
            found = of[0] + of[1] + _ROUNDED
        elif each._operation == "mul":
            a, b = (each_of.largest for operand in each._operands if (each_of := bounds[id(operand)]) is not None)
            found = a * of[1] + b * of[0] + of[0] * of[1] + _ROUNDED
        elif each._operation in ("neg", "abs", "min", "max"):
            found = max(of)
        else:  # Mats, numbers, comparisons and bitwise operations
            found = Fraction(0)
        if found > _SMALL:
            return None
        beyond[id(each)] = found
    known = bounds[id(root)]
    assert known is not None
    return Bounds(known.low - beyond[id(root)], known.high + beyond[id(root)], known.unit)


def limits_in(dtype: torch.dtype, depth: int) -> tuple[int, int]:
    """The limits of an integer depth, clipped to the range of the dtype if that is an integer dtype."""
    low, high = DEPTHS[depth].limits or (0, 1)
    if dtype.is_floating_point:
        return low, high
    own = torch.iinfo(dtype)
    return max(low, own.min), min(high, own.max)


def depth_bounds(depth: int) -> Bounds | None:
    """The range of integers that a depth stores; None for a floating-point depth."""
    if depth == CV_Bool:
        return Bounds(Fraction(0), Fraction(1))
    limits = DEPTHS[depth].limits
    return None if limits is None else Bounds(Fraction(limits[0]), Fraction(limits[1]))


def computing_dtype(root: MatExpr, bounds: BoundsOf, depth: int) -> torch.dtype:
    """The narrowest dtype in which the expression gives the same stored numbers as in float64, for a target depth.

    Integers beyond float64's 53 bits are computed exactly in int64, if they are below 2^63.
    """
    nodes = topological(root)
    known = [each for node in nodes if (each := bounds[id(node)]) is not None]
    if len(known) == len(nodes):
        for dtype in _INTEGERS:
            if all(each.within(dtype) for each in known):
                return dtype
    if _float32_is_enough(root, nodes, bounds, depth):
        return torch.float32
    if len(known) == len(nodes) and all(each.within(torch.int64) for each in known):
        return torch.int64
    return torch.float64


def _bounds(each: MatExpr, of: list[Bounds | None]) -> Bounds | None:
    operation = each._operation
    if operation == "mat":
        return depth_bounds(each.depth())
    if operation == "numbers":
        return _bounds_of_numbers(each._value)
    if operation in COMPARISONS:
        return TRUTH
    if operation in BITWISE:
        return depth_bounds(each.depth())
    if operation in ("product", "inverse", "div") or any(one is None for one in of):
        return None
    a = of[0]
    b = of[-1]
    assert a is not None
    assert b is not None
    unit = min(a.unit, b.unit)
    if operation == "add":
        return Bounds(a.low + b.low, a.high + b.high, unit)
    if operation == "sub":
        return Bounds(a.low - b.high, a.high - b.low, unit)
    if operation == "mul":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return Bounds(min(corners), max(corners), a.unit + b.unit)
    if operation == "neg":
        return Bounds(-a.high, -a.low, unit)
    if operation == "abs":
        least = Fraction(0) if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
        return Bounds(least, a.largest, unit)
    choose = min if operation == "min" else max
    return Bounds(choose(a.low, b.low), choose(a.high, b.high), unit)


def _bounds_of_numbers(numbers: tuple[int | float, ...]) -> Bounds | None:
    if not all(math.isfinite(number) for number in numbers):
        return None
    exact = [Fraction(number) for number in numbers]
    return Bounds(min(exact), max(exact), -max(each.denominator.bit_length() - 1 for each in exact))


def _float32_is_enough(root: MatExpr, nodes: list[MatExpr], bounds: BoundsOf, depth: int) -> bool:
    """Whether float32 gives the same stored numbers as float64: each path through the expression rounds at most once in
    float32, and storing the rounded value gives the same number as storing the float64 value."""
    narrow = {CV_32F: (CV_32F,), CV_16F: (CV_16F,), CV_16BF: (CV_16BF,)}.get(depth, ())
    rounded: dict[int, bool] = {}
    # whether all Mats have the target's depth, which also represents all numbers exactly: then a float32 result that is
    # rounded to this depth gives the same stored number as a float64 result
    leaves_allow = True
    for each in nodes:
        operands = [rounded[id(operand)] for operand in each._operands]
        known = bounds[id(each)]
        exact = known is not None and known.within(torch.float32)
        operation = each._operation
        if operation == "mat":
            if not exact and each.depth() not in (CV_32F, CV_16F, CV_16BF):
                return False
            leaves_allow &= each.depth() in narrow
            rounded[id(each)] = False
        elif operation == "numbers":
            if not all(_is_held(number, CV_32F) for number in each._value):
                return False
            leaves_allow &= all(_is_held(number, depth) for number in each._value) if narrow else True
            rounded[id(each)] = False
        elif operation in ("min", "max", "abs", "neg"):
            rounded[id(each)] = any(operands)
        elif operation in COMPARISONS or operation in BITWISE:
            if any(operands) or (operation in BITWISE and not exact):
                return False
            rounded[id(each)] = False
        elif any(operands):
            return False
        else:
            rounded[id(each)] = not exact
    if not rounded[id(root)]:
        return True
    return (leaves_allow and bool(narrow)) or (root._operation == "div" and _is_small_quotient(root, bounds, depth))


def _is_small_quotient(root: MatExpr, bounds: BoundsOf, depth: int) -> bool:
    of = [bounds[id(operand)] for operand in root._operands]
    whole = all(each is not None and each.unit == 0 and each.largest <= _SMALL_QUOTIENT for each in of)
    return whole and DEPTHS[depth].limits is not None and depth != CV_64U


def _is_held(number: int | float, depth: int) -> bool:
    """Whether the floating-point depth represents this number without rounding."""
    if math.isnan(number) or math.isinf(number):
        return True
    held = torch.tensor(float(number), dtype=torch.float64, device="cpu").to(DEPTHS[depth].dtype).double().item()
    return held == number
