"""Operators that exist only in compiled graphs: conversions, ranges and the random numbers of inductor."""

from __future__ import annotations

from rooftop.cost.formulas.streaming import streaming
from rooftop.cost.registry import cost_of

cost_of("prims::convert_element_type", "prims::device_put", "prims::broadcast_in_dim")(streaming())
cost_of("prims::iota", "prims::inductor_seeds", "prims::inductor_seed")(streaming())
cost_of("prims::inductor_lookup_seed")(streaming(unread=["seeds"]))
cost_of("prims::inductor_random", "prims::inductor_randint")(streaming(1, unread=["seed"]))
cost_of("prims::fma")(streaming(2))
