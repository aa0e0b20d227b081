"""Exact evaluation of integer expressions whose intermediate values may exceed 64 bits, on any device.

A number is a list of int64 tensors: its digits in base 2^30, lowest first. The last digit carries the sign; all other
digits are from 0 to 2^30 - 1. The bounds of a value determine the number of digits. No carry is lost: int64 has 34 bits
more than a digit, and a product of two digits is split into two digits before it is added.

Expressions whose values all fit in int64 are evaluated elsewhere, in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from rooftop.mat.exactness import Bounds, BoundsOf, depth_bounds
from rooftop.mat.expressions import BITWISE, COMPARISONS, MatExpr, topological
from rooftop.mat.type_codes import CV_16U, CV_64F, CV_64S, CV_64U, CV_Bool

Digits = list[Tensor]

_BITS = 30
_MASK = (1 << _BITS) - 1
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements that are computed at a time, with all their digits
_PIECE = 5  # bits per step of the conversion to float64


def store_whole_numbers(
    root: MatExpr, bounds: BoundsOf, leaves: Sequence[MatExpr], tensors: Sequence[Tensor], into: Tensor, depth: int
) -> None:
    """Evaluate an integer expression exactly and write the result: saturated to an integer depth, or rounded once to
    float64.

    Args:
        bounds: bounds of each node's value, by the node's id. Every node is an integer expression.
        leaves, tensors: the Mats among the nodes, and their elements (..., channels) in the target's shape.
        into: the target, in the dtype of `depth`. A tensor that overlaps it must have exactly the same elements.
        depth: an integer depth, Bool or CV_64F.
    """
    known = bounds[id(root)]
    assert known is not None
    for block in _blocks(into):
        some = {id(leaf): tensor[block] for leaf, tensor in zip(leaves, tensors, strict=True)}
        digits = _value(root, bounds, some, into.device)
        if depth == CV_64F:
            into[block] = _to_float64(digits, known)
        else:
            _store(digits, known, into[block], depth)


def _blocks(target: Tensor) -> list[Any]:
    """Blocks of rows of the first dimension. A target whose only dimension is the channels is a single block."""
    if target.dim() < 2 or not target.numel():
        return [...]
    rows = max(1, _BLOCK.get(target.device.type, 1 << 22) * target.shape[0] // target.numel())
    return [slice(first, first + rows) for first in range(0, target.shape[0], rows)]


def _value(root: MatExpr, bounds: BoundsOf, tensors: dict[int, Tensor], device: torch.device) -> Digits:
    found: dict[int, Digits] = {}
    for each in topological(root):
        known = bounds[id(each)]
        assert known is not None
        of = [found[id(operand)] for operand in each._operands]
        if each._operation == "mat":
            digits = _of_elements(tensors[id(each)], each.depth())
        elif each._operation == "numbers":
            digits = _of_numbers([int(number) for number in each._value], device)
        elif each._operation in COMPARISONS:
            digits = [torch.where(_compared(each._operation, _difference(*of)), 255, 0)]
        elif each._operation in BITWISE:
            digits = _of_bits(each, of, [bounds[id(operand)] for operand in each._operands])
        else:
            digits = _computed(each._operation, of)
        found[id(each)] = _fitted(digits, known)
    return found[id(root)]


def _computed(operation: str, of: list[Digits]) -> Digits:
    if operation == "add":
        return _sum(*of)
    if operation == "sub":
        return _difference(*of)
    if operation == "mul":
        return _product(*of)
    if operation == "neg":
        return [-digit for digit in of[0]]
    if operation == "abs":
        return [torch.where(of[0][-1] < 0, -digit, digit) for digit in of[0]]
    a, b = _alike(*of)
    is_less = _difference(a, b)[-1] < 0
    return [torch.where(is_less if operation == "min" else ~is_less, x, y) for x, y in zip(a, b, strict=True)]


# ---- digits ------------------------------------------------------------------------------------------------------


def _of_elements(x: Tensor, depth: int) -> Digits:
    unsigned = {torch.uint16: torch.int32, torch.uint32: torch.int64}
    if depth == CV_64U:
        return _of_int64(x.view(torch.int64), unsigned=True)
    return _of_int64((x.to(unsigned[x.dtype]) if x.dtype in unsigned else x).to(torch.int64))


def _of_int64(x: Tensor, unsigned: bool = False) -> Digits:
    """Split int64 numbers into digits; uint64 numbers are passed as their bits."""
    last = x >> 2 * _BITS
    return [x & _MASK, (x >> _BITS) & _MASK, last & ((1 << 64 - 2 * _BITS) - 1) if unsigned else last]


def _of_numbers(numbers: Sequence[int], device: torch.device) -> Digits:
    """Split Python integers, one per channel, into digits, each a tensor (channels,)."""
    count = _count(max(map(abs, numbers)))
    rows = [[n >> _BITS * place & _MASK for n in numbers] for place in range(count - 1)]
    rows.append([n >> _BITS * (count - 1) for n in numbers])
    return [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]


def _count(largest: int | Fraction) -> int:
    """The number of digits that signed integers of at most this absolute value need."""
    return int(largest).bit_length() // _BITS + 1


def _fitted(digits: Digits, known: Bounds) -> Digits:
    """Propagate carries so that all digits are within their limits; keep only as many digits as the bounds require."""
    count = _count(known.largest)
    digits = list(digits)
    while len(digits) < count:
        digits.append(torch.zeros_like(digits[-1]))
    for place in range(len(digits) - 1):
        digits[place + 1] = digits[place + 1] + (digits[place] >> _BITS)
        digits[place] = digits[place] & _MASK
    # Add the other digits to the last one that is kept. Bits that overflow int64 only repeat the sign.
    for place in range(count, len(digits)):
        if _BITS * (place - count + 1) < 64:
            digits[count - 1] = digits[count - 1] + (digits[place] << _BITS * (place - count + 1))
    return digits[:count]


def _alike(a: Digits, b: Digits) -> tuple[Digits, Digits]:
    """Extend two numbers to the same number of digits."""
    count = max(len(a), len(b))
    return _extended(a, count), _extended(b, count)


def _extended(digits: Digits, count: int) -> Digits:
    digits = list(digits)
    while len(digits) < count:
        last = digits[-1]
        digits[-1:] = [last & _MASK, last >> _BITS]
    return digits


def _sum(a: Digits, b: Digits) -> Digits:
    return [x + y for x, y in zip(*_alike(a, b), strict=True)]


def _difference(a: Digits, b: Digits) -> Digits:
    """The digits of a - b; only the last digit may be negative, and then so is the difference."""
    digits = [x - y for x, y in zip(*_alike(a, b), strict=True)]
    for place in range(len(digits) - 1):
        digits[place + 1] = digits[place + 1] + (digits[place] >> _BITS)
        digits[place] = digits[place] & _MASK
    return digits


def _product(a: Digits, b: Digits) -> Digits:
    digits: list[Tensor | int] = [0] * (len(a) + len(b) + 1)
    for m, x in enumerate(a):
        for n, y in enumerate(b):
            both = x * y
            digits[m + n] = digits[m + n] + (both & _MASK)
            digits[m + n + 1] = digits[m + n + 1] + (both >> _BITS)
    digits[-1] = torch.zeros_like(digits[0])  # type: ignore[arg-type]
    return digits  # type: ignore[return-value]


def _compared(operation: str, difference: Digits) -> Tensor:
    """The result of a comparison, from the sign of a - b."""
    if operation in ("lt", "ge"):
        is_less = difference[-1] < 0
        return is_less if operation == "lt" else ~is_less
    is_equal = _is_zero(difference)
    if operation in ("eq", "ne"):
        return is_equal if operation == "eq" else ~is_equal
    at_most = (difference[-1] < 0) | is_equal
    return at_most if operation == "le" else ~at_most


def _is_zero(digits: Digits) -> Tensor:
    found = digits[0] == 0
    for digit in digits[1:]:
        found = found & (digit == 0)
    return found


# ---- stored ------------------------------------------------------------------------------------------------------


def _of_bits(each: MatExpr, of: list[Digits], known: Sequence[Bounds | None]) -> Digits:
    """Compute a bitwise operation on the operands as stored: rounded and saturated to integers of the node's depth."""
    depth, limits = each.depth(), depth_bounds(each.depth())
    assert limits is not None
    bits = [_saturated(digits, one, depth) for digits, one in zip(of, known, strict=True)]
    if each._operation == "not":
        found = bits[0] ^ (-1 if limits.low < 0 or depth == CV_64U else int(limits.high))
    else:
        a, b = bits
        found = a & b if each._operation == "and" else a | b if each._operation == "or" else a ^ b
    return _of_int64(found, unsigned=depth == CV_64U)


def _saturated(digits: Digits, known: Bounds | None, depth: int) -> Tensor:
    """Saturate a value to an integer depth, and return int64 numbers (for CV_64U, numbers of the same bits)."""
    assert known is not None
    limits = depth_bounds(depth)
    assert limits is not None
    if depth == CV_Bool:
        return (~_is_zero(digits)).to(torch.int64)
    bits = digits[0]
    for place, digit in enumerate(digits[1:], 1):
        if _BITS * place < 64:  # higher digits of a value within the limits only repeat the sign
            bits = bits + (digit << _BITS * place)
    for limit, beyond in ((limits.low, known.low < limits.low), (limits.high, known.high > limits.high)):
        if beyond:
            number = _of_numbers([int(limit)], digits[0].device)
            difference = _difference(digits, number) if limit == limits.low else _difference(number, digits)
            bits = bits.masked_fill(difference[-1] < 0, _as_int64(int(limit)))
    return bits


def _as_int64(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _store(digits: Digits, known: Bounds, into: Tensor, depth: int) -> None:
    bits = _saturated(digits, known, depth)
    if depth == CV_64U:
        into.view(torch.int64).copy_(bits)
    elif depth == CV_Bool:
        into.copy_(bits != 0)
    else:  # not every device converts to unsigned numbers of 16 bits directly
        into.copy_(bits.to(torch.int32) if depth == CV_16U else bits)


def _to_float64(digits: Digits, known: Bounds) -> Tensor:
    """Convert numbers to float64, rounded once, half to even.

    The highest bits of the absolute value go into an int64, up to 62 of them. If any lower bit is set, the lowest bit
    of the int64 is set too. That lowest bit is below the 53 bits that float64 keeps, so it only breaks ties.
    """
    if known.within(torch.int64):
        return _saturated(digits, known, CV_64S).to(torch.float64)
    negative = digits[-1] < 0
    digits = _fitted([torch.where(negative, -digit, digit) for digit in digits], known)
    taken = torch.zeros_like(digits[0])
    exponent, rest = torch.zeros_like(taken), torch.zeros_like(negative)
    for digit in reversed(digits):
        for shift in range(_BITS - _PIECE, -1, -_PIECE):
            piece = digit >> shift & ((1 << _PIECE) - 1)
            has_room = taken < 1 << 62 - _PIECE
            rest = rest | (~has_room & (piece != 0))
            exponent = torch.where(has_room, exponent, exponent + _PIECE)
            taken = torch.where(has_room, (taken << _PIECE) | piece, taken)
    # pow on a GPU may be inexact, even for powers of two
    power = (exponent.clamp_max(1023) + 1023 << 52).view(torch.float64)
    found = (taken | rest.to(torch.int64)).to(torch.float64) * power
    return torch.where(negative, -found, found)
