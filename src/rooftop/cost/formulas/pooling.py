"""Cost of pooling: the input under the windows is read once, and each position in each window takes one flop.

A maximum takes one comparison for each position. An average takes one addition for each position except the last, and
one division.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.sparse_operands import addressed_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, streaming
from rooftop.cost.formulas.windows import per_dimension, touched_bytes
from rooftop.cost.registry import cost_of


@cost_of(
    *aten("avg_pool1d avg_pool2d avg_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"),
    *aten("mkldnn_max_pool2d mkldnn_max_pool3d"),
)
def pool(call: Call) -> Cost:
    """Pooling takes one addition or comparison for each element of each window, and reads only elements under a
    window."""
    source: Tensor = call["self"]  # (N, C, *spatial) or (C, *spatial)
    pooled: Tensor = call.results[0]
    kernel = _kernel(call)
    stride = per_dimension(call["stride"] or kernel, len(kernel))
    padding, dilation = (per_dimension(call.get(name, 1), len(kernel)) for name in ("padding", "dilation"))
    read = touched_bytes(source, pooled.shape[-len(kernel) :], kernel, stride, padding, dilation)
    return Cost(read, distinct_bytes(call.written_tensors), arithmetic(pooled.numel() * prod(kernel), [source]))


@cost_of(*aten("avg_pool2d_backward avg_pool3d_backward"))
def average_pool_backward(call: Call) -> Cost:
    """Backward spreads each gradient over its window. Backward needs only the shape of the input."""
    return streaming(prod(_kernel(call)), per="grad_output", unread=["self"])(call)


def _kernel(call: Call) -> list[int]:
    """Window size along each spatial dimension; the operator's name gives the number of dimensions ("avg_pool2d")."""
    name = call.func._schema.name
    return per_dimension(call["kernel_size"], next(d for d in (1, 2, 3) if f"pool{d}d" in name))


@cost_of(*aten("fractional_max_pool2d fractional_max_pool3d"))
def fractional_pool(call: Call) -> Cost:
    """Windows are at random positions, one per result, and may skip parts of the input."""
    source, pooled = call["self"], call.results[0]
    taps = prod(per_dimension(call["kernel_size"], len(call["output_size"])))
    read = addressed_bytes(source, pooled.numel() * taps) + tensor_bytes(call["random_samples"])
    return Cost(read, distinct_bytes(call.written_tensors), arithmetic(pooled.numel() * taps, [source]))


# The windows cover the input and overlap by at most one element, so each element counts once.
cost_of(*aten("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d"))(
    streaming(1, per="self")
)
cost_of(*aten("adaptive_max_pool2d adaptive_max_pool3d"))(streaming(1, per="self"))
cost_of(*aten("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward"))(
    streaming(1, unread=["self"])
)
# Backward adds each gradient at the position of its index. It does not need the input.
cost_of(
    *aten("adaptive_max_pool2d_backward adaptive_max_pool3d_backward"),
    *aten("max_pool2d_with_indices_backward max_pool3d_with_indices_backward"),
)(streaming(1, per="grad_output", unread=["self"]))
cost_of(*aten("fractional_max_pool2d_backward fractional_max_pool3d_backward"))(
    streaming(1, per="grad_output", unread=["self"])
)
cost_of(*aten("max_unpool2d max_unpool3d"))(streaming())
