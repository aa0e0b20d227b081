"""Elementwise operators: each distinct input element read once, each output written once."""

from __future__ import annotations

from rooftop.cost.accounting import Call, Cost, distinct_bytes, precision_of
from rooftop.cost.registry import Formula, cost_of


def elementwise(flops_per_element: int) -> Formula:
    """A formula for an operator that does this many flops for each output element."""

    def formula(call: Call) -> Cost:
        written = call.written_tensors
        flops = {precision_of(written[0].dtype): flops_per_element * sum(t.numel() for t in written)}
        return Cost(distinct_bytes(call.read_tensors), distinct_bytes(written), flops)

    return formula


cost_of("aten::relu", "aten::add", "aten::mul", "aten::sub", "aten::neg")(elementwise(1))
