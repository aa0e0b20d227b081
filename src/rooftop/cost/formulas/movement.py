"""Operators that move data without arithmetic, and those that do not even move it (views, allocations).

Zero flops is not zero work: a copy, a concatenation or a gather has a byte floor like any other operator.
"""

from __future__ import annotations

from rooftop.cost.accounting import FREE, Call, Cost
from rooftop.cost.registry import cost_of


@cost_of("aten::view", "aten::t", "aten::detach", "aten::expand", "aten::empty", "aten::alias")
def metadata(call: Call) -> Cost:
    """Views and allocations touch no element."""
    return FREE
