"""Cost of random numbers and dropout. A draw counts as one flop. The generator's own work is not counted."""

from __future__ import annotations

from rooftop.cost.accounting import Call, Cost
from rooftop.cost.formulas.streaming import aten, streaming
from rooftop.cost.registry import cost_of

# These operators fill a tensor with random numbers. The tensor that gives the shape is not read.
cost_of(
    *aten("cauchy exponential geometric log_normal normal_ normal_functional rand rand_like randint randint_like"),
    *aten("randn randn_like random randperm uniform"),
)(streaming(1, unread=["self"]))

# The operators read the distribution's parameters for each element of the result.
cost_of(*aten("_sample_dirichlet _standard_gamma binomial normal poisson"))(streaming(1))
cost_of("aten::multinomial")(streaming(1, per="self", and_per_result=1))


@cost_of("aten::bernoulli")
def bernoulli(call: Call) -> Cost:
    """`bernoulli(p)` reads its tensor of probabilities. `bernoulli(x, p)` and `bernoulli_` do not read x and only write
    draws."""
    overwrites = call.in_place or "p" in call
    return streaming(2, unread=["self"] if overwrites else [])(call)


# Draw, compare, scale; the mask is part of the result.
cost_of(*aten("_fused_dropout native_dropout"))(streaming(3))
cost_of(*aten("_masked_scale native_dropout_backward"))(streaming(2))
