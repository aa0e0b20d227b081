"""The registry of cost formulas by operator.

    @cost_of("aten::mm")
    def mm(call: Call) -> Cost: ...

Operators are named as in their schema, without the overload: one formula serves `add.Tensor`, `add.Scalar` and
`add.out`. An in-place operator (`add_`) uses the formula of the plain operator unless it has its own. A custom
operator's formula is registered in the same way, in the file of its kernels. An operator without a formula is
*uncovered*: reports list its time, but no roof.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rooftop.cost.accounting import Call, Cost

Formula = Callable[[Call], Cost]

FORMULAS: dict[str, Formula] = {}
# A cache, because counting looks up every operator that a program executes. Adding a formula empties it.
RESOLVED: dict[torch._ops.OpOverload, Formula | None] = {}


def cost_of(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula for operators by schema name ("aten::mm", "rooftop::layer_norm").

    Raises:
        ValueError: a name has no namespace, or already has a formula.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if "::" not in name:
                raise ValueError(f"cost_of({name!r}): expected 'namespace::operator', e.g. 'aten::mm'")
            if name in FORMULAS:
                raise ValueError(f"cost_of({name!r}): this operator already has a formula")
            FORMULAS[name] = formula
        RESOLVED.clear()
        return formula

    return register
