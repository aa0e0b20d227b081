"""Cost of operators on quantized tensors (one byte per element): conversions to and from integers, and products.

    quantize     round(x / scale + zero) between two bounds      5 flops
    dequantize   (q - zero) * scale                              2 flops

An elementwise quantized operator dequantizes its inputs, computes, and quantizes its outputs. A matrix product or
convolution multiplies the integers, and quantizes its outputs. Products of integers count in `fp32`, like all integer
arithmetic, because the peak rate of integer products is not measured. Weights packed in an object are read once, at one
byte each (two bytes in float16). The object hides their biases and scales, which are not counted.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.sparse_operands import addressed_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, moved_once, streaming
from rooftop.cost.registry import Formula, cost_of

QUANTIZE = 5
DEQUANTIZE = 2


def _quantized(names: str) -> list[str]:
    return [f"quantized::{name}" for name in names.split()]


cost_of(*aten("quantize_per_channel quantize_per_tensor"))(streaming(QUANTIZE))
cost_of("aten::quantize_per_tensor_dynamic")(streaming(QUANTIZE + 2))  # the operator first computes minimum and maximum
cost_of("aten::dequantize")(streaming(DEQUANTIZE))
cost_of(*aten("_make_per_channel_quantized_tensor _make_per_tensor_quantized_tensor int_repr"))(streaming())

# These operators quantize and dequantize. A second result marks the elements that were within the bounds.
FAKE = QUANTIZE + DEQUANTIZE
cost_of(
    *aten("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams fake_quantize_per_channel_affine_cachemask"),
    *aten("fake_quantize_per_tensor_affine_cachemask"),
    *aten("_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine"),
)(streaming(FAKE))
# The observer computes minimum and maximum, and updates its averages with a few flops.
cost_of("aten::_fused_moving_avg_obs_fq_helper", "aten::_fused_moving_avg_obs_fq_helper_functional")(
    streaming(FAKE + 2)
)
# The gradient passes through elements within the bounds, and is also added to the gradients of scale and zero point.
cost_of(
    *aten("_fake_quantize_learnable_per_channel_affine_backward"),
    *aten("_fake_quantize_learnable_per_tensor_affine_backward"),
)(streaming(FAKE + 4, per="self"))

# operator: flops between dequantizing the operands and quantizing the result
POINTWISE: dict[str, int] = {
    "add": 1,
    "add_relu": 2,
    "add_scalar": 1,
    "add_scalar_relu": 2,
    "batch_norm1d": 2,
    "batch_norm2d": 2,
    "batch_norm2d_relu": 3,
    "batch_norm3d": 2,
    "batch_norm3d_relu": 3,
    "elu": 3,
    "group_norm": 7,
    "hardswish": 5,
    "instance_norm": 7,
    "layer_norm": 7,
    "leaky_relu": 2,
    "mul": 1,
    "mul_relu": 2,
    "mul_scalar": 1,
    "mul_scalar_relu": 2,
    "sigmoid": 1,
    "softmax": 5,
}


def _pointwise(flops: int) -> Formula:
    """A formula that counts, for each element of the result: dequantizing one element of each quantized operand,
    `flops`, and quantizing the element."""

    def per_element(call: Call) -> int:
        return DEQUANTIZE * sum(t.is_quantized for t in call.read_tensors) + flops + QUANTIZE

    return streaming(per_element)


for _name, _flops in POINTWISE.items():
    cost_of(f"quantized::{_name}")(_pointwise(_flops))
# Quantized integers are in the same order as their values, so they are compared without dequantization.
cost_of(*_quantized("clamp relu6 threshold"))(streaming(2))
cost_of(*_quantized("cat cat_relu"))(streaming())


def _integer_product(call: Call, products: int, weight_bytes: int, epilogue: int) -> Cost:
    """Cost of `products` multiply-adds in total, in the input's dtype, and of `epilogue` flops for each element of the
    result."""
    source = call.read_tensors[0]
    flops = merged(matrix_flops(source, products), arithmetic(epilogue * call.out.numel(), [call.out]))
    return Cost(distinct_bytes(call.read_tensors) + weight_bytes, tensor_bytes(call.out), flops)


@cost_of(*_quantized("linear linear_dynamic linear_relu linear_relu_dynamic linear_dynamic_fp16"))
def linear(call: Call) -> Cost:
    """Cost of (..., k) times packed (n, k) weights. A weight has one byte, or two bytes in float16."""
    source: Tensor = call["X"]
    depth, width = source.shape[-1], call.out.shape[-1]
    size = 2 if call.func._schema.name.endswith("fp16") else 1
    epilogue = QUANTIZE + ("relu" in call.func._schema.name)
    return _integer_product(call, call.out.numel() * depth, depth * width * size, epilogue)


@cost_of(*_quantized("conv1d conv1d_relu conv2d conv2d_relu conv3d conv3d_relu"))
def convolution(call: Call) -> Cost:
    """A convolution takes 2 · c · prod(kernel) flops for each result. The weights' shape (filters, c, *kernel) is read
    from the packed weights."""
    packed: Any = call["packed_weight"] if "packed_weight" in call else call["weight"]
    name = call.func._schema.name
    dimensions = 3 if "3d" in name else 2  # the weights of a 1-D convolution are packed as those of a 2-D one
    shape = getattr(torch.ops.quantized, f"conv{dimensions}d_unpack_sizes")(packed)[0]
    return _integer_product(call, call.out.numel() * prod(shape[1:]), prod(shape), QUANTIZE + ("relu" in name))


@cost_of(*_quantized("max_pool1d max_pool2d"), *aten("quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d"))
def max_pool(call: Call) -> Cost:
    """Max pooling takes one comparison for each element of each window."""
    kernel = call["kernel_size"]
    taps = prod(kernel) if len(kernel) > 1 or "1d" in call.func._schema.name else kernel[0] ** 2
    return streaming(taps)(call)


@cost_of(*_quantized("embedding_bag_byte_rowwise_offsets embedding_bag_4bit_rowwise_offsets"))
def embedding_bag(call: Call) -> Cost:
    """The elements of the table have 8 bits (or 4 bits); each row also stores its scale and offset. Each element is
    dequantized and added to its bag."""
    table, indices = call["weight"], call["indices"]  # (rows, bytes of a row)
    width = call.out.shape[-1]
    weights = call["per_sample_weights"]
    flops = indices.numel() * width * (DEQUANTIZE + 1 + (weights is not None))
    read = addressed_bytes(table, indices.numel() * table.shape[-1]) + distinct_bytes(
        call.read_tensors_except("weight")
    )
    return Cost(read, tensor_bytes(call.out), arithmetic(flops, [call.out]))


@cost_of(
    *aten("_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros"),
    *aten("_weight_int8pack_mm _mixed_dtypes_linear _dyn_quant_matmul_4bit"),
)
def weight_only(call: Call) -> Cost:
    """Cost of floating-point (..., k) times integer (n, k) weights. Each weight is scaled (and shifted) once."""
    source = call.read_tensors[0]
    depth, width = source.shape[-1], call.out.shape[-1]
    shifts = call.func._schema.name not in ("aten::_weight_int8pack_mm", "aten::_mixed_dtypes_linear")
    pointwise = depth * width * (1 + shifts)
    pointwise += call.out.numel() * ((call.get("bias") is not None) + (call.get("activation") not in (None, "none")))
    flops = merged(matrix_flops(source, call.out.numel() * depth), arithmetic(pointwise, [source]))
    return moved_once(call, flops)


cost_of(*aten("_convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu _dyn_quant_pack_4bit_weight"))(
    streaming()
)


@cost_of("onednn::qlinear_pointwise", "mkldnn::_linear_pointwise")
def fused_linear(call: Call) -> Cost:
    """Cost of a linear layer of the compiler's CPU back end, fused with the next operation (one flop per result)."""
    source = call["X"] if "X" in call else call["qx"]
    return _fused(call, source, call.out.numel() * source.shape[-1])


@cost_of("onednn::qconv_pointwise", "onednn::qconv2d_pointwise", "mkldnn::_convolution_pointwise")
def fused_convolution(call: Call) -> Cost:
    """Cost of a convolution of the compiler's CPU back end, fused with the next operation."""
    source, weight = (call["X"], call["W"]) if "X" in call else (call["qx"], call["qw"])
    return _fused(call, source, call.out.numel() * prod(weight.shape[1:]))


def _fused(call: Call, source: Tensor, products: int) -> Cost:
    bias = call.get("B", call.get("bias"))
    after = call.get("attr", call.get("post_op_name", call.get("binary_post_op", "none")))
    epilogue = (bias is not None) + (after != "none")
    flops = merged(matrix_flops(source, products), arithmetic(epilogue * elements(call.out), [source]))
    return moved_once(call, flops)


@cost_of("mkl::_mkl_linear")
def packed_linear(call: Call) -> Cost:
    """Cost of a float32 linear layer. The weights are passed both in packed and in plain form, and count as read
    once."""
    source, weight, bias = call["X"], call["ORI_W"], call["B"]
    flops = merged(
        matrix_flops(source, call.out.numel() * source.shape[-1]),
        arithmetic((bias is not None) * call.out.numel(), [source]),
    )
    return Cost(distinct_bytes([source, weight, bias]), tensor_bytes(call.out), flops)
