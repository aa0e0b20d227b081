"""Cost of normalizations. Flops per element: sum 1, sum of squares 2, centring 1, scaling by 1/σ 1, weight 1, bias 1.
(var = E[x²] - E[x]² has the fewest flops, although implementations use numerically better formulas.) In batch norm, the
constants of a channel combine to one multiplication and one addition.

The few operations on each row's statistics are not counted. A backward pass recomputes x̂ = (x - mean)/σ from x with 2
flops. The gradient of the weight takes 2 more flops (multiply, add), the gradient of the bias 1. The gradient of the
input, with g = gradient · weight, takes

    dx = (g - mean(g) - x̂ mean(g x̂)) / σ        8 flops with a weight: 1 + 1 + 2 + 4
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, requested, streaming
from rooftop.cost.registry import cost_of

_STATISTICS_FLOPS = 3
_CENTRING_FLOPS = 1
_SCALE_AND_SHIFT_FLOPS = 2


def _affine_flops(call: Call) -> int:
    return 1 + (call["weight"] is not None) + (call.get("bias") is not None)


@cost_of(*aten("native_layer_norm native_group_norm"))
def row_norm(call: Call) -> Cost:
    """Cost of normalizing rows (of a layer or a group of channels). The mean and 1/σ of each row are also results."""
    return streaming(_STATISTICS_FLOPS + _CENTRING_FLOPS + _affine_flops(call), per="input")(call)


@cost_of("aten::_fused_rms_norm")
def rms_norm(call: Call) -> Cost:
    """x / rms(x) · weight: square and add, then scale."""
    return streaming(2 + _affine_flops(call), per="input")(call)


@cost_of(
    *aten("_batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _native_batch_norm_legit"),
    *aten("_native_batch_norm_legit_functional _native_batch_norm_legit_no_training cudnn_batch_norm"),
    *aten("native_batch_norm"),
)
def batch_norm(call: Call) -> Cost:
    """Cost of batch norm. In training batch norm computes the batch's statistics and updates the running statistics. In
    evaluation batch norm applies the running statistics.

    Some overloads change the running statistics although their schema does not say so; this counts as a write.
    `reserve` is a back end's workspace and not part of the definition.
    """
    source: Tensor = call["input"]
    running = [call.get("running_mean"), call.get("running_var")]
    name = call.func._schema.name
    training = call.get("training", "with_update" in name)
    written: list[Tensor | None] = list(call.results[:3])
    if training:
        functional = name.endswith("_functional")
        written += call.results[-2:] if functional else running
    flops = training * _STATISTICS_FLOPS + _SCALE_AND_SHIFT_FLOPS
    return Cost(
        distinct_bytes([source, call["weight"], call["bias"], *running]),
        distinct_bytes(written),
        arithmetic(flops * source.numel(), [source]),
    )


@cost_of(*aten("batch_norm_backward cudnn_batch_norm_backward native_batch_norm_backward"))
def batch_norm_backward(call: Call) -> Cost:
    """In training, the gradient flows through the batch's statistics. In evaluation the statistics are constants: dx =
    g · weight / σ."""
    gradient = call["grad_out"] if "grad_out" in call else call["grad_output"]
    training = call.get("train", call.get("update", True))
    prefix = "save" if training else "running"
    mean, deviation = call[f"{prefix}_mean"], call.get(f"{prefix}_invstd", call.get(f"{prefix}_var"))
    return _norm_backward(
        call, gradient, mean, deviation, call.get("output_mask", (True, True, True)), statistics_depend=training
    )


@cost_of(*aten("native_group_norm_backward native_layer_norm_backward"))
def row_norm_backward(call: Call) -> Cost:
    """Cost of the backward pass of layer norm and group norm, which reads the statistics that forward saved."""
    return _norm_backward(call, call["grad_out"], call["mean"], call["rstd"], call["output_mask"])


@cost_of("aten::_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> Cost:
    """The cost of layer norm's backward without the mean: x̂ is one product, dx = (g - x̂ mean(g x̂)) / σ."""
    to_input, to_weight = call["output_mask"]
    return _norm_backward(call, call["grad_out"], None, call["rstd"], (to_input, to_weight, False))


def _norm_backward(
    call: Call,
    gradient: Tensor,
    mean: Tensor | None,
    deviation: Tensor | None,
    output_mask: tuple[bool, ...],
    *,
    statistics_depend: bool = True,
) -> Cost:
    """Cost of the requested gradients (of input, weight and bias). Only tensors that these gradients need are read.

    Args:
        mean: None for RMS norms, which subtract no mean.
        statistics_depend: whether the statistics are functions of the input, so that gradients flow through them.
    """
    to_input, to_weight, to_bias = output_mask
    source, weight = call["input"], call["weight"]
    normalized = to_weight or (to_input and statistics_depend)  # whether a gradient needs x̂
    centered = mean is not None
    flops = normalized * (1 + centered) + 2 * to_weight + to_bias
    if to_input:
        flops += (weight is not None) + (5 + 2 * centered if statistics_depend else 1)
    needed = [
        gradient if to_input or to_weight or to_bias else None,
        weight if to_input else None,
        source if normalized else None,
        mean if normalized else None,
        deviation if to_input or to_weight else None,
    ]
    return Cost(
        distinct_bytes(needed),
        distinct_bytes(requested(call.results, output_mask)),
        arithmetic(flops * gradient.numel(), [gradient]),
    )


# The operators that make up a batch norm over several processes.
cost_of("aten::batch_norm_stats")(streaming(_STATISTICS_FLOPS, per="input"))
cost_of("aten::batch_norm_update_stats")(streaming(_STATISTICS_FLOPS, per="input"))
cost_of("aten::batch_norm_elemt")(streaming(_SCALE_AND_SHIFT_FLOPS, per="input"))
cost_of(*aten("batch_norm_gather_stats batch_norm_gather_stats_with_counts"))(
    streaming(6, per="mean", unread=["input"])
)
cost_of("aten::batch_norm_backward_reduce")(streaming(6, per="input", unread=["weight"]))
cost_of("aten::batch_norm_backward_elemt")(streaming(6, per="input"))

# w = v · g / ‖v‖ takes a square, an addition and a scaling for each element; backward counts twice as much.
cost_of("aten::_weight_norm_interface")(streaming(3, per="v"))
cost_of("aten::_weight_norm_interface_backward")(streaming(6, per="saved_v"))
