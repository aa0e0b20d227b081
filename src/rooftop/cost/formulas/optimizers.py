"""Cost of optimizer steps: operators on lists of tensors (`_foreach_*`), and whole steps in one operator (`_fused_*`).

A tensor that the operator reads counts once as read, and a tensor that it writes once as written, even if several lists
contain the tensor. A fused step's schema lets the step change gradients. Such a change counts as a write only if the
step unscales the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensors_in
from rooftop.cost.formulas.elementwise import FLOPS_PER_ELEMENT
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, streaming
from rooftop.cost.registry import cost_of

FOREACH_ARITHMETIC = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp
    lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan
    tanh trunc
"""

for _name in FOREACH_ARITHMETIC.split():
    cost_of(f"aten::_foreach_{_name}")(streaming(FLOPS_PER_ELEMENT[_name]))
cost_of("aten::_foreach_clone")(streaming())
cost_of(*aten("_foreach_copy _foreach_zero"))(streaming(unread=["self"]))

# Multiply by 1/scale and check for infinities.
cost_of("aten::_amp_foreach_non_finite_check_and_unscale")(streaming(2, per="self"))
cost_of("aten::_amp_update_scale")(streaming(2))


@dataclass(frozen=True, slots=True)
class FusedStep:
    """One fused optimizer.

    Attributes:
        states: names of the lists that the step reads and writes, besides the parameters.
        flops: flops for each element of the parameters.
    """

    states: Callable[[Call], list[str]]
    flops: Callable[[Call], int]


def _adam_states(call: Call) -> list[str]:
    return ["exp_avgs", "exp_avg_sqs"] + ["max_exp_avg_sqs"] * call["amsgrad"]


def _adam_flops(call: Call) -> int:
    # Flops: average m (lerp): 3; average v: 4; denominator √v / c + ε: 3; subtract m / denominator · lr: 3.
    return 13 + 2 * (call["weight_decay"] != 0) + call["amsgrad"]


def _sgd_states(call: Call) -> list[str]:
    return ["momentum_buffer_list"] * (call["momentum"] != 0)


def _sgd_flops(call: Call) -> int:
    # Flops: the step: 2; the buffer μ b + (1 - dampening) g: 3, or 2 without dampening; Nesterov's g + μ b: 2.
    momentum = 0 if call["momentum"] == 0 or call["is_first_step"] else 2 + (call["dampening"] != 0)
    return 2 + momentum + 2 * call["nesterov"] + 2 * (call["weight_decay"] != 0)


FUSED_STEPS: dict[str, FusedStep] = {
    "_fused_adagrad": FusedStep(
        states=lambda call: ["state_sums"],
        flops=lambda call: 7 + 2 * (call["weight_decay"] != 0),  # g² + sum: 2; √ + ε: 2; divide, scale, subtract: 3
    ),
    "_fused_adam": FusedStep(_adam_states, _adam_flops),
    "_fused_adamw": FusedStep(_adam_states, _adam_flops),
    "_fused_sgd": FusedStep(_sgd_states, _sgd_flops),
}


@cost_of(*(f"aten::{name}" for name in FUSED_STEPS))
def fused_step(call: Call) -> Cost:
    """Cost of one optimizer step on all parameters: the flops of the update rule for each element, and one more flop if
    gradients are divided by a loss scale.
    """
    step = FUSED_STEPS[call.func._schema.name.removeprefix("aten::").removesuffix("_")]
    states = [tensor for name in step.states(call) for tensor in tensors_in(call[name])]
    parameters, gradients = call["self"], call["grads"]
    scale, counters, rate = call["grad_scale"], call.get("state_steps", []), call["lr"]
    # In the first step the momentum buffer becomes the gradient, so no earlier buffer is read.
    old_states = [] if call.get("is_first_step", False) else states
    flops = step.flops(call) + (scale is not None)
    read = [*parameters, *gradients, *old_states, *tensors_in([counters, scale, call["found_inf"], rate])]
    written = [*parameters, *states, *(gradients if scale is not None else [])]
    return Cost(distinct_bytes(read), distinct_bytes(written), arithmetic(flops * elements(parameters), parameters))
