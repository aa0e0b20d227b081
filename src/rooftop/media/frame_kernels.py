"""Triton kernels that convert luma and chroma to red, green and blue; `surfaces.py` launches them.

A kernel reads the planes once and writes the tensor once. In between, the kernel applies the colour matrix, resizing,
and rounding or normalization. The kernel writes with strides that rotate the result upright. A sample of chroma is at
`(row // DOWN) * chroma_row + (column // ACROSS) * chroma_step`, so the same code reads separate planes and pairs
(NV12).

A launch converts up to eight pictures of one geometry, each with its own pointers. So a thread that reads a video
launches a kernel once every eight frames. Each frame has its own memory, so a kept frame does not keep its neighbours'
memory alive.

`colours.py` defines the conversion of colours, and `resizing.py` the bilinear weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.scalars import round_half_even


@triton.jit
def one_of(number, a0, a1, a2, a3, a4, a5, a6, a7):
    """Select the pointer with the index `number` from a0 to a7."""
    found = a0
    if number == 1:
        found = a1
    if number == 2:
        found = a2
    if number == 3:
        found = a3
    if number == 4:
        found = a4
    if number == 5:
        found = a5
    if number == 6:
        found = a6
    if number == 7:
        found = a7
    return found


@triton.jit
def colours_at(
    y, u, v, row, column, there, y_row, chroma_row, chroma_step,
    black, middle, luma, red_cr, green_cb, green_cr, blue_cb, white,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Convert luma and chroma of pixels to (red, green, blue), in 0..white."""
    at = row // DOWN * chroma_row + column // ACROSS * chroma_step
    light = (tl.load(y + row * y_row + column, mask=there, other=0).to(tl.float32) - black) * luma
    cb = tl.load(u + at, mask=there, other=0).to(tl.float32) - middle
    cr = tl.load(v + at, mask=there, other=0).to(tl.float32) - middle
    red = tl.minimum(tl.maximum(light + cr * red_cr, 0.0), white)
    green = tl.minimum(tl.maximum(light + (cr * green_cr + cb * green_cb), 0.0), white)
    blue = tl.minimum(tl.maximum(light + cb * blue_cb, 0.0), white)
    return red, green, blue


@triton.jit
def store_colours(
    out, red, green, blue, there, plane, red_gain, green_gain, blue_gain, red_shift, green_shift, blue_shift,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Store red, green and blue: rounded to integers if ROUND, otherwise as gain * value + shift."""
    if ROUND:
        red, green, blue = round_half_even(red), round_half_even(green), round_half_even(blue)
    else:
        red = red * red_gain + red_shift
        green = green * green_gain + green_shift
        blue = blue * blue_gain + blue_shift
    kind = out.dtype.element_ty
    tl.store(out, red.to(kind), mask=there)
    tl.store(out + plane, green.to(kind), mask=there)
    tl.store(out + 2 * plane, blue.to(kind), mask=there)


@triton.jit
def frame_to_rgb(
    y0, y1, y2, y3, y4, y5, y6, y7,  # luma, (H, W) each
    u0, u1, u2, u3, u4, u5, u6, u7,  # Cb, with one sample for DOWN x ACROSS pixels
    v0, v1, v2, v3, v4, v5, v6, v7,  # Cr, as Cb
    out0, out1, out2, out3, out4, out5, out6, out7,  # (3, H, W), or (3, W, H) after a quarter turn
    height, width, y_row, chroma_row, chroma_step, origin, plane, out_row, out_column,
    black, middle, luma, red_cr, green_cb, green_cr, blue_cb, white,
    red_gain, green_gain, blue_gain, red_shift, green_shift, blue_shift,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert a tile of ROWS x COLUMNS pixels of one picture to red, green and blue, without resizing."""
    number = tl.program_id(2)
    y = one_of(number, y0, y1, y2, y3, y4, y5, y6, y7)
    u = one_of(number, u0, u1, u2, u3, u4, u5, u6, u7)
    v = one_of(number, v0, v1, v2, v3, v4, v5, v6, v7)
    out = one_of(number, out0, out1, out2, out3, out4, out5, out6, out7)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < height) & (column < width)
    red, green, blue = colours_at(
        y, u, v, row, column, there, y_row, chroma_row, chroma_step,
        black, middle, luma, red_cr, green_cb, green_cr, blue_cb, white, DOWN, ACROSS,
    )  # fmt: skip
    store_colours(
        out + origin + row * out_row + column * out_column, red, green, blue, there, plane,
        red_gain, green_gain, blue_gain, red_shift, green_shift, blue_shift, ROUND,
    )  # fmt: skip


@triton.jit
def weight_of(position, centre, narrowing):
    """The bilinear weight of the video's row (or column) `position` in a row (or column) of the result whose centre is
    at `centre`, in rows (or columns) of the video."""
    return tl.maximum(1.0 - tl.abs((position.to(tl.float32) - centre + 0.5) * narrowing), 0.0)


@triton.jit
def frame_to_resized_rgb(
    y0, y1, y2, y3, y4, y5, y6, y7,  # luma, (H, W) each
    u0, u1, u2, u3, u4, u5, u6, u7,  # Cb, with one sample for DOWN x ACROSS pixels
    v0, v1, v2, v3, v4, v5, v6, v7,  # Cr, as Cb
    out0, out1, out2, out3, out4, out5, out6, out7,  # (3, out_height, out_width); a quarter turn swaps the last two
    height, width, out_height, out_width, down_by, across_by, rows, columns,
    y_row, chroma_row, chroma_step, origin, plane, out_row, out_column,
    black, middle, luma, red_cr, green_cb, green_cr, blue_cb, white,
    red_gain, green_gain, blue_gain, red_shift, green_shift, blue_shift,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x COLUMNS pixels of the result, each a weighted mean of at most `rows` x `columns` pixels of the
    video.

    down_by, across_by: rows and columns of the video per row and column of the result.
    """
    number = tl.program_id(2)
    y = one_of(number, y0, y1, y2, y3, y4, y5, y6, y7)
    u = one_of(number, u0, u1, u2, u3, u4, u5, u6, u7)
    v = one_of(number, v0, v1, v2, v3, v4, v5, v6, v7)
    out = one_of(number, out0, out1, out2, out3, out4, out5, out6, out7)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < out_height) & (column < out_width)
    tall, wide = tl.maximum(down_by, 1.0), tl.maximum(across_by, 1.0)
    middle_row = (row.to(tl.float32) + 0.5) * down_by
    middle_column = (column.to(tl.float32) + 0.5) * across_by
    top = tl.maximum((middle_row - tall + 0.5).to(tl.int32), 0)
    left = tl.maximum((middle_column - wide + 0.5).to(tl.int32), 0)
    bottom = tl.minimum((middle_row + tall + 0.5).to(tl.int32), height)
    right = tl.minimum((middle_column + wide + 0.5).to(tl.int32), width)
    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green = tl.zeros((ROWS, COLUMNS), tl.float32)
    blue = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(rows):
        here = top + i
        row_weight = tl.where(here < bottom, weight_of(here, middle_row, 1.0 / tall), 0.0)
        for j in range(columns):
            across = left + j
            weight = tl.where(across < right, weight_of(across, middle_column, 1.0 / wide), 0.0) * row_weight
            r, g, b = colours_at(
                y, u, v, here, across, there & (across < right) & (here < bottom), y_row, chroma_row, chroma_step,
                black, middle, luma, red_cr, green_cb, green_cr, blue_cb, white, DOWN, ACROSS,
            )  # fmt: skip
            red += weight * r
            green += weight * g
            blue += weight * b
            total += weight
    store_colours(
        out + origin + row * out_row + column * out_column, red / total, green / total, blue / total, there, plane,
        red_gain, green_gain, blue_gain, red_shift, green_shift, blue_shift, ROUND,
    )  # fmt: skip
