"""Find the formula of an operator. aten's formulas are registered at the first lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rooftop.cost.accounting import Cost
from rooftop.cost.registry import FORMULAS, RESOLVED, Formula


def formula_for(func: torch._ops.OpOverload) -> Formula | None:
    """The formula of an operator; None if there is no formula."""
    try:
        return RESOLVED[func]
    except KeyError:
        from rooftop.cost import formulas  # noqa: F401

        name = func._schema.name
        RESOLVED[func] = FORMULAS.get(name) or FORMULAS.get(name.removesuffix("_"))
        return RESOLVED[func]


def covered_operators() -> list[str]:
    """Names of all operators that have a formula, sorted."""
    from rooftop.cost import formulas  # noqa: F401

    return sorted(FORMULAS)


def later_cost(func: Any, args: tuple[Any, ...], out: Any) -> Callable[[], Cost] | None:
    """A function that computes the cost of an operator with function arguments. Call the returned function after the
    step, because it may read values and make the host wait. None if the operator has no formula.
    """
    from rooftop.cost.formulas import flex_attention

    if func.name() == "flex_attention":
        return flex_attention.forward(args, out)
    if func.name() == "flex_attention_backward":
        return flex_attention.backward(args, out)
    return None
