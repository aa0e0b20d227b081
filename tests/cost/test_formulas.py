"""Costs of operators against counts done by hand: real code runs under the counting mode, the numbers are literal.

Shapes are spelled out in each count, bytes as (elements) * 4 for float32, * 8 for int64 and * 1 for masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.cost import Call, Cost, CountingMode
from rooftop.cost.lookup import formula_for

aten = torch.ops.aten


@dataclass(frozen=True)
class Hand:
    """One operator, a program that runs it exactly once, and its cost counted by hand."""

    operator: str
    run: Callable[[], object]
    flops: int
    read: int
    write: int


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64).to(dtype)


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape).requires_grad_()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data, to run operators that only a GPU has."""
    return torch.empty(shape, dtype=dtype, device="meta")


def below(size: int, *shape: int) -> Tensor:
    """Random indices."""
    return torch.randint(size, shape)


def backward(out: Tensor) -> None:
    out.backward(torch.ones_like(out))


def step(optimizer: Callable[..., torch.optim.Optimizer], *, times: int = 1, **options: Any) -> None:
    """Steps on parameters of 6 and 4 elements, with gradients of ones."""
    group = [nn.Parameter(x(2, 3)), nn.Parameter(x(4))]
    stepper = optimizer(group, lr=0.1, **options)
    for parameter in group:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(times):
        stepper.step()


PRODUCTS = [
    Hand("mm", lambda: x(3, 5) @ x(5, 7), 2 * 3 * 7 * 5, (3 * 5 + 5 * 7) * 4, 3 * 7 * 4),
    Hand("bmm", lambda: x(2, 3, 4) @ x(2, 4, 5), 2 * 2 * 3 * 5 * 4, (2 * 3 * 4 + 2 * 4 * 5) * 4, 2 * 3 * 5 * 4),
    Hand("mv", lambda: x(3, 5) @ x(5), 2 * 3 * 5, (3 * 5 + 5) * 4, 3 * 4),
    Hand("dot", lambda: x(9) @ x(9), 2 * 9, (9 + 9) * 4, 1 * 4),
    # Complex numbers: two sums; eleven operations of a quotient; a square root of two squares.
    Hand("add", lambda: x(5, dtype=torch.complex64) + x(5, dtype=torch.complex64), 10, 80, 40),
    Hand("sub", lambda: torch.sub(x(5, dtype=torch.complex64), x(5), alpha=3), 20, 60, 40),
    Hand("div", lambda: x(5, dtype=torch.complex64) / x(5, dtype=torch.complex64), 55, 80, 40),
    Hand("abs", lambda: x(5, dtype=torch.complex64).abs(), 20, 40, 20),
    # A complex transform of 8 takes 4 * 8 * 3 - 6 * 8 + 8 = 56 operations, and one of 4 takes 16. A real transform
    # takes half.
    Hand("_fft_r2c", lambda: torch.fft.rfft(x(4, 8)), 4 * 28, 4 * 8 * 4, 4 * 5 * 8),
    Hand("_fft_c2r", lambda: torch.fft.irfft(x(4, 5, dtype=torch.complex64)), 4 * 28, 4 * 5 * 8, 4 * 8 * 4),
    Hand(
        "_fft_c2c",
        lambda: torch.fft.fft2(x(3, 4, 8, dtype=torch.complex64)),
        3 * (8 * 16 + 4 * 56),
        3 * 4 * 8 * 8,
        3 * 4 * 8 * 8,
    ),
    Hand("_fft_c2c", lambda: torch.fft.fft(x(5, 1, dtype=torch.complex64)), 0, 5 * 8, 5 * 8),
    # y = x Wᵀ + b: the bias is one addition for each result.
    Hand(
        "addmm",
        lambda: F.linear(x(8, 16), x(32, 16), x(32)),
        2 * 8 * 32 * 16 + 8 * 32,
        (8 * 16 + 32 * 16 + 32) * 4,
        8 * 32 * 4,
    ),
    # With beta 0 the addend is not read; alpha 2 costs a multiplication for each result.
    Hand(
        "baddbmm",
        lambda: torch.baddbmm(x(2, 3, 5), x(2, 3, 4), x(2, 4, 5), beta=0, alpha=2),
        2 * 2 * 3 * 5 * 4 + 2 * 3 * 5,
        (2 * 3 * 4 + 2 * 4 * 5) * 4,
        2 * 3 * 5 * 4,
    ),
    Hand(
        "addbmm",
        lambda: torch.addbmm(x(3, 5), x(2, 3, 4), x(2, 4, 5)),
        2 * 3 * 5 * (2 * 4) + 3 * 5,
        (3 * 5 + 2 * 3 * 4 + 2 * 4 * 5) * 4,
        3 * 5 * 4,
    ),
    Hand("addmv", lambda: torch.addmv(x(3), x(3, 5), x(5)), 2 * 3 * 5 + 3, (3 + 3 * 5 + 5) * 4, 3 * 4),
    Hand("addr", lambda: torch.addr(x(3, 5), x(3), x(5)), 2 * 3 * 5, (3 * 5 + 3 + 5) * 4, 3 * 5 * 4),
    Hand(
        "_addmm_activation",
        lambda: aten._addmm_activation(x(5), x(3, 4), x(4, 5)),
        2 * 3 * 5 * 4 + 3 * 5 + 3 * 5,
        (5 + 3 * 4 + 4 * 5) * 4,
        3 * 5 * 4,
    ),
    # fp8 operands, a byte each; two float32 scales; bfloat16 result, scaled twice.
    Hand(
        "_scaled_mm",
        lambda: torch._scaled_mm(
            x(16, 32, dtype=torch.float8_e4m3fn),
            x(48, 32, dtype=torch.float8_e4m3fn).t(),
            torch.ones(1),
            torch.ones(1),
            out_dtype=torch.bfloat16,
        ),
        2 * 16 * 48 * 32 + 2 * 16 * 48,
        16 * 32 + 32 * 48 + 2 * 4,
        16 * 48 * 2,
    ),
    # Four experts share 16 rows; offsets are int32.
    Hand(
        "_grouped_mm",
        lambda: torch._grouped_mm(meta(16, 32), meta(4, 32, 48), meta(4, dtype=torch.int32)),
        2 * 16 * 48 * 32,
        (16 * 32 + 4 * 32 * 48) * 2 + 4 * 4,
        16 * 48 * 2,
    ),
]

CONVOLUTIONS = [
    # The stem of a ResNet: 7x7, stride 2, padding 3.
    Hand(
        "convolution",
        lambda: F.conv2d(x(2, 3, 56, 56), x(64, 3, 7, 7), x(64), stride=2, padding=3),
        2 * 2 * 64 * 28 * 28 * 3 * 49 + 2 * 64 * 28 * 28,
        (2 * 3 * 56 * 56 + 64 * 3 * 49 + 64) * 4,
        2 * 64 * 28 * 28 * 4,
    ),
    # A 1x1 kernel with stride 2 needs every second row and column: 7x7 out of 14x14.
    Hand(
        "convolution",
        lambda: F.conv2d(x(2, 8, 14, 14), x(16, 8, 1, 1), stride=2),
        2 * 2 * 16 * 7 * 7 * 8,
        (2 * 8 * 7 * 7 + 16 * 8) * 4,
        2 * 16 * 7 * 7 * 4,
    ),
    # Depthwise: each output channel sees one input channel.
    Hand(
        "convolution",
        lambda: F.conv2d(x(2, 8, 14, 14), x(8, 1, 3, 3), padding=1, groups=8),
        2 * 2 * 8 * 14 * 14 * 1 * 9,
        (2 * 8 * 14 * 14 + 8 * 9) * 4,
        2 * 8 * 14 * 14 * 4,
    ),
    Hand(
        "convolution",
        lambda: F.conv3d(x(1, 2, 6, 6, 6), x(4, 2, 3, 3, 3)),
        2 * 4 * 4 * 4 * 4 * 2 * 27,
        (2 * 6 * 6 * 6 + 4 * 2 * 27) * 4,
        4 * 4 * 4 * 4 * 4,
    ),
    # Transposed: each of 5x5 input positions spreads over 6 channels of 3x3.
    Hand(
        "convolution",
        lambda: F.conv_transpose2d(x(1, 4, 5, 5), x(4, 6, 3, 3), stride=2),
        2 * 4 * 5 * 5 * 6 * 9,
        (4 * 5 * 5 + 4 * 6 * 9) * 4,
        6 * 11 * 11 * 4,
    ),
    # Backward: the forward's flops once for each of two gradients, additions for the bias; all three tensors read.
    Hand(
        "convolution_backward",
        lambda: backward(F.conv2d(leaf(2, 3, 8, 8), leaf(4, 3, 3, 3), leaf(4), padding=1)),
        2 * (2 * 2 * 4 * 8 * 8 * 3 * 9) + 2 * 4 * 8 * 8,
        (2 * 4 * 8 * 8 + 2 * 3 * 8 * 8 + 4 * 3 * 9) * 4,
        (2 * 3 * 8 * 8 + 4 * 3 * 9 + 4) * 4,
    ),
    # The first layer of a network needs no gradient of its input, so its weights are not read.
    Hand(
        "convolution_backward",
        lambda: backward(F.conv2d(x(2, 3, 8, 8), leaf(4, 3, 3, 3), padding=1)),
        2 * 2 * 4 * 8 * 8 * 3 * 9,
        (2 * 4 * 8 * 8 + 2 * 3 * 8 * 8) * 4,
        4 * 3 * 9 * 4,
    ),
]

# 2 sequences, 4 heads, 128 positions, 64 dimensions.
_HEADS = 2 * 4
_CAUSAL = 128 * 129 // 2
_ROWS = 2 * 4 * 128


def _attention_gradient(operator: Any, **options: Any) -> None:
    q, k, v, out, gradient = (meta(2, 4, 128, 64) for _ in range(5))
    logsumexp, seed, offset = meta(2, 4, 128, dtype=torch.float32), meta(dtype=torch.int64), meta(dtype=torch.int64)
    if "flash" in str(operator):
        operator(gradient, q, k, v, out, logsumexp, None, None, 128, 128, 0.0, True, seed, offset)
    elif "efficient" in str(operator):
        operator(gradient, q, k, v, None, out, logsumexp, seed, offset, 0.0, options["mask"])
    else:
        operator(gradient, q, k, v, out, logsumexp, seed, offset, None, None, None, 128, 128, 0.0, False)


ATTENTIONS = [
    # Two products per visible pair, 5 flops of softmax; bfloat16 in and out, float32 log-sum-exp.
    Hand(
        "_scaled_dot_product_flash_attention",
        lambda: aten._scaled_dot_product_flash_attention(
            meta(2, 4, 128, 64), meta(2, 4, 128, 64), meta(2, 4, 128, 64), 0.0, True
        ),
        2 * _HEADS * _CAUSAL * (64 + 64) + 5 * _HEADS * _CAUSAL,
        3 * _ROWS * 64 * 2,
        _ROWS * 64 * 2 + _ROWS * 4,
    ),
    Hand(
        "_scaled_dot_product_efficient_attention",
        lambda: aten._scaled_dot_product_efficient_attention(
            meta(2, 4, 128, 64), meta(2, 4, 128, 64), meta(2, 4, 128, 64), meta(128, 128).expand(2, 4, 128, 128), True
        ),
        2 * _HEADS * 128 * 128 * (64 + 64) + 6 * _HEADS * 128 * 128,  # adding the mask is the sixth flop
        3 * _ROWS * 64 * 2 + 128 * 128 * 2,  # one mask for all heads
        _ROWS * 64 * 2 + _ROWS * 4,
    ),
    # Grouped queries: two key heads serve four query heads.
    Hand(
        "_scaled_dot_product_cudnn_attention",
        lambda: aten._scaled_dot_product_cudnn_attention(
            meta(2, 4, 128, 64), meta(2, 2, 128, 64), meta(2, 2, 128, 64), None, True
        ),
        2 * _HEADS * 128 * 128 * (64 + 64) + 5 * _HEADS * 128 * 128,
        (_ROWS + 2 * _ROWS // 2) * 64 * 2,
        _ROWS * 64 * 2 + _ROWS * 4,
    ),
    Hand(
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda: F.scaled_dot_product_attention(x(2, 4, 8, 16), x(2, 4, 8, 16), x(2, 4, 8, 16), is_causal=True),
        2 * 8 * (8 * 9 // 2) * 32 + 5 * 8 * (8 * 9 // 2),
        3 * 2 * 4 * 8 * 16 * 4,
        2 * 4 * 8 * 16 * 4 + 2 * 4 * 8 * 4,
    ),
    # Five products per pair: recomputed scores, two for the gradients of values and weights, two for queries and keys.
    # Pointwise per pair: exp(score - logsumexp) 2, gradient of softmax 4. Gradient, q, k, v, out read.
    Hand(
        "_scaled_dot_product_flash_attention_backward",
        lambda: _attention_gradient(aten._scaled_dot_product_flash_attention_backward),
        2 * _HEADS * _CAUSAL * 5 * 64 + 6 * _HEADS * _CAUSAL,
        5 * _ROWS * 64 * 2 + _ROWS * 4,
        3 * _ROWS * 64 * 2,
    ),
    # Only the gradient of the values: the scores are recomputed, and one product follows; `out` is not read.
    Hand(
        "_scaled_dot_product_efficient_attention_backward",
        lambda: _attention_gradient(
            aten._scaled_dot_product_efficient_attention_backward, mask=[False, False, True, False]
        ),
        2 * _HEADS * 128 * 128 * 2 * 64 + 2 * _HEADS * 128 * 128,
        4 * _ROWS * 64 * 2 + _ROWS * 4,
        _ROWS * 64 * 2,
    ),
    Hand(
        "_scaled_dot_product_cudnn_attention_backward",
        lambda: _attention_gradient(aten._scaled_dot_product_cudnn_attention_backward),
        2 * _HEADS * 128 * 128 * 5 * 64 + 6 * _HEADS * 128 * 128,
        5 * _ROWS * 64 * 2 + _ROWS * 4,
        3 * _ROWS * 64 * 2,
    ),
    Hand(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        lambda: backward(F.scaled_dot_product_attention(leaf(2, 4, 8, 16), leaf(2, 4, 8, 16), leaf(2, 4, 8, 16))),
        2 * 8 * 8 * 8 * 5 * 16 + 6 * 8 * 8 * 8,
        4 * 2 * 4 * 8 * 16 * 4 + 2 * 4 * 8 * 16 * 4 + 2 * 4 * 8 * 4,
        3 * 2 * 4 * 8 * 16 * 4,
    ),
    # A whole layer on (2, 5, 16) with 4 heads and 32 hidden units: the products are 3 + 1 projections, attention and
    # the two linear layers; the rest is biases, softmax, two norms (7), residuals (1) and relu.
    Hand(
        "_transformer_encoder_layer_fwd",
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().requires_grad_(False)(x(2, 5, 16)),
        2 * 10 * 16 * (48 + 16 + 32 + 32)
        + 2 * 2 * 5 * 5 * 2 * 16
        + 10 * (48 + 16 + 32 + 16)
        + 5 * 2 * 4 * 5 * 5
        + (2 * 7 + 2) * 160
        + 10 * 32,
        (2 * 5 * 16 + 48 * 16 + 48 + 16 * 16 + 16 + 4 * 16 + 2 * 32 * 16 + 32 + 16) * 4,
        2 * 5 * 16 * 4,
    ),
]


def _batch_norm(*, training: bool, gradient: bool = False) -> None:
    source = leaf(2, 8, 4, 4) if gradient else x(2, 8, 4, 4)
    weight, bias = (leaf(8), leaf(8)) if gradient else (x(8), x(8))
    out = F.batch_norm(source, torch.zeros(8), torch.ones(8), weight, bias, training=training)
    if gradient:
        backward(out)


NORMS = [
    # Sum 1, squares 2, centring 1, scale 1, weight 1, bias 1; writes each row's mean and 1/σ.
    Hand(
        "native_layer_norm",
        lambda: F.layer_norm(x(6, 32), (32,), x(32), x(32)),
        7 * 6 * 32,
        (6 * 32 + 32 + 32) * 4,
        (6 * 32 + 6 + 6) * 4,
    ),
    # x̂ 2, weight 2, bias 1, input 8; gradient, x, mean, 1/σ and weight read.
    Hand(
        "native_layer_norm_backward",
        lambda: backward(F.layer_norm(leaf(6, 32), (32,), leaf(32), leaf(32))),
        13 * 6 * 32,
        (6 * 32 + 6 * 32 + 6 + 6 + 32) * 4,
        (6 * 32 + 32 + 32) * 4,
    ),
    # The gradient of the bias alone: additions of the gradient; nothing else is read.
    Hand(
        "native_layer_norm_backward",
        lambda: backward(F.layer_norm(x(6, 32), (32,), x(32), leaf(32))),
        6 * 32,
        6 * 32 * 4,
        32 * 4,
    ),
    Hand(
        "native_group_norm",
        lambda: F.group_norm(x(2, 8, 4, 4), 2, x(8), x(8)),
        7 * 2 * 8 * 16,
        (2 * 8 * 16 + 8 + 8) * 4,
        (2 * 8 * 16 + 2 * 2 + 2 * 2) * 4,
    ),
    Hand(
        "native_group_norm_backward",
        lambda: backward(F.group_norm(leaf(2, 8, 4, 4), 2, leaf(8), leaf(8))),
        13 * 2 * 8 * 16,
        (2 * 2 * 8 * 16 + 2 * 2 + 2 * 2 + 8) * 4,
        (2 * 8 * 16 + 8 + 8) * 4,
    ),
    # Training: statistics 3, scale and shift 2; running statistics read and written, batch statistics written.
    Hand(
        "native_batch_norm",
        lambda: _batch_norm(training=True),
        5 * 2 * 8 * 16,
        (2 * 8 * 16 + 4 * 8) * 4,
        (2 * 8 * 16 + 4 * 8) * 4,
    ),
    # Inference: scale and shift; no statistics written.
    Hand(
        "native_batch_norm",
        lambda: _batch_norm(training=False),
        2 * 2 * 8 * 16,
        (2 * 8 * 16 + 4 * 8) * 4,
        2 * 8 * 16 * 4,
    ),
    Hand(
        "native_batch_norm_backward",
        lambda: _batch_norm(training=True, gradient=True),
        13 * 2 * 8 * 16,
        (2 * 2 * 8 * 16 + 3 * 8) * 4,
        (2 * 8 * 16 + 8 + 8) * 4,
    ),
    # Frozen statistics: dx = g w / σ is 2; x̂ 2 and weight 2 for the weight, 1 for the bias.
    Hand(
        "native_batch_norm_backward",
        lambda: _batch_norm(training=False, gradient=True),
        7 * 2 * 8 * 16,
        (2 * 2 * 8 * 16 + 3 * 8) * 4,
        (2 * 8 * 16 + 8 + 8) * 4,
    ),
    Hand(
        "cudnn_batch_norm",
        lambda: aten.cudnn_batch_norm(
            meta(2, 8, 4, 4), *(meta(8, dtype=torch.float32) for _ in range(4)), True, 0.1, 1e-5
        ),
        5 * 2 * 8 * 16,
        2 * 8 * 16 * 2 + 4 * 8 * 4,
        2 * 8 * 16 * 2 + 4 * 8 * 4,
    ),
    Hand(
        "cudnn_batch_norm_backward",
        lambda: aten.cudnn_batch_norm_backward(
            meta(2, 8, 4, 4),
            meta(2, 8, 4, 4),
            *(meta(8, dtype=torch.float32) for _ in range(5)),
            1e-5,
            meta(0, dtype=torch.uint8),
        ),
        13 * 2 * 8 * 16,
        2 * 2 * 8 * 16 * 2 + 3 * 8 * 4,
        2 * 8 * 16 * 2 + 2 * 8 * 4,
    ),
]

ELEMENTWISE = [
    Hand("relu", lambda: F.relu(x(4, 6)), 24, 24 * 4, 24 * 4),
    Hand("threshold_backward", lambda: backward(F.relu(leaf(4, 6))), 24, 2 * 24 * 4, 24 * 4),
    Hand("add", lambda: x(4, 6) + x(6), 24, (24 + 6) * 4, 24 * 4),
    Hand("add_", lambda: x(4, 6).add_(x(4, 6), alpha=-0.1), 2 * 24, 2 * 24 * 4, 24 * 4),
    Hand("mul", lambda: x(4, 1) * x(1, 6), 24, (4 + 6) * 4, 24 * 4),
    Hand("mul", lambda: x(5, dtype=torch.complex64) * x(5, dtype=torch.complex64), 6 * 5, 2 * 5 * 8, 5 * 8),
    Hand("div", lambda: x(4, 6) / x(4, 6), 24, 2 * 24 * 4, 24 * 4),
    Hand("exp", lambda: x(4, 6, dtype=torch.float16).exp(), 24, 24 * 2, 24 * 2),
    Hand("gt", lambda: x(4, 6) > x(4, 6), 24, 2 * 24 * 4, 24 * 1),
    Hand("where", lambda: torch.where(x(4, 6) > 0.5, x(4, 6), x(6)), 0, 24 * 1 + 24 * 4 + 6 * 4, 24 * 4),
    Hand("clamp", lambda: x(4, 6).clamp(0.2, 0.8), 2 * 24, 24 * 4, 24 * 4),
    Hand("lerp", lambda: torch.lerp(x(4, 6), x(4, 6), 0.3), 3 * 24, 2 * 24 * 4, 24 * 4),
    Hand("addcmul", lambda: torch.addcmul(x(24), x(24), x(24), value=2), 3 * 24, 3 * 24 * 4, 24 * 4),
    Hand("gelu", lambda: F.gelu(x(4, 6)), 5 * 24, 24 * 4, 24 * 4),
    Hand("gelu_backward", lambda: backward(F.gelu(leaf(4, 6))), 11 * 24, 2 * 24 * 4, 24 * 4),
    Hand("silu", lambda: F.silu(x(4, 6)), 2 * 24, 24 * 4, 24 * 4),
    Hand("silu_backward", lambda: backward(F.silu(leaf(4, 6))), 6 * 24, 2 * 24 * 4, 24 * 4),
    Hand("sigmoid_backward", lambda: backward(torch.sigmoid(leaf(24))), 3 * 24, 2 * 24 * 4, 24 * 4),
    Hand("tanh_backward", lambda: backward(torch.tanh(leaf(24))), 3 * 24, 2 * 24 * 4, 24 * 4),
    Hand("glu", lambda: F.glu(x(4, 6)), 2 * 12, 24 * 4, 12 * 4),
    Hand("glu_backward", lambda: backward(F.glu(leaf(4, 6))), 5 * 12, (12 + 24) * 4, 24 * 4),
    Hand("hardtanh", lambda: F.relu6(x(24)), 2 * 24, 24 * 4, 24 * 4),
    Hand("leaky_relu", lambda: F.leaky_relu(x(24)), 2 * 24, 24 * 4, 24 * 4),
    Hand("log_sigmoid_backward", lambda: backward(F.logsigmoid(leaf(24))), 3 * 24, 2 * 24 * 4, 24 * 4),
]

REDUCTIONS = [
    Hand("sum", lambda: x(8, 10).sum(), 80, 80 * 4, 4),
    Hand("sum", lambda: x(10).expand(8, 10).sum(), 80, 10 * 4, 4),
    Hand("mean", lambda: x(8, 10).mean(1), 80 + 8, 80 * 4, 8 * 4),
    Hand("var", lambda: x(8, 10).var(1), 4 * 80 + 2 * 8, 80 * 4, 8 * 4),
    Hand("max", lambda: x(8, 10).max(1), 80, 80 * 4, 8 * (4 + 8)),
    Hand("argmax", lambda: x(8, 10).argmax(1), 80, 80 * 4, 8 * 8),
    Hand("linalg_vector_norm", lambda: x(80).norm(), 2 * 80 + 1, 80 * 4, 4),
    Hand("cumsum", lambda: x(8, 10).cumsum(1), 80, 80 * 4, 80 * 4),
    Hand("logsumexp", lambda: x(8, 10).logsumexp(1), 4 * 80 + 2 * 8, 80 * 4, 8 * 4),
    Hand("_softmax", lambda: x(8, 10).softmax(1), 5 * 80, 80 * 4, 80 * 4),
    Hand("_softmax_backward_data", lambda: backward(leaf(8, 10).softmax(1)), 4 * 80, 2 * 80 * 4, 80 * 4),
    Hand("_log_softmax", lambda: x(8, 10).log_softmax(1), 5 * 80, 80 * 4, 80 * 4),
    Hand("_log_softmax_backward_data", lambda: backward(leaf(8, 10).log_softmax(1)), 4 * 80, 2 * 80 * 4, 80 * 4),
    # 1024 elements a line: ten comparisons each.
    Hand("sort", lambda: x(2, 1024).sort(), 2 * 1024 * 10, 2048 * 4, 2048 * (4 + 8)),
    Hand("topk", lambda: x(8, 10).topk(3), 80, 80 * 4, 8 * 3 * (4 + 8)),
    Hand("searchsorted", lambda: torch.searchsorted(x(16), x(100)), 100 * 4, (16 + 100) * 4, 100 * 8),
    Hand("_local_scalar_dense", lambda: x(8, 10).sum().item(), 0, 4, 0),
]

LOSSES = [
    # One of 10 log-probabilities for each of 8 targets; the total weight is a result.
    Hand("nll_loss_forward", lambda: F.cross_entropy(x(8, 10), below(10, 8)), 8, 8 * 4 + 8 * 8, 4 + 4),
    Hand(
        "nll_loss_backward",
        lambda: backward(F.cross_entropy(leaf(8, 10), below(10, 8))),
        8,
        4 + 8 * 8 + 4,
        80 * 4,
    ),
    Hand("mse_loss", lambda: F.mse_loss(x(8, 10), x(8, 10)), 3 * 80, 2 * 80 * 4, 4),
    Hand("mse_loss", lambda: F.mse_loss(x(8, 10), x(8, 10), reduction="none"), 2 * 80, 2 * 80 * 4, 80 * 4),
    Hand("mse_loss_backward", lambda: backward(F.mse_loss(leaf(80), x(80))), 3 * 80, 4 + 2 * 80 * 4, 80 * 4),
    Hand("smooth_l1_loss", lambda: F.smooth_l1_loss(x(80), x(80)), 6 * 80, 2 * 80 * 4, 4),
    Hand("binary_cross_entropy", lambda: F.binary_cross_entropy(x(80), x(80)), 9 * 80, 2 * 80 * 4, 4),
]

POOLS = [
    Hand(
        "max_pool2d_with_indices",
        lambda: F.max_pool2d(leaf(2, 4, 8, 8), 3, stride=2, padding=1),
        2 * 4 * 4 * 4 * 9,
        2 * 4 * 64 * 4,
        2 * 4 * 16 * (4 + 8),
    ),
    # A gradient goes to the position of its index; the input itself is not read.
    Hand(
        "max_pool2d_with_indices_backward",
        lambda: backward(F.max_pool2d(leaf(2, 4, 8, 8), 2)),
        2 * 4 * 16,
        2 * 4 * 16 * (4 + 8),
        2 * 4 * 64 * 4,
    ),
    # Windows of 2 with stride 4 cover half of each dimension.
    Hand("avg_pool2d", lambda: F.avg_pool2d(x(1, 1, 8, 8), 2, stride=4), 4 * 4, 16 * 4, 4 * 4),
    Hand(
        "avg_pool2d_backward",
        lambda: backward(F.avg_pool2d(leaf(2, 4, 8, 8), 2)),
        2 * 4 * 16 * 4,
        2 * 4 * 16 * 4,
        2 * 4 * 64 * 4,
    ),
    Hand("_adaptive_avg_pool2d", lambda: F.adaptive_avg_pool2d(x(2, 4, 8, 8), 2), 512, 512 * 4, 2 * 4 * 4 * 4),
    Hand(
        "_adaptive_avg_pool2d_backward",
        lambda: backward(F.adaptive_avg_pool2d(leaf(2, 4, 8, 8), 2)),
        512,
        2 * 4 * 4 * 4,
        512 * 4,
    ),
]


def _grid_sample(**options: Any) -> Tensor:
    return F.grid_sample(leaf(2, 3, 8, 8), leaf(2, 5, 5, 2), align_corners=False, **options)


INTERPOLATIONS = [
    Hand("upsample_nearest2d", lambda: F.interpolate(x(2, 3, 4, 4), scale_factor=2), 0, 96 * 4, 384 * 4),
    # Shrunk to a quarter by dropping pixels: only kept pixels are read.
    Hand("upsample_nearest2d", lambda: F.interpolate(x(2, 3, 8, 8), scale_factor=0.25), 0, 24 * 4, 24 * 4),
    Hand(
        "upsample_bilinear2d",
        lambda: F.interpolate(x(2, 3, 4, 4), scale_factor=2, mode="bilinear"),
        8 * 384,
        96 * 4,
        384 * 4,
    ),
    Hand(
        "upsample_bilinear2d_backward",
        lambda: backward(F.interpolate(leaf(2, 3, 4, 4), scale_factor=2, mode="bilinear")),
        8 * 384,
        384 * 4,
        96 * 4,
    ),
    # Halved with widened triangles, four taps along each dimension; rows first, then columns (either order here).
    Hand(
        "_upsample_bilinear2d_aa",
        lambda: F.interpolate(x(1, 1, 8, 8), size=4, mode="bilinear", antialias=True),
        2 * (4 * 8 * 4 + 4 * 4 * 4),
        64 * 4,
        16 * 4,
    ),
    # Four neighbours: 8 flops for each result, 2 for each coordinate.
    Hand("grid_sampler_2d", _grid_sample, 8 * 150 + 2 * 100, (384 + 100) * 4, 150 * 4),
    Hand(
        "grid_sampler_2d_backward",
        lambda: backward(_grid_sample()),
        8 * 150 + 2 * 8 * 150 + 2 * 100,
        (150 + 100 + 384) * 4,
        (384 + 100) * 4,
    ),
    Hand("affine_grid_generator", lambda: F.affine_grid(x(2, 2, 3), [2, 1, 4, 4], False), 6 * 64, 12 * 4, 64 * 4),
]

MOVEMENT = [
    Hand("clone", lambda: x(4, 6).clone(), 0, 24 * 4, 24 * 4),
    Hand("clone", lambda: x(6).expand(4, 6).contiguous(), 0, 6 * 4, 24 * 4),
    Hand("copy_", lambda: x(4, 6).copy_(x(6)), 0, 6 * 4, 24 * 4),
    Hand("_to_copy", lambda: x(4, 6).to(torch.bfloat16), 0, 24 * 4, 24 * 2),
    Hand("fill_", lambda: x(24).fill_(1.0), 0, 0, 24 * 4),
    Hand("zeros_like", lambda: torch.zeros_like(x(24)), 0, 0, 24 * 4),
    Hand("arange", lambda: torch.arange(24), 0, 0, 24 * 8),
    Hand("cat", lambda: torch.cat([x(4, 6), x(2, 6)]), 0, 36 * 4, 36 * 4),
    Hand("stack", lambda: torch.stack([x(6), x(6)]), 0, 12 * 4, 12 * 4),
    Hand("repeat", lambda: x(6).repeat(4), 0, 6 * 4, 24 * 4),
    Hand("constant_pad_nd", lambda: F.pad(x(4, 4), (1, 1, 1, 1)), 0, 16 * 4, 36 * 4),
    Hand("reflection_pad2d", lambda: F.pad(x(1, 4, 4), (1, 1, 1, 1), mode="reflect"), 0, 16 * 4, 36 * 4),
    Hand(
        "reflection_pad2d_backward",
        lambda: backward(F.pad(leaf(1, 4, 4), (1, 1, 1, 1), mode="reflect")),
        36,
        36 * 4,
        16 * 4,
    ),
    Hand("roll", lambda: x(4, 6).roll(1), 0, 24 * 4, 24 * 4),
    # A 4x4 matrix has 10 elements on or below the diagonal, and 6 above it.
    Hand("tril", lambda: x(4, 4).tril(), 0, 10 * 4, 16 * 4),
    Hand("triu", lambda: x(4, 4).triu(1), 0, 6 * 4, 16 * 4),
    Hand("tril_", lambda: x(4, 4).tril_(), 0, 0, 6 * 4),
    Hand("slice_backward", lambda: backward(leaf(8, 6)[2:4]), 0, 12 * 4, 48 * 4),
    Hand("select_backward", lambda: backward(leaf(8, 6)[2]), 0, 6 * 4, 48 * 4),
]

INDEXING = [
    # 3 rows of a table of 100: the others are not touched.
    Hand("embedding", lambda: F.embedding(below(100, 3), x(100, 16)), 0, 3 * 16 * 4 + 3 * 8, 3 * 16 * 4),
    # 500 indices into 100 rows: the table at most.
    Hand("embedding", lambda: F.embedding(below(100, 500), x(100, 16)), 0, 1600 * 4 + 500 * 8, 500 * 16 * 4),
    Hand(
        "embedding_dense_backward",
        lambda: backward(F.embedding(below(100, 3), leaf(100, 16))),
        3 * 16,
        3 * 16 * 4 + 3 * 8,
        1600 * 4,
    ),
    Hand("index_select", lambda: x(100, 16).index_select(0, below(100, 3)), 0, 48 * 4 + 3 * 8, 48 * 4),
    Hand("gather", lambda: x(8, 100).gather(1, below(100, 8, 2)), 0, 16 * 4 + 16 * 8, 16 * 4),
    Hand("index", lambda: x(100, 16)[below(100, 3)], 0, 48 * 4 + 3 * 8, 48 * 4),
    Hand("index_put_", lambda: x(100, 16).index_put_((below(100, 3),), x(3, 16)), 0, 48 * 4 + 3 * 8, 48 * 4),
    Hand(
        "index_add_",
        lambda: x(100, 16).index_add_(0, below(100, 3), x(3, 16)),
        48,
        2 * 48 * 4 + 3 * 8,  # the addends, and the elements to which they are added
        48 * 4,
    ),
    # The operator is not in-place, so the rest of the tensor is copied.
    Hand(
        "scatter_add",
        lambda: x(8, 100).scatter_add(1, below(100, 8, 2), x(8, 2)),
        16,
        800 * 4 + 16 * (8 + 4),
        800 * 4,
    ),
    Hand("scatter_", lambda: x(8, 100).scatter_(1, below(100, 8, 2), 1.0), 0, 16 * 8, 16 * 4),
    Hand("masked_fill", lambda: x(4, 6).masked_fill(x(4, 6) > 0.5, 0.0), 0, 24 * 4 + 24, 24 * 4),
    Hand("masked_select", lambda: x(24).masked_select(torch.ones(24) > 0), 0, 24 * 4 + 24, 24 * 4),
    Hand("nonzero", lambda: torch.ones(24).nonzero(), 0, 24 * 4, 24 * 8),
    # Two bags of four indices into rows of 16. Results: the sums, and two int64 for each bag (its size, its maximum).
    Hand(
        "_embedding_bag_forward_only",
        lambda: F.embedding_bag(below(100, 2, 4), x(100, 16), mode="sum"),
        8 * 16,
        8 * 16 * 4 + 8 * 8 + 2 * 8,
        2 * 16 * 4 + 2 * 2 * 8,
    ),
]

RANDOM = [
    Hand("normal_", lambda: torch.empty(24).normal_(), 24, 0, 24 * 4),
    Hand("randn", lambda: torch.randn(24), 24, 0, 24 * 4),
    Hand("bernoulli", lambda: torch.bernoulli(x(24)), 2 * 24, 24 * 4, 24 * 4),
    Hand("bernoulli_", lambda: torch.empty(24).bernoulli_(0.1), 2 * 24, 0, 24 * 4),
    Hand("native_dropout", lambda: torch.native_dropout(x(24), 0.1, True), 3 * 24, 24 * 4, 24 * (4 + 1)),
    Hand(
        "native_dropout_backward",
        lambda: aten.native_dropout_backward(x(24), x(24) > 0.1, 1.1),
        2 * 24,
        24 * (4 + 1),
        24 * 4,
    ),
]

# Parameters of 6 and 4 elements, 10 in all.
OPTIMIZERS = [
    Hand(
        "_foreach_addcdiv_",
        lambda: torch._foreach_addcdiv_([x(6), x(4)], [x(6), x(4)], [x(6), x(4)], -0.1),
        3 * 10,
        3 * 10 * 4,
        10 * 4,
    ),
    Hand("_foreach_mul_", lambda: torch._foreach_mul_([x(6), x(4)], 0.9), 10, 10 * 4, 10 * 4),
    Hand("_foreach_zero_", lambda: torch._foreach_zero_([x(6), x(4)]), 0, 0, 10 * 4),
    Hand("_foreach_copy_", lambda: torch._foreach_copy_([x(6), x(4)], [x(6), x(4)]), 0, 10 * 4, 10 * 4),
    Hand("_foreach_norm", lambda: torch._foreach_norm([x(6), x(4)]), 2 * 10 + 2, 10 * 4, 2 * 4),
    Hand("_foreach_sqrt", lambda: torch._foreach_sqrt([x(6), x(4)]), 10, 10 * 4, 10 * 4),
    # Reads parameter, gradient, two averages and two counters; gradients are not written.
    Hand(
        "_fused_adam_",
        lambda: step(torch.optim.Adam, fused=True),
        13 * 10,
        4 * 10 * 4 + 2 * 4,
        3 * 10 * 4,
    ),
    Hand(
        "_fused_adamw_",
        lambda: step(torch.optim.AdamW, fused=True, amsgrad=True),
        (13 + 2 + 1) * 10,
        5 * 10 * 4 + 2 * 4,
        4 * 10 * 4,
    ),
    # The first step creates the momentum buffer from the gradient, the second step reads it.
    Hand(
        "_fused_sgd_",
        lambda: step(torch.optim.SGD, momentum=0.9, fused=True),
        2 * 10,
        2 * 10 * 4,
        2 * 10 * 4,
    ),
    Hand(
        "_fused_sgd_",
        lambda: step(torch.optim.SGD, times=2, momentum=0.9, fused=True),
        4 * 10,
        3 * 10 * 4,
        2 * 10 * 4,
    ),
]

RECURRENT = [
    # Five steps of two sequences of 16, four gates of 8 units: products of input and state, 2 flops for each of them.
    Hand(
        "mkldnn_rnn_layer",
        lambda: nn.LSTM(16, 8)(x(5, 2, 16)),
        2 * 10 * 32 * (16 + 8) + 2 * 10 * (32 + 32),
        (5 * 2 * 16 + 32 * 16 + 32 * 8 + 32 + 32 + 2 * 8 + 2 * 8) * 4,
        (5 * 2 * 8 + 2 * 8 + 2 * 8) * 4,
    ),
]

HAND_COUNTS = [
    *PRODUCTS,
    *CONVOLUTIONS,
    *ATTENTIONS,
    *NORMS,
    *ELEMENTWISE,
    *REDUCTIONS,
    *LOSSES,
    *POOLS,
    *INTERPOLATIONS,
    *MOVEMENT,
    *INDEXING,
    *RANDOM,
    *OPTIMIZERS,
    *RECURRENT,
]


@pytest.mark.parametrize("hand", HAND_COUNTS, ids=lambda hand: hand.operator)
def test_cost_is_what_a_person_counts(hand: Hand) -> None:
    with CountingMode() as counted:
        hand.run()
    records = [record for record in counted.records if record.name == f"aten::{hand.operator}"]
    # `x` and `leaf` also allocate and draw, so the last record of an operator counts.
    assert records, f"the program ran only {sorted({record.name for record in counted.records})}"
    cost = records[-1].cost
    assert cost is not None, records[-1].uncovered
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == (hand.flops, hand.read, hand.write)


def test_more_than_a_hundred_operators_are_counted_by_hand() -> None:
    assert len({hand.operator for hand in HAND_COUNTS}) >= 100


@pytest.mark.parametrize(
    ("operator", "arguments", "out", "expected"),
    [
        # x / rms(x) · weight: square, add, scale, weight; writes 1/rms of each row.
        (
            aten._fused_rms_norm.default,
            (x(6, 32), [32], x(32), 1e-6),
            (x(6, 32), x(6, 1)),
            (4 * 6 * 32, (6 * 32 + 32) * 4, (6 * 32 + 6) * 4),
        ),
        # x̂ 1, weight 2, input 6 = 1 (weight) + 5; no mean.
        (
            aten._fused_rms_norm_backward.default,
            (x(6, 32), x(6, 32), [32], x(6, 1), x(32), [True, True]),
            (x(6, 32), x(32)),
            (9 * 6 * 32, (2 * 6 * 32 + 6 + 32) * 4, (6 * 32 + 32) * 4),
        ),
        # Four gates of 8 units with a sum each, three sigmoids, two tanh, three products, one sum.
        (
            aten._thnn_fused_lstm_cell.default,
            (x(2, 32), x(2, 32), x(2, 8)),
            (x(2, 8), x(2, 8), x(2, 32)),
            ((4 + 9) * 16, (64 + 64 + 16) * 4, (16 + 16 + 64) * 4),
        ),
    ],
    ids=lambda value: value.name() if isinstance(value, torch._ops.OpOverload) else "",
)
def test_operators_that_only_a_gpu_runs(
    operator: Any, arguments: Any, out: Any, expected: tuple[int, int, int]
) -> None:
    formula = formula_for(operator)
    assert formula is not None
    cost = formula(Call(operator, arguments, {}, out))
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == expected


def _cost(operator: str, run: Callable[[], object]) -> Cost:
    with CountingMode() as counted:
        run()
    (cost,) = [record.cost for record in counted.records if record.name == f"aten::{operator}"]
    assert cost is not None
    return cost


def test_half_precision_multiplies_in_half_and_adds_the_bias_in_single() -> None:
    half = torch.bfloat16
    cost = _cost("addmm", lambda: F.linear(x(8, 16, dtype=half), x(32, 16, dtype=half), x(32, dtype=half)))
    assert cost.flops == {"bf16": 2 * 8 * 32 * 16, "fp32": 8 * 32}


def test_double_precision_counts_as_double() -> None:
    double = torch.float64
    assert _cost("mm", lambda: x(3, 5, dtype=double) @ x(5, 7, dtype=double)).flops == {"fp64": 2 * 3 * 7 * 5}
    assert _cost("exp", lambda: x(3, dtype=double).exp()).flops == {"fp64": 3}


@pytest.mark.parametrize("window", ["bartlett", "blackman", "hamming", "hann", "kaiser"])
def test_a_spectrogram_has_a_cost_whatever_its_window(window: str) -> None:
    with CountingMode() as counted:
        weights = getattr(torch, f"{window}_window")(400)
        torch.stft(torch.randn(1600), 400, 160, window=weights, return_complex=True)
    assert not [record.name for record in counted.records if record.cost is None]
    assert next(r.cost.write_bytes for r in counted.records if r.cost and r.name.endswith("_window")) == 1600


def test_forward_mode_derivatives_have_costs() -> None:
    """The primal, the tangent of the input, and the work for the weight's zero tangent: all operators are counted."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with CountingMode() as counted:
        torch.func.jvp(layer, (x,), (x,))
    assert any(record.name == "prims::add" for record in counted.records)
    assert not [record.name for record in counted.records if record.cost is None]


def test_causal_keys_and_values_in_one_memory_are_read_once() -> None:
    """Costs are those of attention whose values are a part of the keys. Only positions that the queries see count."""
    both = torch.randn(1, 2, 16, 8)
    with CountingMode() as counted:
        F.scaled_dot_product_attention(torch.randn(1, 2, 4, 8), both, both, is_causal=True)
    cost = next(r.cost for r in counted.records if "scaled_dot_product" in r.name)
    assert cost is not None
    assert cost.read_bytes == 4 * (2 * 4 * 8 + 2 * 4 * 8)


def test_an_expanded_causal_query_sees_only_keys_up_to_its_own_position() -> None:
    # 4 queries, 10 keys: pairs 1 + 2 + 3 + 4, and the last six keys and values are never read.
    q, k, v = meta(1, 1, 4, 8), meta(1, 1, 10, 8), meta(1, 1, 10, 8)
    cost = _cost(
        "_scaled_dot_product_flash_attention",
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
    )
    assert cost.flops["bf16"] == 2 * (1 + 2 + 3 + 4) * (8 + 8)
    assert cost.read_bytes == (4 + 4 + 4) * 8 * 2


@pytest.mark.parametrize("run", [lambda: F.relu(x(0, 6)), lambda: x(0, 5) @ x(5, 7), lambda: x(3, 0) @ x(0, 7)])
def test_empty_tensors_cost_no_flops(run: Callable[[], Tensor]) -> None:
    with CountingMode() as counted:
        out = run()
    cost = counted.records[-1].cost
    assert cost is not None
    assert cost.total_flops == 0
    assert cost.write_bytes == out.numel() * 4


def test_without_results_no_operand_is_read() -> None:
    """An expert to which no token is sent does not read its weights. `nonzero` reads all elements to find none."""
    rows, weight, pixels, kernel = x(0, 8), x(8, 16), x(0, 3, 9, 9), x(4, 3, 3, 3)
    with CountingMode() as counted:
        rows @ weight
        F.linear(rows, weight.T, x(16))
        F.conv2d(pixels, kernel)
        aten.convolution_backward(
            x(0, 4, 7, 7), pixels, kernel, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        torch.zeros(8).nonzero()
    costs = {record.name: record.cost for record in counted.records}
    assert costs["aten::mm"] == costs["aten::addmm"] == costs["aten::convolution"] == Cost(0, 0, {})
    backward, nonzero = costs["aten::convolution_backward"], costs["aten::nonzero"]
    assert backward is not None
    assert nonzero is not None
    assert (backward.read_bytes, backward.write_bytes) == (0, (kernel.numel() + 4) * 4)
    assert nonzero.read_bytes == 8 * 4
