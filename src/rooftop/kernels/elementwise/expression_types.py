"""Dtypes of elementwise expressions, promoted as in PyTorch.

Tensors with dimensions decide the result's dtype. A tensor without dimensions changes the result's dtype only if its
category is higher (bool < integer < floating point), as in `torch.result_type`. The same is true for a Python number
next to any tensor. PyTorch rounds to half precision between two operators; a fused kernel keeps values in float32.
Integers wrap around as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from rooftop.kernels.elementwise.expressions import DTYPES, OPERATIONS, Expression, topological
from rooftop.kernels.operands.dtypes import HALVES

TENSOR, SINGLE, NUMBER = 2, 1, 0
"""Ranks of operands: tensors with dimensions, tensors without, Python numbers."""
OF_BOOLS = ("add", "mul", "maximum", "minimum", "clamp_min", "clamp_max", "sign", "common", "base")
"""Operations with "promoted" typing that are also defined for booleans."""


@dataclass(frozen=True)
class Kind:
    """Dtype and rank of an operand."""

    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class Typed:
    """The types of a node: the dtype of its result, and the dtype to which its operands are cast (except the condition
    of `where`)."""

    kind: Kind
    common: torch.dtype

    @property
    def inside(self) -> torch.dtype:
        """The dtype of the node's value until it is stored."""
        return computed_in(self.kind.dtype)


Types = dict[int, Typed]  # by id of the node


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in HALVES else dtype


def summand(node: Expression, types: Types) -> Expression:
    """The node whose values a sum over `node` adds. If `node` is a cast to half precision, return the operand of the
    cast, because the sum is float32 and is rounded afterwards.
    """
    if DTYPES.get(node.operation) in HALVES and types[id(node.operands[0])].inside == torch.float32:
        return node.operands[0]
    return node


OF_LIMITS = ("maximum", "minimum", "clamp_min", "clamp_max", "where")
"""Operations that return one of their operands. In these operations a number outside the range of an integer dtype
would silently become another number, so such a number raises an error. In sums, such a number wraps around.
"""


def limits_of(outputs: Sequence[Expression], types: Types) -> list[tuple[Expression, torch.dtype]]:
    """The numbers whose range must be checked, each with the integer dtype that must be able to represent it. These are
    Python numbers (constants or arguments) that an operation in `OF_LIMITS` may return.
    """
    return [
        (each, common)
        for node in topological(outputs)
        if node.operation in OF_LIMITS and not (common := types[id(node)].common).is_floating_point
        for each in node.operands[node.operation == "where" :]
        if types[id(each)].kind.rank == NUMBER and not each.operands
    ]


def check_limit(value: int | float | bool, dtype: torch.dtype) -> None:
    """Raise ValueError if the number is out of range for an integer dtype."""
    if dtype == torch.bool:
        return
    limits = torch.iinfo(dtype)
    least = limits.min or -limits.max  # in an unsigned dtype: PyTorch converts -1 to 255
    if not least <= value <= limits.max:
        raise ValueError(f"fused: {value} is outside of the range of {dtype}, {limits.min} to {limits.max}")


def wrapped(value: int, dtype: torch.dtype) -> int:
    """An integer wrapped around as in an integer tensor, modulo 2^bits."""
    limits = torch.iinfo(dtype)
    return (value - limits.min) % (1 << limits.bits) + limits.min


def number_kind(value: bool | int | float) -> Kind:
    """The kind of a Python number, with the dtype bool, int64 or the default dtype."""
    if isinstance(value, (bool, torch.SymBool)):
        return Kind(torch.bool, NUMBER)
    return Kind(torch.int64 if isinstance(value, (int, torch.SymInt)) else torch.get_default_dtype(), NUMBER)


def types_of(outputs: Sequence[Expression], arguments: Sequence[Kind | None], autocast: bool) -> Types:
    """Types of all nodes.

    Args:
        outputs: the trees.
        arguments: kinds of the arguments, by number.
        autocast: whether a GPU's autocast is on.

    Raises:
        TypeError: an operation is not defined for its operands' dtypes.
    """
    types: Types = {}
    for node in topological(outputs):
        if node.operation == "argument":
            kind = arguments[int(node.value)]  # type: ignore[arg-type]
            assert kind is not None
            types[id(node)] = Typed(kind, kind.dtype)
        elif node.operation == "constant":
            assert node.value is not None
            kind = number_kind(node.value)
            types[id(node)] = Typed(kind, kind.dtype)
        else:
            types[id(node)] = _type_of(node.operation, [types[id(each)].kind for each in node.operands], autocast)
    return types


def _type_of(name: str, operands: list[Kind], autocast: bool) -> Typed:
    """The dtypes in which the operation `name` computes and returns its result, for operands with these dtypes and
    ranks.
    """
    operation, rank = OPERATIONS[name], max(each.rank for each in operands)
    if name in DTYPES:
        return Typed(Kind(DTYPES[name], rank), DTYPES[name])
    if operation.typing == "where":
        if operands[0].dtype != torch.bool:
            raise TypeError(f"fused: the condition of where must be boolean, got {operands[0].dtype}")
        common = promoted(operands[1:])
        return Typed(Kind(common, rank), common)
    common = promoted(operands)
    if operation.typing == "scaled":
        if common.is_floating_point and not operands[0].dtype.is_floating_point:
            raise TypeError(
                f"fused: alpha and value must be integers if the inputs are {operands[0].dtype}, got {common}"
            )
        common = operands[0].dtype
    if operation.typing == "compared":
        return Typed(Kind(torch.bool, rank), common)
    if operation.typing == "nearest":
        if not common.is_floating_point:
            raise TypeError(f"fused: {name} needs a floating point dtype, got {common}")
        return Typed(Kind(torch.int32, rank), common)
    if operation.typing == "bits":
        if common != torch.int64:
            raise TypeError(f"fused: {name} needs int64, got {common}")
        return Typed(Kind(torch.float64, rank), common)
    if operation.typing == "bitwise" and common.is_floating_point:
        raise TypeError(f"fused: {name} needs booleans or integers, got {common}")
    if operation.typing == "float" and not common.is_floating_point:
        common = torch.get_default_dtype()
    if operation.typing == "promoted" and common == torch.bool and name not in OF_BOOLS:
        raise TypeError(f"fused: {name} of booleans is not defined: cast them, or use &, |, ^, ~")
    if name == "pow" and not common.is_floating_point:
        raise TypeError("fused: integers take only the constant powers 1 to 4: cast them to a floating point dtype")
    if autocast and operation.autocast and common in HALVES:
        common = torch.float32
    return Typed(Kind(common, rank), common)


def promoted(operands: Sequence[Kind]) -> torch.dtype:
    """The result dtype of an operation on these operands."""
    found: torch.dtype | None = None
    for rank in (TENSOR, SINGLE, NUMBER):
        dtypes = [each.dtype for each in operands if each.rank == rank]
        if dtypes:
            lower = reduce(torch.promote_types, dtypes)
            if found is None:
                found = lower
            elif _category(lower) > _category(found):
                found = torch.promote_types(found, lower)
    assert found is not None
    return found


def _category(dtype: torch.dtype) -> int:
    """0 for booleans, 1 for integers, 2 for floating point."""
    return 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1
