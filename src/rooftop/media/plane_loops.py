"""Convert luma and chroma in the host's memory to RGB, in loops that Numba compiles: one pass over the frame.

Each row of chroma is converted once to its contributions to red, green and blue, which are repeated for the pixels that
the row covers. SIMD instructions then add the rows of luma. The results equal those of `colours.yuv_to_rgb` bit by bit.
If a size is requested, rows are added to the result as they are computed, so the whole frame is never in memory as RGB.

The loops are compiled once for each pair of dtypes of samples and result. The compiled code is stored on disk if
possible, so that later processes load it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rooftop.launch.numba_loops import in_threads, kept_loop, run_part
from rooftop.media.colours import Colours, chroma_factors, extents, pixels_a_sample
from rooftop.media.forms import Normalization
from rooftop.media.resizing import taps

_MOST_THREADS = 4  # more threads would compete with the decoder
_LEAST_PER_THREAD = 1 << 18  # pixels


@dataclass(frozen=True)
class Plane:
    """A plane of samples in host memory, stored row by row.

    Attributes:
        memory: a one-dimensional array of uint8 or uint16.
        step: distance between the starts of two rows, in samples.
        height, width: size of the plane.
    """

    memory: np.ndarray
    step: int
    height: int
    width: int


def planes_to_rgb(
    y: Plane, u: Plane, v: Plane, colours: Colours, bits: int, dtype: torch.dtype,
    size: tuple[int, int] | None = None, normalization: Normalization | None = None,
) -> Tensor:  # fmt: skip
    """Convert planes of luma and chroma to RGB.

    Args:
        y: H x W.
        u, v: Cb and Cr, H' x W'. H' is H, or a half or a quarter of H, rounded up; W' is derived from W in the same
            way.
        bits: bits of each sample.
        dtype: uint8 (rounded), or float32 in 0..1.
        size: (h, w) of the result; None is (H, W). Resizing is bilinear with antialiasing, as in
            `torch.nn.functional.interpolate` with `antialias=True`.
        normalization: (mean, std) of red, green and blue in 0..1, for float32.

    Returns: (3, h, w).

    Raises:
        ValueError: a plane's memory ends before its last row.
    """
    for plane in (y, u, v):  # the loops do not check whether indices are in bounds
        if plane.memory.size < (plane.height - 1) * plane.step + plane.width:
            raise ValueError(
                f"a plane of {plane.width} x {plane.height} has memory for only {plane.memory.size} samples"
            )
    down, across = pixels_a_sample(y.height, u.height), pixels_a_sample(y.width, u.width)
    white = 255.0 if dtype == torch.uint8 else 1.0
    black, luma_scale, chroma_scale = extents(colours.full_range, bits)
    factors = chroma_factors(colours.matrix)
    numbers = (black, white / luma_scale, float(1 << (bits - 1)), white / chroma_scale, *factors, white)
    mean, std = normalization or ((0.0,) * 3, (1.0,) * 3)
    gains = [[1 / b, -a / b] for a, b in zip(mean, std, strict=True)]
    rgb = torch.empty(3, *(size or (y.height, y.width)), dtype=dtype, device="cpu")
    memory = [part for each in (y, u, v) for part in (each.memory, each.step)]
    given = [*memory, rgb.flatten().numpy(), y.height, y.width, down, across]
    given += [np.array(numbers, np.float32), np.array(gains, np.float32)]
    threads = min(_MOST_THREADS, y.height * y.width // _LEAST_PER_THREAD)
    given.append(dtype == torch.uint8)
    if size is None or size == (y.height, y.width):
        in_threads(run_part(_whole, given), u.height, threads)
    else:
        for pixels, results in ((y.height, size[0]), (y.width, size[1])):
            first, end, weights = taps(pixels, results)
            given += [first, end, weights.astype(np.float32)]
        in_threads(run_part(_resized, given), size[0], threads)
    return rgb


# ---- loops -------------------------------------------------------------------------------------------------------


@kept_loop
def _spread(samples: np.ndarray, across: int, found: np.ndarray) -> None:
    """Repeat each sample for the `across` pixels of a row that it covers. This loop only copies, because a loop that
    also computes takes twice as long."""
    width = len(found)
    if across == 2:
        for j in range(width // 2):
            found[2 * j] = samples[j]
            found[2 * j + 1] = samples[j]
        if width % 2:
            found[width - 1] = samples[width // 2]
    else:
        for j in range(width):
            found[j] = samples[j // across]


@kept_loop
def _differences(
    u: np.ndarray, v: np.ndarray, across: int, numbers: np.ndarray, found: np.ndarray, room: np.ndarray
) -> None:
    """Compute the contributions of chroma to red, green and blue for a row's pixels, (3, width)."""
    half, scale, red, green_v, green_u, blue = numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]
    samples = len(u)
    some = found[0] if across == 1 else room[:samples]
    for j in range(samples):
        some[j] = (np.float32(v[j]) - half) * scale * red
    if across > 1:
        _spread(some, across, found[0])
    some = found[1] if across == 1 else room[:samples]
    for j in range(samples):
        some[j] = (np.float32(v[j]) - half) * scale * green_v + (np.float32(u[j]) - half) * scale * green_u
    if across > 1:
        _spread(some, across, found[1])
    some = found[2] if across == 1 else room[:samples]
    for j in range(samples):
        some[j] = (np.float32(u[j]) - half) * scale * blue
    if across > 1:
        _spread(some, across, found[2])


@kept_loop
def _luma(y: np.ndarray, numbers: np.ndarray, found: np.ndarray) -> None:
    black, scale = numbers[0], numbers[1]
    for j in range(len(y)):
        found[j] = (np.float32(y[j]) - black) * scale


@kept_loop
def _colour(luma: np.ndarray, difference: np.ndarray, white: np.float32, found: np.ndarray) -> None:
    """Write one colour (red, green or blue) of a row: luma plus the contribution of chroma, clamped to 0..white."""
    for j in range(len(luma)):
        value = luma[j] + difference[j]
        value = value if value < white else white
        found[j] = value if value > np.float32(0) else np.float32(0)


@kept_loop
def _add_to_two(
    luma: np.ndarray, difference: np.ndarray, white: np.float32, one: np.float32, into: np.ndarray, other: np.float32,
    into_other: np.ndarray,
) -> None:  # fmt: skip
    """Like `_colour`, but multiply the colour by the weights `one` and `other`, and add the products to the rows `into`
    and `into_other`."""
    for j in range(len(luma)):
        value = luma[j] + difference[j]
        value = value if value < white else white
        value = value if value > np.float32(0) else np.float32(0)
        into[j] += one * value
        into_other[j] += other * value


@kept_loop
def _store(row: np.ndarray, gain: np.float32, shift: np.float32, rounded: bool, into: np.ndarray) -> None:
    if rounded:
        for j in range(len(into)):
            into[j] = np.uint8(np.int32(np.rint(row[j])))
    else:
        for j in range(len(into)):
            into[j] = row[j] * gain + shift


@kept_loop
def _whole(
    first: int, last: int, y: np.ndarray, y_step: int, u: np.ndarray, u_step: int, v: np.ndarray, v_step: int,
    rgb: np.ndarray, height: int, width: int, down: int, across: int, numbers: np.ndarray, gains: np.ndarray,
    rounded: bool,
) -> None:  # fmt: skip
    """Convert the rows of chroma from `first` up to, but not including, `last`, and the rows of luma that they cover,
    without resizing."""
    samples = (width + across - 1) // across
    differences, luma, row = np.empty((3, width), np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for n in range(first, last):
        _differences(
            u[n * u_step : n * u_step + samples],
            v[n * v_step : n * v_step + samples],
            across,
            numbers,
            differences,
            row,
        )
        for i in range(n * down, min(n * down + down, height)):
            _luma(y[i * y_step : i * y_step + width], numbers, luma)
            for c in range(3):
                begin = (c * height + i) * width
                _colour(luma, differences[c], numbers[8], row)
                _store(row, gains[c, 0], gains[c, 1], rounded, rgb[begin : begin + width])


@kept_loop
def _resize_rows(
    row: np.ndarray, lefts: np.ndarray, counts: np.ndarray, weights: np.ndarray, found: np.ndarray
) -> None:
    """Resize a row of colours from (3, width) to (3, columns). Indices are unsigned, because signed indices would be
    checked for negative values."""
    red, green, blue = row[0], row[1], row[2]
    for x in range(len(counts)):
        r, g, b = np.float32(0), np.float32(0), np.float32(0)
        left, some = np.uint64(lefts[x]), weights[x]
        for k in range(counts[x]):
            weight, i = some[k], left + k
            r += red[i] * weight
            g += green[i] * weight
            b += blue[i] * weight
        found[0, x], found[1, x], found[2, x] = r, g, b


@kept_loop
def _resized(
    first: int, last: int, y: np.ndarray, y_step: int, u: np.ndarray, u_step: int, v: np.ndarray, v_step: int,
    rgb: np.ndarray, height: int, width: int, down: int, across: int, numbers: np.ndarray, gains: np.ndarray,
    rounded: bool, tops: np.ndarray, bottoms: np.ndarray, row_weights: np.ndarray,
    lefts: np.ndarray, rights: np.ndarray, column_weights: np.ndarray,
) -> None:  # fmt: skip
    """Compute the rows `first` to `last` - 1 of the resized result.

    Each needed row of the video is computed once, and added to all rows of the result to which it contributes. A few
    rows of the result are incomplete at a time. Complete rows are resized along the row.
    """
    samples = (width + across - 1) // across
    rows, columns = len(tops), len(lefts)
    differences, luma, row = np.empty((3, width), np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    most = 1
    for r in range(first, last):
        ahead = r
        while ahead < last and tops[ahead] < bottoms[r]:
            ahead += 1
        most = max(most, ahead - r)
    opened = np.zeros((most, 3, width), np.float32)
    resized = np.empty((3, columns), np.float32)
    counts = (rights - lefts).astype(np.uint64)
    oldest, chroma = first, -1
    for i in range(tops[first], bottoms[last - 1]):
        if i // down != chroma:
            chroma = i // down
            cb, cr = u[chroma * u_step :], v[chroma * v_step :]
            _differences(cb[:samples], cr[:samples], across, numbers, differences, row)
        _luma(y[i * y_step : i * y_step + width], numbers, luma)
        newest = oldest  # rows `oldest` to `newest - 1` of the result are incomplete
        while newest < last and tops[newest] <= i:
            newest += 1
        for c in range(3):
            if newest - oldest == 2:  # the usual case when pictures shrink: add to both rows in one pass
                _add_to_two(
                    luma, differences[c], numbers[8],
                    row_weights[oldest, i - tops[oldest]], opened[oldest % most, c],
                    row_weights[oldest + 1, i - tops[oldest + 1]], opened[(oldest + 1) % most, c],
                )  # fmt: skip
                continue
            _colour(luma, differences[c], numbers[8], row)
            for r in range(oldest, newest):
                weight, into = row_weights[r, i - tops[r]], opened[r % most, c]
                for j in range(width):
                    into[j] += weight * row[j]
        while oldest < last and bottoms[oldest] == i + 1:
            done = opened[oldest % most]
            _resize_rows(done, lefts, counts, column_weights, resized)
            for c in range(3):
                begin = (c * rows + oldest) * columns
                _store(resized[c], gains[c, 0], gains[c, 1], rounded, rgb[begin : begin + columns])
            done[:] = 0
            oldest += 1
