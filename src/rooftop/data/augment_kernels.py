"""Triton kernels for RandAugment's operations on batches of images; `device_augment.py` launches them.

In one launch, each image has one operation. Some operations map each pixel value to a new value. For these operations,
the first kernel writes a lookup table. The second kernel moves pixels, looks values up, and blends. The arithmetic is
Pillow's, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.scalars import round_half_even

# Codes of operations: their indices in `rand_augment.NAMES`
BRIGHTNESS, COLOR, CONTRAST, SHARPNESS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
POSTERIZE, SOLARIZE = tl.constexpr(10), tl.constexpr(11)
AUTO_CONTRAST, EQUALIZE = tl.constexpr(12), tl.constexpr(13)
# indices of entries in an encoded operation; entry 0 is the code, entry 1 the strength
FACTOR, MATRIX = tl.constexpr(2), tl.constexpr(3)


@triton.jit
def gray(red, green, blue):
    """Pillow's gray value of a colour; int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def blended(low, value, factor):
    """Compute low + factor * (value - low), clamped to 0..255 and truncated to an integer, as Pillow does."""
    mixed = low.to(tl.float32) + factor * (value - low).to(tl.float32)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def write_tables(
    images,  # (N, pixels, 3) uint8
    operations,  # (N, device_augment.ENTRIES) float64; `stride` elements from one image to the next
    tables,  # (N, 3, 256) uint8
    pixels, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the lookup table of one colour channel of one image: the new value of each value 0..255 under the image's
    operation. If the operation needs no table, each value maps to itself."""
    number, channel = tl.program_id(0), tl.program_id(1)
    image = images + number.to(tl.int64) * pixels * 3
    operation = operations + number * stride
    code = tl.load(operation).to(tl.int32)
    strength = tl.load(operation + 1)
    factor = tl.load(operation + FACTOR).to(tl.float32)
    level = tl.arange(0, 256)
    table = level
    if code == BRIGHTNESS:
        table = blended(tl.zeros((256,), tl.int32), level, factor)
    elif code == CONTRAST:
        total = tl.zeros((), tl.int64)
        for start in range(0, pixels, BLOCK):
            place = start + tl.arange(0, BLOCK)
            there = place < pixels
            red = tl.load(image + place * 3, mask=there, other=0).to(tl.int32)
            green = tl.load(image + place * 3 + 1, mask=there, other=0).to(tl.int32)
            blue = tl.load(image + place * 3 + 2, mask=there, other=0).to(tl.int32)
            total += tl.sum(tl.where(there, gray(red, green, blue), 0)).to(tl.int64)
        mean = ((2 * total + pixels) // (2 * pixels)).to(tl.int32)
        table = blended(mean + tl.zeros((256,), tl.int32), level, factor)
    elif code == POSTERIZE:
        bits = round_half_even((4.0 * tl.abs(strength)).to(tl.float32)).to(tl.int32)
        table = (level >> bits) << bits
    elif code == SOLARIZE:
        threshold = round_half_even((256.0 * (1.0 - tl.abs(strength))).to(tl.float32)).to(tl.int32)
        table = tl.where(level < threshold, level, 255 - level)
    elif (code == AUTO_CONTRAST) | (code == EQUALIZE):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, pixels, BLOCK):
            place = start + tl.arange(0, BLOCK)
            there = place < pixels
            value = tl.load(image + place * 3 + channel, mask=there, other=0).to(tl.int32)
            counts += tl.histogram(value, 256)
            beyond = tl.sum(1 - there.to(tl.int32))
            counts -= tl.where(level == 0, beyond, 0)  # pixels beyond the image were loaded as 0 and counted
        last = tl.max(tl.where(counts > 0, level, 0))
        if code == AUTO_CONTRAST:
            first = tl.min(tl.where(counts > 0, level, 255))
            if last > first:
                scale = 255.0 / (last - first).to(tl.float64)
                offset = -first.to(tl.float64) * scale
                stretched = (level.to(tl.float64) * scale + offset).to(tl.int32)
                table = tl.minimum(tl.maximum(stretched, 0), 255)
        else:
            step = (pixels - tl.sum(tl.where(level == last, counts, 0))) // 255
            if step > 0:
                table = tl.minimum((step // 2 + tl.cumsum(counts, 0) - counts) // step, 255)
    tl.store(tables + (number * 3 + channel) * 256 + level, table.to(tl.uint8))


@triton.jit
def near(image, x, y, width, there):
    """Sum each colour over the 3 x 3 neighbourhood of a pixel, in which the middle pixel counts five times. Returns
    red, green and blue, int32."""
    red, green, blue = x * 0, x * 0, x * 0
    for down in tl.static_range(-1, 2):
        for across in tl.static_range(-1, 2):
            weight = 5 if down == 0 and across == 0 else 1
            at = image + ((y + down) * width + x + across) * 3
            red += weight * tl.load(at, mask=there, other=0).to(tl.int32)
            green += weight * tl.load(at + 1, mask=there, other=0).to(tl.int32)
            blue += weight * tl.load(at + 2, mask=there, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def apply_operation(
    images,  # (N, height, width, 3) uint8
    operations,  # (N, device_augment.ENTRIES) float64; `stride` elements from one image to the next
    tables,  # (N, 3, 256) uint8
    out,  # (N, height, width, 3) uint8
    height, width, stride, fill_red, fill_green, fill_blue,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply an image's operation to BLOCK of its pixels."""
    number, pixels = tl.program_id(1), height * width
    image = images + number.to(tl.int64) * pixels * 3
    operation = operations + number * stride
    code = tl.load(operation).to(tl.int32)
    factor = tl.load(operation + FACTOR).to(tl.float32)
    matrix = operation + MATRIX
    a, b, c = tl.load(matrix), tl.load(matrix + 1), tl.load(matrix + 2)
    d, e, f = tl.load(matrix + 3), tl.load(matrix + 4), tl.load(matrix + 5)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < pixels
    x, y = place % width, place // width
    # the source position of the pixel's centre, in 16.16 fixed point as in Pillow
    from_x = (fixed(a) * x + fixed(b) * y + fixed(c + a * 0.5 + b * 0.5)) >> 16
    from_y = (fixed(d) * x + fixed(e) * y + fixed(f + d * 0.5 + e * 0.5)) >> 16
    inside = there & (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    at = image + (from_y * width + from_x) * 3
    table = tables + number * 768
    red = tl.load(table + tl.load(at, mask=inside, other=0).to(tl.int32)).to(tl.int32)
    green = tl.load(table + 256 + tl.load(at + 1, mask=inside, other=0).to(tl.int32)).to(tl.int32)
    blue = tl.load(table + 512 + tl.load(at + 2, mask=inside, other=0).to(tl.int32)).to(tl.int32)
    if code == COLOR:
        low = gray(red, green, blue)
        red, green, blue = blended(low, red, factor), blended(low, green, factor), blended(low, blue, factor)
    if code == SHARPNESS:
        within = there & (x > 0) & (x < width - 1) & (y > 0) & (y < height - 1)  # pixels at the border stay unchanged
        low_red, low_green, low_blue = near(image, x, y, width, within)
        red = tl.where(within, blended((2 * low_red + 13) // 26, red, factor), red)
        green = tl.where(within, blended((2 * low_green + 13) // 26, green, factor), green)
        blue = tl.where(within, blended((2 * low_blue + 13) // 26, blue, factor), blue)
    to = out + number.to(tl.int64) * pixels * 3 + place * 3
    tl.store(to, tl.where(inside, red, fill_red).to(tl.uint8), mask=there)
    tl.store(to + 1, tl.where(inside, green, fill_green).to(tl.uint8), mask=there)
    tl.store(to + 2, tl.where(inside, blue, fill_blue).to(tl.uint8), mask=there)


@triton.jit
def fixed(value):
    """A float64 number in 16.16 fixed point, rounded as Pillow rounds."""
    return tl.floor(value * 65536.0 + 0.5).to(tl.int32)
