"""Convert luma and chroma to red, green and blue, and back.

With the weights Kr and Kb of a matrix, and Y in 0..1, Cb and Cr in -0.5..0.5:

    R = Y + 2 (1 - Kr) Cr        B = Y + 2 (1 - Kb) Cb        G = (Y - Kr R - Kb B) / (1 - Kr - Kb)

Sources: ITU-R BT.601-7, BT.709-6, BT.2020-2 (non-constant luminance). ITU-T H.273, table 4, defines the
numbers that stand for matrices in files.
Limited range has Y in 16..235 and chroma in 16..240 for 8 bits; for more bits these limits are multiplied by
2^(bits-8).

A chroma sample applies to all pixels that it covers. When RGB is converted to chroma, a chroma sample is the mean
over the pixels that it covers. Colours are converted by this formula, not by swscale. swscale is off by up to 3 of 255
on its fast paths, and (version 9.5) leaves the last columns of odd widths unwritten when it converts 4:2:0 to planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS = {  # Kr, Kb
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "fcc": (0.30, 0.11),
    "smpte240m": (0.212, 0.087),
}
MATRICES = {1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020"}
"""H.273's matrix_coefficients. Number 2 means unspecified. The numbers that are missing here stand for RGB, or for
conversions other than by these weights.
"""
CODES = {"bt709": 1, "fcc": 4, "bt601": 6, "smpte240m": 7, "bt2020": 9}


@dataclass(frozen=True)
class Colours:
    """How the samples of a video encode colours.

    Attributes:
        matrix: bt601, bt709, bt2020, fcc or smpte240m.
        full_range: True if black is 0 and white 255 (for 8 bits); False if black is 16 and white 235.
        assumed: properties that the file does not state: "matrix", "range" or both.
    """

    matrix: str
    full_range: bool
    assumed: tuple[str, ...] = ()


def usual_matrix(height: int, width: int) -> str:
    """The matrix to assume if a video does not state one, as players do: BT.709 if the width is at least 1280 or the
    height is above 576, otherwise BT.601.
    """
    return "bt709" if width >= 1280 or height > 576 else "bt601"


def yuv_to_rgb(y: Tensor, u: Tensor, v: Tensor, colours: Colours, bits: int, dtype: torch.dtype) -> Tensor:
    """Convert planes of luma and chroma to RGB.

    Args:
        y: (H, W), unsigned integers of `bits` bits in any integer dtype.
        u, v: planes of Cb and Cr, (H', W'). H' is H, or a half or a quarter of H, rounded up; W' is derived from W in
            the same way.
        dtype: dtype of the result; uint8 values are rounded; floating values are in 0..1 and keep the precision of
            `bits`.

    Returns: (3, H, W).
    """
    height, width = y.shape
    down, across = pixels_a_sample(height, u.shape[0]), pixels_a_sample(width, u.shape[1])
    red_cr, green_cr, green_cb, blue_cb = chroma_factors(colours.matrix)
    white = 255.0 if dtype == torch.uint8 else 1.0
    black, luma_scale, chroma_scale = extents(colours.full_range, bits)
    if height % down:
        u, v, down = u.repeat_interleave(down, 0)[:height], v.repeat_interleave(down, 0)[:height], 1
    if across > 1:  # only columns are repeated; `torch.add` broadcasts rows, so that u and v stay small
        u, v = (each.repeat_interleave(across, 1)[:, :width] for each in (u, v))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    luma = y.to(exact).sub_(black).mul_(white / luma_scale).view(-1, down, width)
    cb = u.to(exact).sub_(1 << (bits - 1)).mul_(white / chroma_scale)[:, None]
    cr = v.to(exact).sub_(1 << (bits - 1)).mul_(white / chroma_scale)[:, None]
    rgb = torch.empty(3, height, width, dtype=dtype, device=y.device)
    values = torch.empty_like(luma)
    differences = (cr * red_cr, cr * green_cr + cb * green_cb, cb * blue_cb)
    for plane, difference in zip(rgb, differences, strict=True):
        torch.add(luma, difference, out=values)  # (H / down, down, W)
        if dtype == torch.uint8:
            values.round_()
        plane.copy_(values.clamp_(0, white).view(height, width))
    return rgb


def rgb_to_yuv(
    rgb: Tensor, colours: Colours, bits: int, down: int, across: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB to planes of luma and chroma.

    Args:
        rgb: (3, H, W) of a floating-point dtype, in 0..1.
        bits: bits of each sample of the result.
        down, across: pixels per sample of chroma; they divide H and W.

    Returns: luma (H, W), Cb (H / down, W / across), Cr (H / down, W / across).
    """
    kr, kb = WEIGHTS[colours.matrix]
    red, green, blue = rgb
    luma = kr * red + (1 - kr - kb) * green + kb * blue
    chroma = torch.stack([(blue - luma) / (2 * (1 - kb)), (red - luma) / (2 * (1 - kr))])
    chroma = F.avg_pool2d(chroma, (down, across))
    black, luma_scale, chroma_scale = extents(colours.full_range, bits)
    highest = (1 << bits) - 1
    y = (luma * luma_scale + black).round_().clamp_(0, highest).to(dtype)
    u, v = (chroma * chroma_scale + (1 << (bits - 1))).round_().clamp_(0, highest).to(dtype)
    return y, u, v


def chroma_factors(matrix: str) -> tuple[float, float, float, float]:
    """The factors of Cr in red, of Cr in green, of Cb in green and of Cb in blue; the factor of Y is 1 in all three."""
    kr, kb = WEIGHTS[matrix]
    kg = 1 - kr - kb
    return 2 * (1 - kr), -2 * (1 - kr) * kr / kg, -2 * (1 - kb) * kb / kg, 2 * (1 - kb)


def extents(full: bool, bits: int) -> tuple[float, float, float]:
    """Return the luma of black, the luma of white minus that of black, and the range of chroma. Samples have `bits`
    bits, in full or limited range."""
    if full:
        return 0.0, float((1 << bits) - 1), float((1 << bits) - 1)
    unit = 2.0 ** (bits - 8)
    return 16 * unit, 219 * unit, 224 * unit


def pixels_a_sample(pixels: int, samples: int) -> int:
    """Number of pixels that one chroma sample covers, along a dimension with `pixels` pixels and `samples` samples."""
    return next(each for each in (1, 2, 4) if -(-pixels // each) == samples)
