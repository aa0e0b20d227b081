"""Cost of torchvision's operators for detection: boxes, regions and deformable convolutions. The formulas are
registered by name, so torchvision need not be installed.

A bilinear sample takes 8 flops: four neighbours, each weighted and added.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.ordering import comparison_depth
from rooftop.cost.formulas.sparse_operands import addressed_bytes
from rooftop.cost.formulas.streaming import arithmetic, moved_once, streaming
from rooftop.cost.registry import cost_of

AREA = 3
"""Flops for the area of a box (x1, y1, x2, y2): width, height, their product."""

OVERLAP = 13
"""Flops for the overlap of two boxes with known areas: four bounds, two clamped differences, intersection, union (2),
ratio, comparison.
"""

SAMPLE = 8


@cost_of("torchvision::nms")
def nms(call: Call) -> Cost:
    """NMS sorts the scores, then compares boxes. How many pairs it compares depends on the values. The formula counts
    the least possible number: each kept box with all other kept boxes, and each removed box once.
    """
    boxes, kept = call["dets"].shape[0], call.out.shape[0]
    pairs = kept * (kept - 1) // 2 + boxes - kept
    flops = boxes * (comparison_depth(boxes) + AREA) + pairs * OVERLAP
    return moved_once(call, arithmetic(flops, [call["dets"]]))


@cost_of("torchvision::roi_align", "torchvision::ps_roi_align")
def roi_align(call: Call) -> Cost:
    """Each bin is the mean of a grid of `sampling_ratio`² bilinear samples. With a ratio of 0 the number of samples
    depends on the size of the region; one sample is counted, the least possible number."""
    source, regions, pooled = call["input"], call["rois"], call.results[0]  # (N, C, H, W), (R, 5), (R, C, h, w)
    samples = max(call["sampling_ratio"], 1) ** 2
    read = tensor_bytes(regions) + addressed_bytes(source, pooled.numel() * samples * 4)
    flops = pooled.numel() * (samples * (SAMPLE + 1))
    return Cost(read, distinct_bytes(call.written_tensors), arithmetic(flops, [source]))


@cost_of("torchvision::_roi_align_backward", "torchvision::_ps_roi_align_backward")
def roi_align_backward(call: Call) -> Cost:
    """Backward spreads each gradient over the samples of its bin, and writes the whole gradient of the input."""
    samples = max(call["sampling_ratio"], 1) ** 2
    return streaming(samples * (SAMPLE + 1), per="grad")(call)


@cost_of("torchvision::roi_pool", "torchvision::ps_roi_pool")
def roi_pool(call: Call) -> Cost:
    """Each bin is the maximum (or mean) of the input's elements in the bin. Their number depends on the values of the
    regions; one element is counted for each bin, the least possible number."""
    source, pooled = call["input"], call.results[0]
    read = tensor_bytes(call["rois"]) + addressed_bytes(source, pooled.numel())
    return Cost(read, distinct_bytes(call.written_tensors), arithmetic(pooled.numel(), [source]))


cost_of("torchvision::_roi_pool_backward", "torchvision::_ps_roi_pool_backward")(streaming(1, per="grad"))


@cost_of("torchvision::deform_conv2d")
def deformable_convolution(call: Call) -> Cost:
    """A convolution of samples: one sample for each tap, input channel and output position, scaled by a mask if there
    is one.
    """
    source, weight, masked = call["input"], call["weight"], call["use_mask"]
    out: Tensor = call.out  # (N, filters, h, w)
    positions = out.numel() // weight.shape[0]
    samples = positions * source.shape[1] * prod(weight.shape[2:])
    flops = merged(
        matrix_flops(source, out.numel() * prod(weight.shape[1:])),
        arithmetic(samples * (SAMPLE + masked) + out.numel(), [source]),  # and the bias
    )
    read = call.read_tensors if masked else call.read_tensors_except("mask")
    return Cost(distinct_bytes(read), tensor_bytes(out), flops)


@cost_of("torchvision::_deform_conv2d_backward")
def deformable_convolution_backward(call: Call) -> Cost:
    """Cost of two convolutions, for the gradients of samples and weights. Each sample also passes a gradient to the
    input, to the offset's two coordinates and to the mask."""
    source, weight, gradient, masked = call["input"], call["weight"], call["grad"], call["use_mask"]
    positions = gradient.numel() // weight.shape[0]
    samples = positions * source.shape[1] * prod(weight.shape[2:])
    flops = merged(
        matrix_flops(source, 2 * gradient.numel() * prod(weight.shape[1:])),
        arithmetic(samples * (3 + masked) * SAMPLE + gradient.numel(), [source]),
    )
    read = call.read_tensors_except("bias") if masked else call.read_tensors_except("bias", "mask")
    return Cost(distinct_bytes(read), distinct_bytes(call.written_tensors), flops)
