"""Prepare an expression: simplify its tree, find the bounds of its values, and choose the dtype of the computation.

A plan depends only on an expression's operations, types and numbers (its form), not on its Mats. So plans are cached by
form, because planning takes longer than evaluating a small image.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rooftop.mat.exactness import bounds_of, computing_dtype
from rooftop.mat.expressions import BITWISE, MatExpr, node, rebuilt, topological
from rooftop.mat.remembered import remember
from rooftop.mat.row_programs import RowProgram, row_program
from rooftop.mat.type_codes import CV_MAKETYPE, CV_MAT_CN, DEPTHS

if TYPE_CHECKING:
    from rooftop.mat.element_programs import ElementProgram

Form = tuple[Any, ...]
_MOST_PLANS = 1024
_plans: dict[Form, ExpressionPlan] = {}


class ExpressionPlan:
    """A plan for expressions of one form whose values are stored in one depth. A plan has no references to Mats.

    Attributes:
        root: the tree of elementwise operations; its leaves have the Mats' types, not the Mats.
        leaves: the nodes for Mats, in topological order.
        bits: whether elements are read and written as integers of the same bits.
        depth: depth of the target's numbers; if `bits`, the integer depth of the same width.
        bounds: bounds of each node's value, by the node's id.
        dtype: the dtype of the computation.
    """

    def __init__(self, root: MatExpr, depth: int) -> None:
        root = rebuilt(simpler(root), _without_mat)
        self.bits = _is_of_bits(root, depth)
        if self.bits:
            root, depth = _as_bits(root), depth_of_bits(depth)
        self.root, self.depth = root, depth
        self.nodes = topological(root)
        self.leaves = [each for each in self.nodes if each._operation == "mat"]
        self.bounds = bounds_of(root)
        self.dtype = DEPTHS[depth].dtype if self.bits else computing_dtype(root, self.bounds, depth)

    @property
    def is_copy(self) -> bool:
        """Whether the expression is a single Mat that is stored in its own depth, so that a copy suffices."""
        return self.root._operation == "mat" and self.root.depth() == self.depth

    @cached_property
    def is_large(self) -> bool:
        """Whether all values of the expression are integers, and some may exceed int64."""
        if self.bits or self.is_copy or self.dtype != torch.float64:
            return False
        return all((known := self.bounds[id(each)]) is not None and known.unit == 0 for each in self.nodes)

    @cached_property
    def has_wide_bits(self) -> bool:
        """Whether the expression has bitwise operations on 64 bits, but is computed in a dtype that cannot represent
        all 64-bit integers."""
        wide = any(each._operation in BITWISE and DEPTHS[each.depth()].size_bytes == 8 for each in self.nodes)
        return wide and not self.bits and self.dtype != torch.int64

    @cached_property
    def rows(self) -> RowProgram:
        """The plan as torch operations on blocks of rows, for the CPU."""
        return row_program(self.root, self.bounds, self.dtype, self.depth)

    @cached_property
    def elements(self) -> ElementProgram:
        """The expression as a program that computes one element, for a compiled loop on the CPU."""
        return self._elements(self.dtype, for_kernel=False)

    @cached_property
    def elements_in_registers(self) -> ElementProgram:
        """The program for a GPU kernel: 8- and 16-bit integers are computed in int32, since registers have 32 bits."""
        narrow = self.dtype in (torch.uint8, torch.int8, torch.int16)
        return self._elements(torch.int32 if narrow else self.dtype, for_kernel=True)

    def _elements(self, dtype: torch.dtype, for_kernel: bool) -> ElementProgram:
        from rooftop.mat.element_programs import ElementProgram  # this imports all kernels

        return ElementProgram(self.root, self.bounds, dtype, self.leaves, self.depth, for_kernel)


def plan_of(nodes: Sequence[MatExpr], depth: int) -> ExpressionPlan:
    """The plan of an expression without matrix products and inverses, from its nodes in topological order."""
    form = form_of(nodes, depth)
    found = _plans.get(form)
    if found is None:
        found = ExpressionPlan(nodes[-1], depth)
        remember(_plans, form, found, _MOST_PLANS)
    return found


def form_of(nodes: Sequence[MatExpr], depth: int) -> Form:
    """The key of a plan: an expression's operations, types and numbers (with their values), and the stored depth."""
    form: list[Any] = [depth]
    places: dict[int, int] = {}
    for place, each in enumerate(nodes):
        places[id(each)] = place
        if each._operation == "mat":
            form.append((each._type, each._value[1]))
        elif each._operation == "numbers":  # unlike ==, repr distinguishes 1, 1.0 and True, and 0.0 and -0.0
            form.append((each._type, repr(each._value)))
        else:
            form.append((each._operation, each._type, *[places[id(operand)] for operand in each._operands]))
    return tuple(form)


def _without_mat(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
    return node("mat", (), *of(each), (None, each._value[1])) if each._operation == "mat" else None


def of(each: MatExpr) -> tuple[int, tuple[int, ...], torch.device]:
    """The type, sizes and device of a node."""
    return each._type, each._sizes, each._device


# ---- simpler trees -----------------------------------------------------------------------------------------------


def simpler(root: MatExpr) -> MatExpr:
    """Replace division by a power of two with multiplication by its reciprocal. The product is exact, so its bounds are
    known."""

    def change(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
        if each._operation != "div" or operands[1]._operation != "numbers":
            return None
        numbers = operands[1]._value
        if not all(np.isfinite(number) and number and _is_power_of_two(number) for number in numbers):
            return None
        inverse = node("numbers", (), *of(operands[1]), tuple(1 / number for number in numbers))
        return node("mul", (operands[0], inverse), *of(each))

    return rebuilt(root, change)


def _is_power_of_two(number: float) -> bool:
    exact = abs(Fraction(number))
    powers = [part & (part - 1) == 0 for part in (exact.numerator, exact.denominator)]
    return all(powers) and 2**-60 <= exact <= 2**60


# ---- bits ----------------------------------------------------------------------------------------------------------


def _is_of_bits(root: MatExpr, depth: int) -> bool:
    """Whether an expression has only bitwise operations and is stored in its own depth, so that integers of the same
    bits can compute it."""
    inner = [each for each in topological(root) if each._operation not in ("mat", "numbers")]
    return bool(inner) and root.depth() == depth and all(each._operation in BITWISE for each in inner)


def depth_of_bits(depth: int) -> int:
    """The integer depth of the same width whose dtype is this depth's `carrier`, such as CV_16S for CV_16F."""
    return next(number for number, each in enumerate(DEPTHS) if each.dtype == DEPTHS[depth].carrier)


def _as_bits(root: MatExpr) -> MatExpr:
    """The same bitwise operations on integers that have the same bits as the elements of `root`."""
    depth = root.depth()
    carried = depth_of_bits(depth)
    bits = DEPTHS[depth].size_bytes * 8
    low, high = DEPTHS[depth].limits or (0, 1)
    type = CV_MAKETYPE(carried, CV_MAT_CN(root._type))

    def carry(number: int | float) -> int:
        stored = min(max(int(number), low), high) if DEPTHS[depth].limits is not None else int(number != 0)
        least = (DEPTHS[carried].limits or (0, 0))[0]
        return (stored - least) % (1 << bits) + least

    def change(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr:
        value: Any = each._value
        if each._operation == "numbers":
            value = tuple(carry(number) for number in value)
        if each._operation == "not" and DEPTHS[depth].limits is None:  # Bool has one bit, which xor inverts
            one = node("numbers", (), type, each._sizes, each._device, (1,) * CV_MAT_CN(type))
            return node("xor", (operands[0], one), type, each._sizes, each._device)
        return node(each._operation, operands, type, each._sizes, each._device, value)

    return rebuilt(root, change)
