"""The Triton kernel of y = activation(conv2d(x, weight) + bias + residual) for depthwise convolutions.

A depthwise convolution has no matrix product: each pixel of the result is a weighted sum of the KH * KW pixels of its
window, in the same channel. If each tap read its pixel from memory, the caches would deliver each pixel KH * KW times.
So each thread computes a run of neighbouring pixels of a line. For each line of the window, the thread reads a pixel
once, and adds the pixel to all sums whose windows contain it. A program computes runs in adjacent lines, so that lines
in several windows are read from the L1 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.activations import activated

SIZES = ("rows", "height", "width", "lines", "pixels", "w_channel", "w_line", "w_pixel")
"""Arguments that Triton does not specialize: new values reuse the compiled kernel."""


@triton.jit(do_not_specialize=SIZES)
def conv_act_depthwise(
    x, weight, y, residual, bias,  # x (N, H, W, C); weight (C, KH, KW), strided; y, residual (N, OH, OW, C); bias (C,)
    rows, units, height, width, lines, pixels, w_channel, w_line, w_pixel,  # rows: N * OH; lines, pixels: OH, OW
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr, FASTEST: tl.constexpr,
):  # fmt: skip
    """Compute a run of RUN pixels in each of ROWS lines, for COLUMNS of the `units` * UNIT channels. FASTEST: the
    weights are stored in the order (KH, KW, C).
    """
    channels = units * UNIT  # a multiple of UNIT, so that loads are wide
    runs = tl.cdiv(pixels, RUN)
    row = (tl.program_id(0) // runs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % runs * RUN
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = (channel < channels)[None, :]
    line = (row % lines).to(tl.int32)
    image = row // lines
    at_line, at_pixel = line * STRIDE_H - PADDING_H, first * STRIDE_W - PADDING_W
    source = x + image * height * width * channels
    totals = ()
    for _ in tl.static_range(RUN):
        totals = totals + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for down in range(KERNEL_HEIGHT):
        taps = ()
        for across in tl.static_range(KERNEL_WIDTH):
            if FASTEST:
                place = (down * KERNEL_WIDTH + across) * channels + channel[None, :]
            else:
                place = down * w_line + across * w_pixel + channel[None, :] * w_channel
            taps = taps + (tl.load(weight + place, mask=known, other=0.0).to(tl.float32),)
        read = at_line + down * DILATION_H
        exists = (row < rows) & (read >= 0) & (read < height)
        begin = source + read.to(tl.int64) * width * channels
        for across in tl.static_range((RUN - 1) * STRIDE_W + (KERNEL_WIDTH - 1) * DILATION_W + 1):
            pixel = at_pixel + across
            inside = (exists & (pixel >= 0) & (pixel < width))[:, None] & known
            place = (begin + pixel * channels)[:, None] + channel[None, :]
            values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            totals = _added(totals, values, taps, across, RUN, STRIDE_W, DILATION_W, KERNEL_WIDTH)
    target = (row * pixels + first) * channels
    for each in tl.static_range(RUN):
        total = totals[each]
        inside = ((row < rows) & (first + each < pixels))[:, None] & known
        place = (target + each * channels)[:, None] + channel[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel[None, :], mask=known, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + place, activated(total, ACTIVATION, True).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _added(
    totals, values, taps, PLACE: tl.constexpr,
    RUN: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """For each output whose window has a tap at this pixel, add the pixel times the tap's weight to the output's sum.
    PLACE: the pixel's distance from the first pixel of the first window.
    """
    summed = ()
    for each in tl.static_range(RUN):
        if (
            PLACE - each * STRIDE >= 0
            and PLACE - each * STRIDE < WIDTH * DILATION
            and (PLACE - each * STRIDE) % DILATION == 0
        ):
            summed = summed + (totals[each] + values * taps[(PLACE - each * STRIDE) // DILATION],)
        else:
            summed = summed + (totals[each],)
    return summed
