"""Cost of losses: prediction and target are read once. If the loss is reduced, each element takes one more addition."""

from __future__ import annotations

from math import prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.softmaxes import SOFTMAX_FLOPS
from rooftop.cost.formulas.streaming import Flops, arithmetic, aten, cover, moved_once, streaming
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
    """A formula with `flops` for each element, plus one if the loss is reduced, one if it has a weight, and two if it
    has a `pos_weight`."""

    def total(call: Call) -> int:
        reduced = call["reduction"] != 0
        weighted = (call.get("weight") is not None) + 2 * (call.get("pos_weight") is not None)
        return (flops if isinstance(flops, int) else flops(call)) + reduced + weighted

    return streaming(total, per="self")


cover(POINTWISE, _pointwise)
# For each class: its score minus the target's, plus the margin, clamped at 0, added to the sum.
cost_of("aten::multi_margin_loss")(streaming(4, per="self"))
cost_of("aten::multi_margin_loss_backward")(streaming(4, per="self"))
# For each target, the same work as in multi_margin_loss. The number of targets depends on values, so one target is
# counted.
cost_of("aten::multilabel_margin_loss_forward")(streaming(4, per="self"))
cost_of("aten::multilabel_margin_loss_backward")(streaming(4, per="self"))
cover(GRADIENTS)


@cost_of(*aten("nll_loss_forward nll_loss2d_forward"))
def nll_loss(call: Call) -> Cost:
    """The loss picks one log-probability for each target, weighs it and adds it. The loss reads only the picked
    log-probabilities."""
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


# Backward writes -weight / total at each target and zero elsewhere. It does not read the log-probabilities.
cost_of(*aten("nll_loss_backward nll_loss2d_backward"))(streaming(1, per="target", unread=["self"]))


CTC_STATE = 9
"""Flops of a state of the CTC recursion, log(exp(a) + exp(b) + exp(c)) + log-probability: the maximum (2), three
differences (3, which include their exponentials), two additions (2), the logarithm and the last addition (2)."""


@cost_of("aten::_ctc_loss")
def ctc_loss(call: Call) -> Cost:
    """Cost of the forward recursion over T steps and 2 S + 1 states of each sequence (Graves et al. 2006, section 4.1).

    A step needs the log-probabilities of the S labels and of the blank.
    """
    log_probability, alpha = call["log_probs"], call.results[1]  # (T, N, C), (N, T, 2 S + 1)
    steps, batch, classes = log_probability.shape
    labels = (alpha.shape[-1] - 1) // 2
    read = steps * batch * min(labels + 1, classes) * log_probability.element_size()
    return Cost(
        read + distinct_bytes(call.read_tensors_except("log_probs")),
        distinct_bytes(call.written_tensors),
        arithmetic(CTC_STATE * alpha.numel(), [log_probability]),
    )


@cost_of("aten::_ctc_loss_backward")
def ctc_loss_backward(call: Call) -> Cost:
    """Cost of the backward recursion, of gathering α + β by label (3 flops for each state), and of (exp(lp) -
    exp(gathered + nll - lp)) · grad for each class (6 flops). lp is the log-probability, nll the loss."""
    log_probability, alpha = call["log_probs"], call["log_alpha"]
    flops = (CTC_STATE + 3) * alpha.numel() + 6 * log_probability.numel()
    return moved_once(call, arithmetic(flops, [log_probability]))


@cost_of("aten::_cudnn_ctc_loss")
def ctc_loss_and_gradient(call: Call) -> Cost:
    """Cost of both recursions at once, since cuDNN writes the gradient together with the loss. S is the number of
    labels of a sequence."""
    # (T, N, C); (N, S), or (labels,) for the labels of all sequences end to end
    log_probability, targets = call["log_probs"], call["targets"]
    steps, batch, _ = log_probability.shape
    states = steps * (2 * targets.numel() + batch)  # in each step, 2 S + 1 for each sequence
    flops = (2 * CTC_STATE + 3) * states + 6 * log_probability.numel()
    return moved_once(call, arithmetic(flops, [log_probability]))


CHUNKED_LINEAR_LOSSES = (
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
)


@cost_of(*CHUNKED_LINEAR_LOSSES)
def chunked_linear_cross_entropy(call: Call) -> Cost:
    """`F.linear_cross_entropy` in chunks (an option): the function computes the logits for a few samples at a time, so
    the logits need not be written to memory.

    The cost is one matrix product for the logits, and one for each gradient (of input and weight) that is computed with
    the loss.
    """
    samples, weight, bias = call["input"], call["linear_weight"], call["linear_bias"]
    logits = prod(samples.shape[:-1]) * prod(weight.shape[:-1])
    gradients = [call.get(f"compute_{of}_grad", False) for of in ("input", "linear_weight", "linear_bias")]
    # For each logit: the softmax and adding the bias. For its gradient: subtracting the target's probability, and
    # adding it to the bias's gradient.
    pointwise = SOFTMAX_FLOPS + (bias is not None) + any(gradients) + gradients[2]
    flops = merged(
        matrix_flops(samples, logits * samples.shape[-1] * (1 + gradients[0] + gradients[1])),
        arithmetic(logits * pointwise, [samples]),
    )
    read = distinct_bytes([samples, weight, bias, call["target"], call["weight"]])
    return Cost(read, distinct_bytes(call.written_tensors), flops)
