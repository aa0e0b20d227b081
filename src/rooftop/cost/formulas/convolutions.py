"""Convolutions: 2 · N · C_out · prod(out) · C_in / groups · prod(kernel) flops.

By the published convention, positions at which the kernel extends into the padding count like all others. A transposed
convolution does the same flops for each *input* position instead of each output position. The gradient of the input and
the gradient of the weight each take as many flops as the forward pass.
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, matrix_precision, tensor_bytes
from rooftop.cost.formulas.matmuls import merged
from rooftop.cost.formulas.streaming import arithmetic, aten, requested
from rooftop.cost.formulas.windows import per_dimension, touched_bytes
from rooftop.cost.registry import cost_of


@cost_of(
    *aten("_conv_depthwise2d _convolution _slow_conv2d_forward conv_depthwise3d convolution convolution_overrideable"),
    *aten("cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose"),
    *aten("mkldnn_convolution slow_conv3d_forward"),
)
def convolution(call: Call) -> Cost:
    """Count a multiplication and an addition for each weight that contributes to each output element. A fused bias, sum
    or ReLU adds one flop per output element. Reads count only the pixels that windows touch.
    """
    source, weight = _source(call), call["weight"]
    out: Tensor = call.results[0]
    bias, addend = call.get("bias"), call.get("z")
    epilogue = (bias is not None) + (addend is not None) + call.func._schema.name.endswith("relu")
    flops = merged(
        _convolution_flops(source, weight, out, _is_transposed(call)),
        arithmetic(epilogue * out.numel(), [source]),
    )
    read = _source_bytes(call, source, weight, out) + distinct_bytes([weight, bias, addend])
    return Cost(read, tensor_bytes(out), flops)


@cost_of(*aten("convolution_backward convolution_backward_overrideable"))
def convolution_backward(call: Call) -> Cost:
    """Cost of each requested gradient, with the operand that it reads: the weight for the input's gradient, the input
    for the weight's gradient."""
    gradient, source, weight = call["grad_output"], _source(call), call["weight"]
    to_input, to_weight, to_bias = call["output_mask"]
    product = _convolution_flops(source, weight, gradient, _is_transposed(call))
    flops = merged(
        product if to_input else {},
        product if to_weight else {},
        arithmetic(gradient.numel() if to_bias else 0, [gradient]),
    )
    read = tensor_bytes(gradient) if to_input or to_weight or to_bias else 0
    read += tensor_bytes(weight) if to_input and source.numel() else 0
    read += _source_bytes(call, source, weight, gradient) if to_weight else 0
    return Cost(read, distinct_bytes(requested(call.results, call["output_mask"])), flops)


def _source(call: Call) -> Tensor:
    source: Tensor = call["input"] if "input" in call else call["self"]
    return source


def _is_transposed(call: Call) -> bool:
    return bool(call.get("transposed", call.func._schema.name.endswith("transpose")))


def _convolution_flops(source: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> dict[str, int]:
    # weight: (C_out, C_in / groups, *kernel), transposed (C_in, C_out / groups, *kernel)
    positions = source if transposed else out
    taps = weight.numel() // max(weight.shape[0], 1)
    flops = 2 * positions.numel() * taps * (4 if source.is_complex() else 1)
    return {matrix_precision(source, convolution=True): flops} if flops else {}


def _source_bytes(call: Call, source: Tensor, weight: Tensor, out: Tensor) -> int:
    """Bytes of the input that the convolution's windows touch. A transposed convolution reads all of the input."""
    if _is_transposed(call):
        return tensor_bytes(source)
    dimensions = weight.ndim - 2
    stride, padding, dilation = (
        per_dimension(call.get(name, 1), dimensions) for name in ("stride", "padding", "dilation")
    )
    return touched_bytes(source, out.shape[2:], weight.shape[2:], stride, padding, dilation)
