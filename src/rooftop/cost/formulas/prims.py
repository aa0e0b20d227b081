"""Cost of operators of compiled graphs (conversions, ranges, inductor's random numbers), and of forward-mode
derivatives, which PyTorch decomposes into elementwise primitives.
"""

from __future__ import annotations

from math import prod

from rooftop.cost.accounting import Call, Cost
from rooftop.cost.formulas.elementwise import BINARY, TERNARY, UNARY
from rooftop.cost.formulas.streaming import streaming
from rooftop.cost.registry import cost_of

cost_of("prims::convert_element_type", "prims::device_put", "prims::broadcast_in_dim")(streaming())
cost_of("prims::iota", "prims::inductor_seeds", "prims::inductor_seed")(streaming())
cost_of("prims::inductor_lookup_seed")(streaming(unread=["seeds"]))
cost_of("prims::inductor_random", "prims::inductor_randint")(streaming(1, unread=["seed"]))
cost_of("prims::fma")(streaming(2))

ELEMENTWISE = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil conj_physical cos
    cosh digamma div eq erf erfc exp exp2 expm1 floor fmax fmin fmod frexp gcd ge gt hypot igamma igammac le lgamma log
    log10 log1p log2 lt maximum minimum mul ne neg nextafter pow reciprocal remainder round rsqrt sign signbit sin sinh
    sqrt sub tan tanh trunc where
"""
"""Operators with the same names and the same flops as in aten."""

for _name in ELEMENTWISE.split():
    cost_of(f"prims::{_name}")(streaming((UNARY | BINARY | TERNARY)[_name]))


@cost_of("prims::_low_memory_max_pool_with_offsets")
def max_pool_with_offsets(call: Call) -> Cost:
    """Max pooling takes one comparison for each element of each window."""
    window = prod(call["kernel_size"])
    return streaming(window)(call)


cost_of("prims::_low_memory_max_pool_offsets_to_indices")(streaming(2))
# Along the softmax's dimension, the maximum and the sum of exponentials: compare, subtract, exp, add.
cost_of("prims::prepare_softmax_online")(streaming(4, per="a"))
