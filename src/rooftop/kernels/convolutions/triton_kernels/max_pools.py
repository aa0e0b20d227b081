"""The Triton kernel of max pooling, channels last; `../max_pools.py` has the operator."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def max_pool(
    image, result,  # shapes: (N, H, W, C), (N, OH, OW, C)
    height, width, lines, pixels, channels,  # H, W, OH, OW, C
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute HEIGHT lines of WIDTH pixels and CHANNELS channels of a result. Neighbouring windows overlap; elements in
    several windows are read from the L1 cache.
    """
    down, across = tl.cdiv(lines, HEIGHT), tl.cdiv(pixels, WIDTH)
    tile = tl.program_id(0)
    n = (tile // (down * across)).to(tl.int64)
    place = tl.arange(0, HEIGHT * WIDTH)
    line = tile // across % down * HEIGHT + place // WIDTH
    pixel = tile % across * WIDTH + place % WIDTH
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    real = (line < lines) & (pixel < pixels)
    largest = tl.full((HEIGHT * WIDTH, CHANNELS), float("-inf"), tl.float32)
    for tap in tl.static_range(KERNEL_H * KERNEL_W):
        y = line * STRIDE_H - PADDING_H + tap // KERNEL_W * DILATION_H
        x = pixel * STRIDE_W - PADDING_W + tap % KERNEL_W * DILATION_W
        inside = real & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        start = ((n * height + y) * width + x)[:, None] * channels
        values = tl.load(image + start + channel, mask=inside[:, None] & (channel < channels), other=float("-inf"))
        largest = tl.maximum(largest, values.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    start = ((n * lines + line) * pixels + pixel)[:, None] * channels
    tl.store(result + start + channel, largest.to(result.dtype.element_ty), mask=real[:, None] & (channel < channels))
