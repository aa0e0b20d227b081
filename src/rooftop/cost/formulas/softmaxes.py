"""Cost of softmax and log-softmax along one dimension, forward and backward.

softmax(x)       = exp(x - max) / sum(exp(x - max))      max, subtract, exp, add, divide
log_softmax(x)   = x - max - log(sum(exp(x - max)))      max, subtract, exp, add, subtract
softmax'(g)      = y (g - sum(g y))                      multiply, add, subtract, multiply
log_softmax'(g)  = g - exp(y) sum(g)                     add, exp, multiply, subtract
"""

from __future__ import annotations

from rooftop.cost.formulas.streaming import cover, each, streaming
from rooftop.cost.registry import cost_of

SOFTMAX_FLOPS = 5
"""Forward flops per element, also used for the scores of attention."""

SOFTMAX_BACKWARD_FLOPS = 4

cover(each("_log_softmax _masked_softmax _safe_softmax _softmax", SOFTMAX_FLOPS))
cost_of("aten::_nested_tensor_softmax_with_shape")(streaming(SOFTMAX_FLOPS, unread=["query"]))
cover(each("_log_softmax_backward_data _masked_softmax_backward _softmax_backward_data", SOFTMAX_BACKWARD_FLOPS))
