"""Cost of recurrent networks: single LSTM and GRU cells, and whole layers in one operator.

An LSTM cell computes, per hidden unit, the sums of its four gates, three sigmoids and two tanh, and c' = f c + i g, h =
o tanh(c'). A layer reads its weights once for all time steps. In a layer, sums and activations count as two flops for
each row of each weight matrix, at each time step of each sequence.
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensors_in
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.streaming import arithmetic, aten, streaming
from rooftop.cost.registry import cost_of


def _additions(call: Call) -> int:
    """Number of additions per element of one gate: one for the sum of the products of input and hidden state, and two
    more if there are biases.
    """
    return 1 + 2 * (call["input_bias"] is not None)


cost_of("aten::_thnn_fused_lstm_cell")(streaming(lambda call: 4 * _additions(call) + 9))
# A GRU cell has three gates: two sigmoids, a tanh, the reset r · (...), and h' = n + z (h - n).
cost_of("aten::_thnn_fused_gru_cell")(streaming(lambda call: 3 * _additions(call) + 7))
cost_of("aten::_thnn_fused_lstm_cell_backward_impl")(streaming(20, per="cx"))
cost_of("aten::_thnn_fused_gru_cell_backward")(streaming(16, per="grad_hy"))


@cost_of(*aten("_cudnn_rnn mkldnn_rnn_layer"))
def recurrent_layers(call: Call) -> Cost:
    """Layers write the output and the final states. The workspace for a backward pass belongs to the back end and is
    not counted."""
    weights, states = _weights(call), _arguments(call, "hx", "cx", "hx_", "cx_")
    read = [call["input"], *weights, *states]
    return Cost(distinct_bytes(read), distinct_bytes(call.results[:3]), _layer_flops(call["input"], weights))


@cost_of(*aten("_cudnn_rnn_backward mkldnn_rnn_layer_backward"))
def recurrent_layers_backward(call: Call) -> Cost:
    """Cost of the gradients of inputs and of weights: twice the flops of the forward pass, once for the inputs and once
    for the weights."""
    weights = _weights(call)
    states = _arguments(call, "hx", "cx", "hx_", "cx_tmp", "output", "grad_output", "grad_hy", "grad_cy")
    flops = _layer_flops(call["input"], weights)
    return Cost(
        distinct_bytes([call["input"], *weights, *states]),
        distinct_bytes(tensors_in(call.results)),
        merged(flops, flops),
    )


def _arguments(call: Call, *names: str) -> list[Tensor]:
    return list(tensors_in([call.get(name) for name in names]))


def _weights(call: Call) -> list[Tensor]:
    """The matrices and biases. `weight_buf` is the same memory in the back end's layout, so it is left out."""
    return _arguments(call, "weight", "weight0", "weight1", "weight2", "weight3", "weight4")


def _layer_flops(source: Tensor, weights: list[Tensor]) -> dict[str, int]:
    steps = source.numel() // max(source.shape[-1], 1)  # number of time steps in all sequences
    matrices = [weight for weight in weights if weight.ndim == 2]  # (gates, inputs)
    return merged(
        matrix_flops(source, steps * sum(matrix.numel() for matrix in matrices)),
        arithmetic(2 * steps * sum(matrix.shape[0] for matrix in matrices), [source]),
    )
