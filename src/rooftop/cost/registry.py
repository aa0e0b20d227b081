"""Which formula gives the cost of which operator.

    @cost_of("aten::mm")
    def mm(call: Call) -> Cost: ...

Operators are named as in their schema, without the overload: one formula serves `add.Tensor`, `add.Scalar`, `add.out`;
the in-place operator (`add_`) uses the formula of the plain one unless it has its own.
Custom operators register the same way, beside their kernels.
An operator without a formula is *uncovered*: its time is listed, and no roof is invented for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rooftop.cost.accounting import Call, Cost

Formula = Callable[[Call], Cost]

_FORMULAS: dict[str, Formula] = {}
# Counting asks at every operator that a program executes; emptied when a formula is added.
_RESOLVED: dict[torch._ops.OpOverload, Formula | None] = {}


def cost_of(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula for operators by schema name ("aten::mm", "rooftop::layer_norm").

    Raises:
        ValueError: a name without namespace, or one that has a formula already.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if "::" not in name:
                raise ValueError(f"cost_of({name!r}): expected 'namespace::operator', e.g. 'aten::mm'")
            if name in _FORMULAS:
                raise ValueError(f"cost_of({name!r}): this operator has a formula already")
            _FORMULAS[name] = formula
        _RESOLVED.clear()
        return formula

    return register


def formula_for(func: torch._ops.OpOverload) -> Formula | None:
    """The formula of an operator, None if it has none."""
    try:
        return _RESOLVED[func]
    except KeyError:
        from rooftop.cost import formulas  # noqa: F401  (registers those of aten on first use)

        name = func._schema.name
        _RESOLVED[func] = _FORMULAS.get(name) or _FORMULAS.get(name.removesuffix("_"))
        return _RESOLVED[func]


def covered_operators() -> list[str]:
    """Names of all operators that have a formula, sorted."""
    from rooftop.cost import formulas  # noqa: F401

    return sorted(_FORMULAS)


def later_cost(func: Any, args: tuple[Any, ...], out: Any) -> Callable[[], Cost] | None:
    """What computes the cost of an operator that takes functions after the step: it may look at values, for which the
    host would wait. None if it has no formula.
    """
    from rooftop.cost.formulas import flex_attention

    if func.name() == "flex_attention":
        return flex_attention.forward(args, out)
    if func.name() == "flex_attention_backward":
        return flex_attention.backward(args, out)
    return None
