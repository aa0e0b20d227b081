"""Losses: prediction and target read once; one addition more for each element where the loss is reduced."""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.streaming import Flops, arithmetic, aten, cover, streaming
from rooftop.cost.registry import Formula, cost_of

POINTWISE: dict[str, Flops] = {
    "binary_cross_entropy": 8,  # -(t log p + (1 - t) log(1 - p))
    "binary_cross_entropy_with_logits": 10,  # (1 - t) x + max(-x, 0) + log1p(exp(-|x|))
    "huber_loss": 5,
    "mse_loss": 2,
    "smooth_l1_loss": 5,
    "soft_margin_loss": 3,
}

GRADIENTS: dict[str, Flops] = {
    "binary_cross_entropy_backward": 5,  # g (p - t) / ((1 - p) p)
    "huber_loss_backward": 4,
    "mse_loss_backward": 3,
    "smooth_l1_loss_backward": 4,
    "soft_margin_loss_backward": 5,
}


def _pointwise(flops: Flops) -> Formula:
    """So many flops for each element, one more to reduce, one for a weight, two for a `pos_weight`."""

    def total(call: Call) -> int:
        reduced = call["reduction"] != 0
        weighted = (call.get("weight") is not None) + 2 * (call.get("pos_weight") is not None)
        return (flops if isinstance(flops, int) else flops(call)) + reduced + weighted

    return streaming(total, per="self")


cover(POINTWISE, _pointwise)
cover(GRADIENTS)


@cost_of(*aten("nll_loss_forward nll_loss2d_forward"))
def nll_loss(call: Call) -> Cost:
    """Picks one log-probability for each target, weighs and adds it: only what is picked is read."""
    log_probability: Tensor = call["self"]  # (N, C) or (N, C, H, W)
    target, weight = call["target"], call["weight"]
    picked = target.numel() * log_probability.element_size()
    weights = 0 if weight is None else min(target.numel() * weight.element_size(), tensor_bytes(weight))
    flops = target.numel() * (1 + (weight is not None))
    return Cost(
        picked + weights + tensor_bytes(target),
        distinct_bytes(call.written_tensors),
        arithmetic(flops, [log_probability]),
    )


# Writes -weight / total at each target and zero elsewhere; the log-probabilities are not needed.
cost_of(*aten("nll_loss_backward nll_loss2d_backward"))(streaming(1, per="target", unread=["self"]))
