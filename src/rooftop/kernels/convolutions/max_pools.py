"""Max pooling of images for inference: y = the largest value in each window, and not where it was.

Bound by memory: the image is read once, a result is written for each window. PyTorch's operator also writes the place
of each maximum, 8 bytes beside the 2 of a value in half precision, which only backward needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.convolutions.tables import MAX_POOL
from rooftop.kernels.operands.checks import check_tensors, two_integers
from rooftop.kernels.operands.dtypes import FLOATS
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.references import without_kernels
from rooftop.launch.operators import in_pytorch, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

Pair = int | Sequence[int]

# ---- reference -------------------------------------------------------------------------------------------------


def max_pool2d_reference(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """(N, C, OH, OW) in plain PyTorch, in the memory format of x."""
    y = functional.max_pool2d(x, list(kernel), list(stride), list(padding), list(dilation))
    return y.contiguous(memory_format=_format_of(x))


# ---- limits -----------------------------------------------------------------------------------------------------


MOST_TAPS = 25  # of a window: the kernel has a load for each

# ---- implementation --------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    on_cpu = without_kernels(x.device)
    last = x.is_contiguous(memory_format=torch.channels_last)
    if on_cpu or not last or x.dtype == torch.float64 or math.prod(kernel) > MOST_TAPS or x.numel() == 0:
        return max_pool2d_reference(x, kernel, stride, padding, dilation)
    require_triton()
    from rooftop.kernels.convolutions.triton_kernels.max_pools import max_pool

    batch, channels, height, width = x.shape
    lines, pixels = _sizes(x, kernel, stride, padding, dilation)
    y = x.new_empty((batch, lines, pixels, channels))
    config, block = MAX_POOL, min(MAX_POOL.channels, power_of_two(channels))
    grid = (batch * -(-lines // config.lines) * -(-pixels // config.pixels), -(-channels // block))
    launch(
        max_pool, grid, x.device, x, y, height, width, lines, pixels, channels,
        KERNEL_H=kernel[0], KERNEL_W=kernel[1], STRIDE_H=stride[0], STRIDE_W=stride[1],
        PADDING_H=padding[0], PADDING_W=padding[1], DILATION_H=dilation[0], DILATION_W=dilation[1],
        HEIGHT=config.lines, WIDTH=config.pixels, CHANNELS=block, num_warps=config.warps,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2).contiguous(memory_format=_format_of(x))


def _format_of(x: Tensor) -> torch.memory_format:
    """Of the result: channels last if x is and could be another."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _sizes(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """(OH, OW)."""
    each = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in each]


# ---- registration ----------------------------------------------------------------------------------------------


@operator("max_pool2d")
def _max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    return _forward(x, kernel, stride, padding, dilation)


@torch.library.register_fake("rooftop::max_pool2d")
def _(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    shape = (*x.shape[:2], *_sizes(x, kernel, stride, padding, dilation))
    return x.new_empty(shape).to(memory_format=_format_of(x))


in_pytorch("max_pool2d", max_pool2d_reference)


@cost_of("rooftop::max_pool2d")
def _cost(call: Call) -> Cost:
    """A comparison for each element of each window. Reads what windows touch."""
    from rooftop.cost.formulas.windows import touched_bytes

    x, y, kernel = call["x"], call.out, call["kernel"]
    read = touched_bytes(x, y.shape[2:], kernel, call["stride"], call["padding"], call["dilation"])
    return Cost(read, distinct_bytes([y]), {precision_of(x.dtype): y.numel() * math.prod(kernel)})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def max_pool2d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1
) -> Tensor:
    """The largest value in each window, for inference; arguments as of `torch.nn.functional.max_pool2d`.

    By a kernel of its own where the input is channels last, as `.to(memory_format=torch.channels_last)` makes it, and a
    window has 25 elements or fewer; otherwise by PyTorch.

    Args:
        input: (N, C, H, W), bfloat16, float16, float32 or float64.
        kernel_size, stride, padding, dilation: a number, or one for lines and one for pixels of a line; a stride of
            None is the kernel's size; padding, of -inf, is at most half of the kernel's size.

    Returns:
        (N, C, OH, OW), channels last if input is; NaN where a window has one.

    Raises:
        TypeError: no dense tensor, a dtype that is not floating point, or sizes that are no integers.
        ValueError: shapes or sizes that do not fit.
        NotImplementedError: an input that needs a gradient, or forward-mode differentiation.
    """
    check_tensors("max_pool2d", FLOATS, input=input)
    kernel = list(two_integers("max_pool2d", "kernel_size", kernel_size, 1))
    padded = list(two_integers("max_pool2d", "padding", padding, 0))
    apart = list(two_integers("max_pool2d", "dilation", dilation, 1))
    steps = kernel if stride is None else list(two_integers("max_pool2d", "stride", stride, 1))
    if input.dim() != 4 or 0 in input.shape[1:]:
        raise ValueError(f"max_pool2d: expected input (N, C, H, W) with channels and pixels, got {tuple(input.shape)}")
    if any(2 * p > k for p, k in zip(padded, kernel, strict=True)):
        raise ValueError(f"max_pool2d: padding must be at most half of kernel_size {kernel}, got {padded}")
    if min(_sizes(input, kernel, steps, padded, apart)) < 1:
        raise ValueError(
            f"max_pool2d: the window does not fit into the input, {tuple(input.shape)} with kernel_size={kernel}, "
            f"padding={padded}, dilation={apart}: pad the input"
        )
    no_tangents("max_pool2d", input)
    if torch.is_grad_enabled() and input.requires_grad:
        raise NotImplementedError(
            "max_pool2d has no gradient: use torch.nn.functional.max_pool2d to train, or torch.no_grad()"
        )
    result: Tensor = _max_pool2d(input, kernel, steps, padded, apart)
    return result
