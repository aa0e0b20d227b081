"""Matrix products: 2 m n k flops, every operand moved once."""

from __future__ import annotations

from math import prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.cost.registry import cost_of


def _product(call: Call, left: Tensor, contracted: int, addend_flops: int = 0) -> Cost:
    """Cost of `out = left @ right (+ addend)` where each output element sums `contracted` products."""
    flops = {matrix_precision(left): 2 * prod(call.out.shape) * contracted}
    if addend_flops:
        precision = precision_of(left.dtype)
        flops[precision] = flops.get(precision, 0) + addend_flops
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes([call.out]), flops)


@cost_of("aten::mm", "aten::bmm")
def mm(call: Call) -> Cost:
    left: Tensor = call["self"]  # (..., m, k)
    return _product(call, left, left.shape[-1])
