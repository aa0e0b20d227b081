"""Costs of operators that libraries call: attention kernels, quantization, detection; and of losses, histograms and
nested tensors.

Counted by hand as in `test_formulas.py`; operators of other machines and of torchvision are called by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.cost import Call, CountingMode, covered_operators
from rooftop.cost.formulas.library_attentions import windowed_pairs
from rooftop.cost.formulas.softmaxes import SOFTMAX_FLOPS
from rooftop.cost.lookup import formula_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize.*deprecated"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

aten = torch.ops.aten


class Hand(NamedTuple):
    """One operator, a program that runs it last, and its cost counted by hand."""

    operator: str
    run: Callable[[], object]
    flops: int
    read: int
    write: int


def x(*shape: int) -> Tensor:
    return torch.rand(*shape)


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape).requires_grad_()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data, for operators that only a GPU has."""
    return torch.empty(shape, dtype=dtype, device="meta")


def backward(out: Tensor) -> None:
    out.backward(torch.ones_like(out))


def quantized(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(x(*shape), 0.1, 0, torch.quint8)


def integer_weights(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(x(*shape), 0.1, 0, torch.qint8)


# A byte for each element; to quantize is 5, to dequantize 2.
QUANTIZATION = [
    Hand("aten::quantize_per_tensor", lambda: quantized(3, 8), 5 * 24, 24 * 4, 24),
    # Four scales and zero points, float64 and int64.
    Hand(
        "aten::quantize_per_channel",
        lambda: torch.quantize_per_channel(x(4, 6), torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8),
        5 * 24,
        24 * 4 + 4 * 4 + 4 * 8,
        24,
    ),
    Hand("aten::dequantize", lambda: quantized(3, 8).dequantize(), 2 * 24, 24, 24 * 4),
    Hand("aten::int_repr", lambda: quantized(3, 8).int_repr(), 0, 24, 24),
    # Quantizing and dequantizing take 7 flops per element; the mask has one byte per element.
    Hand(
        "aten::fake_quantize_per_tensor_affine_cachemask",
        lambda: torch.fake_quantize_per_tensor_affine(x(24), 0.1, 0, 0, 255),
        7 * 24,
        24 * 4,
        24 * 4 + 24,
    ),
    # The minimum and maximum are computed, too. Two flags are read, and four statistics are read and written.
    Hand(
        "aten::_fused_moving_avg_obs_fq_helper",
        lambda: torch.fused_moving_avg_obs_fake_quant(
            x(24),
            *(torch.ones(1, dtype=torch.int64) for _ in range(2)),
            *(torch.ones(1) for _ in range(3)),
            torch.ones(1, dtype=torch.int32),
            0.01,
            0,
            255,
            0,
        ),
        9 * 24,
        24 * 4 + 2 * 8 + 4 * 4,
        24 * 4 + 24 + 4 * 4,
    ),
    Hand(
        "quantized::add",
        lambda: torch.ops.quantized.add(quantized(3, 8), quantized(3, 8), 0.1, 0),
        (2 + 2 + 1 + 5) * 24,
        2 * 24,
        24,
    ),
    Hand("quantized::mul_scalar", lambda: torch.ops.quantized.mul_scalar(quantized(24), 2.0), 8 * 24, 24, 24),
    Hand("quantized::hardswish", lambda: torch.ops.quantized.hardswish(quantized(24), 0.1, 0), 12 * 24, 24, 24),
    Hand("quantized::cat", lambda: torch.ops.quantized.cat([quantized(3), quantized(3)], 0, None, None), 0, 6, 6),
    Hand("aten::quantized_max_pool2d", lambda: F.max_pool2d(quantized(1, 2, 8, 8), 2), 4 * 32, 128, 32),
    # 2 m n k, then quantized; n k bytes of packed weights.
    Hand(
        "quantized::linear",
        lambda: torch.ops.quantized.linear(
            quantized(3, 8), torch.ops.quantized.linear_prepack(integer_weights(4, 8), x(4)), 0.1, 0
        ),
        2 * 3 * 4 * 8 + 5 * 12,
        24 + 32,
        12,
    ),
    Hand(
        "quantized::linear_dynamic",
        lambda: torch.ops.quantized.linear_dynamic(
            x(3, 8), torch.ops.quantized.linear_prepack(integer_weights(4, 8), x(4))
        ),
        2 * 3 * 4 * 8 + 5 * 12,
        24 * 4 + 32,
        12 * 4,
    ),
    Hand(
        "quantized::conv2d_relu",
        lambda: torch.ops.quantized.conv2d_relu(
            quantized(1, 3, 8, 8),
            torch.ops.quantized.conv2d_prepack(integer_weights(4, 3, 3, 3), x(4), [1, 1], [1, 1], [1, 1], 1),
            0.1,
            0,
        ),
        2 * 4 * 64 * 27 + 6 * 4 * 64,
        3 * 64 + 4 * 27,
        4 * 64,
    ),
    # Each weight is scaled once; bfloat16 in and out.
    Hand(
        "aten::_weight_int8pack_mm",
        lambda: torch._weight_int8pack_mm(x(16, 32).bfloat16(), torch.ones(8, 32, dtype=torch.int8), x(8).bfloat16()),
        2 * 16 * 8 * 32 + 8 * 32,
        16 * 32 * 2 + 8 * 32 + 8 * 2,
        16 * 8 * 2,
    ),
]

LOSSES = [
    # 5 steps, 2 sequences of 3 labels: 7 states of 9 flops; only the 3 labels and the blank are looked up among the 10
    # classes.
    Hand(
        "aten::_ctc_loss",
        lambda: F.ctc_loss(x(5, 2, 10), torch.ones(2, 3, dtype=torch.int64), (5, 5), (3, 3)),
        9 * 2 * 5 * 7,
        5 * 2 * 4 * 4 + 2 * 3 * 8,
        2 * 4 + 2 * 5 * 7 * 4,
    ),
    Hand(
        "aten::_ctc_loss_backward",
        lambda: backward(
            F.ctc_loss(leaf(5, 2, 10), torch.ones(2, 3, dtype=torch.int64), (5, 5), (3, 3), reduction="none")
        ),
        12 * 2 * 5 * 7 + 6 * 100,
        2 * 4 + 100 * 4 + 2 * 3 * 8 + 2 * 4 + 2 * 5 * 7 * 4,
        100 * 4,
    ),
    Hand(
        "aten::multi_margin_loss",
        lambda: F.multi_margin_loss(x(4, 6), torch.ones(4, dtype=torch.int64)),
        4 * 24,
        24 * 4 + 4 * 8,
        4,
    ),
    Hand(
        "aten::multi_margin_loss_backward",
        lambda: backward(F.multi_margin_loss(leaf(4, 6), torch.ones(4, dtype=torch.int64))),
        4 * 24,
        4 + 24 * 4 + 4 * 8,
        24 * 4,
    ),
    Hand(
        "aten::multilabel_margin_loss_forward",
        lambda: F.multilabel_margin_loss(x(4, 6), torch.ones(4, 6, dtype=torch.int64)),
        4 * 24,
        24 * (4 + 8),
        4 + 24 * 4,
    ),
    Hand(
        "aten::multilabel_margin_loss_backward",
        lambda: backward(F.multilabel_margin_loss(leaf(4, 6), torch.ones(4, 6, dtype=torch.int64))),
        4 * 24,
        4 + 24 * (4 + 8 + 4),
        24 * 4,
    ),
]

LEFT = torch.tensor([[True, True, False], [True, True, True]])


def nest() -> Tensor:
    return torch.nested.nested_tensor([x(2, 8), x(3, 8)])


PLACES = [
    # 100 points in two dimensions: four edges are found with two comparisons, nine with four.
    Hand(
        "aten::_histogramdd_from_bin_tensors",
        lambda: torch.histogramdd(x(100, 2), [torch.linspace(0, 1, 4), torch.linspace(0, 1, 9)]),
        100 * 2 + 100 * 4 + 100,
        (200 + 4 + 9) * 4,
        3 * 8 * 4,
    ),
    # Equal bins: a subtraction and a division for each coordinate. Bounds are computed first if they are not given.
    Hand("aten::_histogramdd_bin_edges", lambda: torch.histogramdd(x(100, 2), [3, 8]), 400, 800, (4 + 9) * 4),
    Hand("aten::_histogramdd_from_bin_cts", lambda: torch.histogramdd(x(100, 2), [3, 8]), 900, 800, 24 * 4),
    Hand("aten::histogram", lambda: torch.histogram(x(100), 8, range=(0, 1)), 300, 400, (8 + 9) * 4),
    Hand("aten::histogram", lambda: torch.histogram(x(100), torch.linspace(0, 1, 9)), 500, 436, (8 + 9) * 4),
    # Random windows of 2x2, sixteen of them in each of two planes; the random numbers are two for each plane.
    Hand(
        "aten::fractional_max_pool2d",
        lambda: F.fractional_max_pool2d(x(1, 2, 9, 9), 2, output_size=4),
        4 * 32,
        4 * 32 * 4 + 4 * 4,
        32 * (4 + 8),
    ),
    Hand(
        "aten::fractional_max_pool2d_backward",
        lambda: backward(F.fractional_max_pool2d(leaf(1, 2, 9, 9), 2, output_size=4)),
        32,
        32 * (4 + 8),
        162 * 4,
    ),
    Hand(
        "aten::_pack_padded_sequence",
        lambda: torch.nn.utils.rnn.pack_padded_sequence(x(4, 3, 2), torch.tensor([4, 3, 2])),
        0,
        24 * 4 + 3 * 8,
        9 * 2 * 4 + 4 * 8,
    ),
    # A mask of 24 elements lets six gradients through; the source's gradient has as many elements as the source.
    Hand(
        "aten::masked_scatter_backward",
        lambda: backward(x(4, 6).masked_scatter(torch.arange(24).view(4, 6) < 6, leaf(6))),
        0,
        24 * 4 + 24,
        6 * 4,
    ),
    Hand("aten::special_bessel_y0", lambda: torch.special.bessel_y0(x(24)), 24, 96, 96),
    Hand("aten::polygamma", lambda: torch.polygamma(1, x(24)), 24, 96, 96),
    Hand("aten::hash_tensor", lambda: torch.hash_tensor(x(24)), 24, 96, 8),
    # Sequences of 2 and 3 rows of 8, padded to 3.
    Hand(
        "aten::_jagged_to_padded_dense_forward",
        lambda: torch.nested.nested_tensor([x(2, 8), x(3, 8)], layout=torch.jagged).to_padded_tensor(0.0),
        0,
        40 * 4 + 3 * 8,
        48 * 4,
    ),
    Hand("aten::to_padded_tensor", lambda: nest().to_padded_tensor(0.0), 0, 40 * 4, 48 * 4),
    Hand("aten::_nested_tensor_from_mask", lambda: aten._nested_tensor_from_mask(x(2, 3, 8), LEFT), 0, 48 * 4 + 6, 160),
    Hand(
        "aten::_nested_tensor_from_mask_left_aligned",
        lambda: torch._nested_tensor_from_mask_left_aligned(x(2, 3, 8), LEFT),
        6,
        6,
        0,
    ),
]

# 2 sequences of 128 positions, 4 heads of 64; packed, the same positions end to end.
_ROWS = 2 * 128 * 4
_CAUSAL = 2 * 4 * 128 * 129 // 2
_ALL = 2 * 4 * 128 * 128
_QKV = 3 * _ROWS * 64 * 2
_ENDS = 3 * 4  # two sequences end to end: three int32


def _qkv(*shape: int) -> list[Tensor]:
    return [meta(*shape) for _ in range(3)]


def _flash(*, packed: bool, causal: bool, **options: Any) -> Call:
    ends = meta(3, dtype=torch.int32) if packed else None
    shape = (256, 4, 64) if packed else (2, 128, 4, 64)
    out = (meta(*shape), meta(2, 4, 128, dtype=torch.float32), *(meta() for _ in range(3)))
    arguments = (*_qkv(*shape), ends, ends, 128, 128, 0.0, causal, False)
    return Call(aten._flash_attention_forward.default, arguments, options, out)


def _flash_backward() -> Call:
    shape = (2, 128, 4, 64)
    out, logsumexp = meta(*shape), meta(2, 4, 128, dtype=torch.float32)
    empty = meta(0, dtype=torch.int32)
    arguments = (meta(*shape), *_qkv(*shape), out, logsumexp, empty, empty, 128, 128, 0.0, True, meta(), meta())
    return Call(aten._flash_attention_backward.default, arguments, {}, _qkv(*shape))


def _efficient(mask: int, **options: Any) -> Call:
    shape = (2, 128, 4, 64)
    out = (meta(*shape), meta(2, 4, 128, dtype=torch.float32), meta(), meta(), 128, 128)
    arguments = (*_qkv(*shape), None, None, None, None, None, 0.0, mask, True)
    return Call(aten._efficient_attention_forward.default, arguments, options, out)


def _efficient_backward() -> Call:
    shape = (2, 128, 4, 64)
    bias, logsumexp = meta(2, 4, 128, 128), meta(2, 4, 128, dtype=torch.float32)
    arguments = (
        *(meta(*shape), *_qkv(*shape), bias, meta(*shape), None, None, 128, 128, logsumexp),
        *(0.0, meta(), meta(), 0, True),
    )
    return Call(aten._efficient_attention_backward.default, arguments, {}, (*_qkv(*shape), meta(2, 4, 128, 128)))


class Schema:
    """An operator that is not installed here, by its schema alone."""

    def __init__(self, schema: str) -> None:
        self._schema = torch._C.parse_schema(schema)


NMS = Schema("torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
ROI_ALIGN = Schema(
    "torchvision::roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor"
)
ROI_ALIGN_BACKWARD = Schema(
    "torchvision::_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio,"
    " bool aligned) -> Tensor"
)
ROI_POOL = Schema(
    "torchvision::roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width)"
    " -> (Tensor, Tensor)"
)
_DEFORM = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w,"
    " SymInt groups, SymInt offset_groups, bool use_mask)"
)
DEFORM = Schema(
    "torchvision::deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias,"
    f" {_DEFORM} -> Tensor"
)
DEFORM_BACKWARD = Schema(
    "torchvision::_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask,"
    f" Tensor bias, {_DEFORM} -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_GEOMETRY = (1, 1, 1, 1, 1, 1, 1, 1)
# (2, 3, 8, 8) by (4, 3, 3, 3): 64 positions of each image, 9 taps of 3 channels.
_SAMPLES = 2 * 64 * 3 * 9


def _deform(*, masked: bool) -> tuple[Tensor, ...]:
    """Input, weights, offsets, mask, bias."""
    mask = x(2, 9, 8, 8) if masked else x(2, 1)
    return x(2, 3, 8, 8), x(4, 3, 3, 3), x(2, 18, 8, 8), mask, x(4)


LINEAR_POINTWISE = Schema(
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
CONVOLUTION_POINTWISE = Schema(
    "mkldnn::_convolution_pointwise(Tensor X, Tensor W, Tensor? B, int[] padding, int[] stride, int[] dilation,"
    " int groups, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
MKL_LINEAR = Schema("mkl::_mkl_linear(Tensor X, Tensor MKL_W, Tensor ORI_W, Tensor? B, int batch_size) -> Tensor")

CALLS: dict[str, tuple[Call, tuple[int, int, int]]] = {
    "flash attention": (
        _flash(packed=False, causal=True),
        (2 * _CAUSAL * 128 + 5 * _CAUSAL, _QKV, _QKV // 3 + _ROWS * 4),
    ),
    # Packed sequences cost least if their lengths are equal: 256 positions are two sequences of 128.
    "flash attention, packed": (
        _flash(packed=True, causal=False),
        (2 * _ALL * 128 + 5 * _ALL, _QKV + _ENDS, _QKV // 3 + _ROWS * 4),
    ),
    # Each position sees itself and the 7 before it, and the first seven positions see fewer: 128 * 8 - 28.
    "flash attention, window": (
        _flash(packed=False, causal=True, window_size_left=7),
        (133 * 2 * 4 * (128 * 8 - 28) + 128 * 2 * 4 * (128 * 8 - 28), _QKV, _QKV // 3 + _ROWS * 4),
    ),
    # Five products for each pair, 6 flops besides; gradient, q, k, v, out and log-sum-exp read.
    "flash attention backward": (
        _flash_backward(),
        (2 * _CAUSAL * 5 * 64 + 6 * _CAUSAL, 5 * _ROWS * 64 * 2 + _ROWS * 4, _QKV),
    ),
    "cuDNN attention": (
        Call(
            aten._cudnn_attention_forward.default,
            (*_qkv(2, 128, 4, 64), None, None, None, 128, 128, True),
            {},
            (meta(2, 128, 4, 64), meta(2, 4, 128, dtype=torch.float32), *(meta() for _ in range(7))),
        ),
        (2 * _ALL * 128 + 5 * _ALL, _QKV, _QKV // 3 + _ROWS * 4),
    ),
    "efficient attention": (_efficient(0), (2 * _ALL * 128 + 5 * _ALL, _QKV, _QKV // 3 + _ROWS * 4)),
    "efficient attention, causal": (_efficient(1), (2 * _CAUSAL * 128 + 5 * _CAUSAL, _QKV, _QKV // 3 + _ROWS * 4)),
    # The bias is read, added, and has a gradient.
    "efficient attention backward": (
        _efficient_backward(),
        (2 * _ALL * 5 * 64 + 7 * _ALL, 5 * _ROWS * 64 * 2 + _ALL * 2 + _ROWS * 4, _QKV + _ALL * 2),
    ),
    # 100 boxes: 7 comparisons each to sort, 3 for the area; 10 kept: 45 pairs of them, 90 others, 13 each.
    "nms": (
        Call(NMS, (x(100, 4), x(100), 0.5), {}, torch.zeros(10, dtype=torch.int64)),
        (100 * 10 + (45 + 90) * 13, 500 * 4, 10 * 8),
    ),
    # 3 regions of 5 channels, 2x2 bins of 4 samples, 9 flops each; they reach all of the input.
    "roi_align": (
        Call(ROI_ALIGN, (x(2, 5, 8, 8), x(3, 5), 1.0, 2, 2, 2, False), {}, x(3, 5, 2, 2)),
        (60 * 4 * 9, 15 * 4 + 640 * 4, 60 * 4),
    ),
    # One sample for each bin reaches 4 * 60 elements of a larger input.
    "roi_align, sampling at will": (
        Call(ROI_ALIGN, (x(2, 5, 64, 64), x(3, 5), 1.0, 2, 2, 0, False), {}, x(3, 5, 2, 2)),
        (60 * 9, 15 * 4 + 240 * 4, 60 * 4),
    ),
    "roi_align backward": (
        Call(ROI_ALIGN_BACKWARD, (x(3, 5, 2, 2), x(3, 5), 1.0, 2, 2, 2, 5, 8, 8, 2, False), {}, x(2, 5, 8, 8)),
        (60 * 4 * 9, (60 + 15) * 4, 640 * 4),
    ),
    "roi_pool": (
        Call(
            ROI_POOL,
            (x(2, 5, 8, 8), x(3, 5), 1.0, 2, 2),
            {},
            (x(3, 5, 2, 2), torch.zeros(3, 5, 2, 2, dtype=torch.int32)),
        ),
        (60, 15 * 4 + 60 * 4, 60 * 4 + 60 * 4),
    ),
    # 8 flops for each sample, one more for the mask, one for the bias.
    "deform_conv2d": (
        Call(DEFORM, (*_deform(masked=True), *_GEOMETRY, True), {}, x(2, 4, 8, 8)),
        (
            2 * 512 * 27 + 9 * _SAMPLES + 512,
            (384 + 108 + 2 * 18 * 64 + 2 * 9 * 64 + 4) * 4,
            512 * 4,
        ),
    ),
    "deform_conv2d without a mask": (
        Call(DEFORM, (*_deform(masked=False), *_GEOMETRY, False), {}, x(2, 4, 8, 8)),
        (2 * 512 * 27 + 8 * _SAMPLES + 512, (384 + 108 + 2 * 18 * 64 + 4) * 4, 512 * 4),
    ),
    "deform_conv2d backward": (
        Call(
            DEFORM_BACKWARD,
            (x(2, 4, 8, 8), *_deform(masked=True), *_GEOMETRY, True),
            {},
            _deform(masked=True),
        ),
        (
            2 * 2 * 512 * 27 + 4 * 8 * _SAMPLES + 512,
            (512 + 384 + 108 + 2 * 18 * 64 + 2 * 9 * 64) * 4,
            (384 + 108 + 2 * 18 * 64 + 2 * 9 * 64 + 4) * 4,
        ),
    ),
    # 4-bit weights, two a byte, packed as int32; scale and zero for each 32 of them; scaled and shifted once.
    "int4 weights": (
        Call(
            aten._weight_int4pack_mm.default,
            (x(16, 64).bfloat16(), torch.zeros(1, 1, 32, 2, dtype=torch.int32), 32, x(2, 8, 2).bfloat16()),
            {},
            x(16, 8).bfloat16(),
        ),
        (2 * 16 * 8 * 64 + 2 * 8 * 64, 16 * 64 * 2 + 8 * 64 // 2 + 32 * 2, 16 * 8 * 2),
    ),
    # A linear layer as one operator, as nested tensors call it: five rows of 8 to 4.
    "linear layer in one operator": (
        Call(aten.linear.default, (x(5, 8), x(4, 8), x(4)), {}, x(5, 4)),
        (2 * 5 * 8 * 4 + 20, (40 + 32 + 4) * 4, 20 * 4),
    ),
    # The gradients of weights (needs the input) and bias (a sum); the gradient of the input is not requested.
    "linear layer backward": (
        Call(
            aten.linear_backward.default,
            (x(5, 8), x(5, 4), x(4, 8), [False, True, True]),
            {},
            (torch.empty(0), x(4, 8), x(4)),
        ),
        (2 * 5 * 8 * 4 + 20, (20 + 40) * 4, (32 + 4) * 4),
    ),
    "rows of bytes": (
        Call(
            torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default,
            (torch.zeros(100, 24, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64), torch.zeros(2).long()),
            {},
            x(2, 16),
        ),
        (3 * 6 * 16, 6 * 24 + 6 * 8 + 2 * 8, 32 * 4),
    ),
    "linear layer with relu": (
        Call(LINEAR_POINTWISE, (x(3, 8), x(4, 8), x(4), "relu", [], ""), {}, x(3, 4)),
        (2 * 3 * 4 * 8 + 2 * 12, (24 + 32 + 4) * 4, 12 * 4),
    ),
    "convolution with relu": (
        Call(
            CONVOLUTION_POINTWISE,
            (x(1, 3, 8, 8), x(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], 1, "relu", [], ""),
            {},
            x(1, 4, 8, 8),
        ),
        (2 * 256 * 27 + 256, (192 + 108) * 4, 256 * 4),
    ),
    "linear layer, packed": (
        Call(MKL_LINEAR, (x(3, 8), x(64), x(4, 8), x(4), 3), {}, x(3, 4)),
        (2 * 3 * 4 * 8 + 12, (24 + 32 + 4) * 4, 12 * 4),
    ),
}


@pytest.mark.parametrize("hand", [*QUANTIZATION, *LOSSES, *PLACES], ids=lambda hand: hand.operator)
def test_cost_is_what_a_person_counts(hand: Hand) -> None:
    with CountingMode() as counted:
        hand.run()
    records = [record for record in counted.records if record.name == hand.operator]
    assert records, f"the program ran only {sorted({record.name for record in counted.records})}"
    cost = records[-1].cost
    assert cost is not None, records[-1].uncovered
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == (hand.flops, hand.read, hand.write)


@pytest.mark.parametrize("name", CALLS)
def test_cost_of_what_is_not_installed_here(name: str) -> None:
    call, expected = CALLS[name]
    formula = formula_for(call.func)
    assert formula is not None
    cost = formula(call)
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == expected


def test_packed_sequences_of_other_lengths_than_their_keys_are_not_guessed() -> None:
    packed = _flash(packed=True, causal=False)
    packed = Call(packed.func, (packed.args[0], meta(300, 4, 64), meta(300, 4, 64), *packed.args[3:]), {}, packed.out)
    formula = formula_for(packed.func)
    assert formula is not None
    with pytest.raises(ValueError, match="lengths of packed sequences are values"):
        formula(packed)


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right"), [*product((1, 4, 7), (1, 4, 7), (None, 0, 2), (None, 0, 2))]
)
def test_windows_see_what_lies_inside_them(queries: int, keys: int, left: int | None, right: int | None) -> None:
    seen = sum(
        (left is None or j >= i - left) and (right is None or j <= i + right)
        for i in range(queries)
        for j in range(keys)
    )
    assert windowed_pairs(queries, keys, left, right) == seen


def test_every_operator_that_pytorch_counts_has_a_formula() -> None:
    """All operators for which PyTorch's FlopCounterMode counts flops, in any namespace."""
    pytest.importorskip("torch.nn.attention.varlen")
    from torch.utils.flop_counter import flop_registry

    counted = {getattr(func, "_qualified_op_name", str(func)) for func in flop_registry}
    by_their_functions = {"flex_attention", "flex_attention_backward"}  # see `lookup.later_cost`
    assert counted - by_their_functions <= set(covered_operators())


def test_attention_of_packed_sequences() -> None:
    """Three sequences with 40 positions in total have at least the pairs of sequences of 13, 13 and 14 positions."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    heads, width = 2, 8
    q, k, v = (meta(40, heads, width).requires_grad_() for _ in range(3))
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    with CountingMode() as counted:
        varlen.varlen_attn(q, k, v, starts, starts, 20, 20)
    record = next(r for r in counted.records if r.name == "torch_attn::_varlen_attn")
    assert record.cost is not None, record.uncovered
    pairs = heads * (13 * 13 + 13 * 13 + 14 * 14)
    assert record.cost.total_flops == pairs * (2 * 2 * width + SOFTMAX_FLOPS)


def test_a_linear_layer_with_its_loss_in_chunks() -> None:
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        pytest.skip("this PyTorch has no F.linear_cross_entropy with options")
    samples, weight, target = leaf(64, 32), leaf(100, 32), torch.randint(0, 100, (64,))
    with CountingMode() as counted:
        F.linear_cross_entropy(samples, weight, target, options=options())
    record = next(r for r in counted.records if r.name.startswith("torch_nn::"))
    assert record.cost is not None, record.uncovered
    logits = 64 * 100  # a product for them, and one for the gradient of each factor
    assert record.cost.total_flops == 3 * 2 * logits * 32 + logits * (SOFTMAX_FLOPS + 1)
    assert record.cost.read_bytes == 4 * (64 * 32 + 100 * 32) + 8 * 64
