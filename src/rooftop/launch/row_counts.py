"""Sizes that vary from call to call, as integers that remember the formula by which they were computed.

A point cloud has a different number of sites in each step. So a plan of a call (repeated_calls.py) must contain
formulas instead of the numbers of the observed call. Launch code reads such sizes by `size`, and allocates memory of
such sizes by `allocate`. While a call is observed, varying sizes are `Count`s, and so are sums, products and quotients
of varying sizes. Comparisons are recorded as conditions under which the plan is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch import known_calls

Code = tuple[int, ...]
"""A formula in postfix order, as a sequence of pairs: (VARIABLE, its index), (NUMBER, its value), (operation, 0)."""
VARIABLE, NUMBER, ADD, MULTIPLY, DIVIDE = range(5)
BELOW_ZERO, IS_ZERO, BY_16 = range(3)
"""The kinds of conditions on the value of a formula: it is negative, zero, or a multiple of 16."""


class Condition(NamedTuple):
    """A condition on the value of a formula, such as "it is 0". `held`: whether the condition was true in the observed
    call. A plan is valid only for calls in which each of its conditions is true or false as in the observed call.
    """

    formula: Code
    kind: int
    held: bool


def size(tensor: Tensor, dim: int) -> int:
    """The size of dimension `dim` of a tensor. The size may vary from call to call of an operator."""
    lesson = known_calls.lesson_here()
    return tensor.shape[dim] if lesson is None else lesson.size(tensor, dim)  # type: ignore[no-any-return]


def allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate contiguous memory on the device of `like`, by default with the dtype of `like`."""
    lesson = known_calls.lesson_here()
    if lesson is None:
        return like.new_empty(shape, dtype=dtype)
    made = like.new_empty(tuple(int(each) for each in shape), dtype=dtype)
    lesson.has_shape(made, shape)
    return made


def given(number: int) -> int:
    """Mark an integer argument of an operator as one that may vary from call to call. While a call is observed, the
    result is a `Count` if it varies; otherwise it is the number itself.
    """
    lesson = known_calls.lesson_here()
    return number if lesson is None else lesson.number(number)  # type: ignore[no-any-return]


class Count(int):
    """An integer that also has a formula, by which it is computed again in calls with other sizes. Operations that this
    class does not define raise TypeError.
    """

    formula: Code
    conditions: list[Condition]

    @classmethod
    def of(cls, value: int, formula: Code, conditions: list[Condition]) -> Count:
        """Make a `Count` that records comparisons with it in `conditions`."""
        made = cls(value)
        made.formula, made.conditions = formula, conditions
        return made

    def _with(self, other: Any, operation: int, value: int, reversed: bool = False) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (code_of(other), self.formula) if reversed else (self.formula, code_of(other))
        return Count.of(value, (*left, *right, operation, 0), self.conditions)

    def __add__(self, other: Any) -> Any:
        return self._with(other, ADD, int(self) + int(other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self._with(other, MULTIPLY, int(self) * int(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, DIVIDE, int(self) // int(other))

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(other, DIVIDE, int(other) // int(self), reversed=True)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def _is(self, other: Any, kind: int, held: bool, reversed: bool = False) -> bool:
        apart = other - self if reversed else self - other
        self.conditions.append(Condition(apart.formula, kind, held))
        return held

    def __lt__(self, other: int) -> bool:
        return self._is(other, BELOW_ZERO, int(self) < int(other))

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __gt__(self, other: int) -> bool:
        return self._is(other, BELOW_ZERO, int(self) > int(other), reversed=True)

    def __le__(self, other: int) -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and self._is(other, IS_ZERO, int(self) == int(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def is_by_16(self) -> bool:
        """Whether this integer is a multiple of 16."""
        held = int(self) % 16 == 0
        self.conditions.append(Condition(self.formula, BY_16, held))
        return held

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("no formula for this operation on a number of rows")

    __hash__ = _refuse  # type: ignore[assignment]  # a cached value would not have the formula of this count
    __mod__ = __rmod__ = __pow__ = __rpow__ = __truediv__ = __rtruediv__ = __divmod__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __and__ = __or__ = __xor__ = bit_length = _refuse  # type: ignore[assignment]


def code_of(number: int) -> Code:
    """The formula of an integer: that of a `Count`, or the integer's value as a constant."""
    return number.formula if type(number) is Count else (NUMBER, int(number))


def codes_of(numbers: Sequence[int]) -> list[Code]:
    """The formula of each integer (see `code_of`)."""
    return [code_of(each) for each in numbers]


def value_of(code: Code, values: Sequence[int]) -> int:
    """Evaluate a formula with the given values of its variables."""
    stack: list[int] = []
    for operation, operand in zip(code[::2], code[1::2], strict=True):
        if operation == VARIABLE:
            stack.append(values[operand])
        elif operation == NUMBER:
            stack.append(operand)
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(left + right if operation == ADD else left * right if operation == MULTIPLY else left // right)
    return stack[0]
