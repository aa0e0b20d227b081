"""Compute mip chains: copies of an image, each half as wide and high as the previous one, down to a single texel.

A level is one image of the chain; level 0 is the image itself. A texel of a level is the mean of the image over the
texel's square, in linear light. If a level has an odd number of texels along a side, each square of the next level
overlaps three of these texels. Each of them is weighted by its share of the square.

The means are computed as floats. Each mean is then converted to sRGB and rounded to 8 bits, once. float16 would take
twice the memory. The rounding changes a value by at most half of one of the 255 steps, which is less than the error of
the filters that later sample the chain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.materials import to_linear

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LINEAR = to_linear(np.arange(256) / 255).astype(np.float32)  # (256,) linear light of each 8-bit value
_BAND_ROWS = 256  # rows of the next level that a step computes: a large image is never converted to floats as a whole
# The linear light at which rounding changes from one of 256 values to the next, so that np.searchsorted is exact.
_STEPS = to_linear((np.arange(255) + 0.5) / 255)


def levels_of(width: int, height: int) -> list[tuple[int, int]]:
    """The (width, height) in texels of each level of the mip chain of an image, from the image itself to one texel."""
    count = max(width, height).bit_length()
    return [(max(width >> level, 1), max(height >> level, 1)) for level in range(count)]


def mip_chain(texels: Bytes) -> list[Bytes]:
    """Compute the mip chain of an image (H, W, 3) of 8-bit sRGB values: a list of its levels, the image itself
    first."""
    found = [texels]
    # the previous level in linear light; None for the image, which is converted band by band
    finer: Floats | None = None
    for width, height in levels_of(texels.shape[1], texels.shape[0])[1:]:
        coarser = np.empty((height, width, 3), np.float32)
        before = texels.shape[0] if finer is None else len(finer)
        for first in range(0, height, _BAND_ROWS):
            last = min(first + _BAND_ROWS, height)
            rows, weights = _rows_below(before, height, first, last)
            source = LINEAR[texels[rows]] if finer is None else finer[rows]
            coarser[first:last] = _halved(_mixed(source, weights))
        finer = coarser
        found.append(np.searchsorted(_STEPS, coarser.ravel()).astype(np.uint8).reshape(coarser.shape))
    return found


def _rows_below(before: int, after: int, first: int, last: int) -> tuple[slice, Floats]:
    """Which rows of a level are averaged to rows `first` up to, but not including, `last` of the next level.

    Args:
        before, after: number of rows of the level, and of the next level.

    Returns:
        The range of rows of the level, and their weights (last - first, K): K rows (1 to 3) are averaged to a row.
    """
    if before == 1:
        return slice(0, 1), np.ones((1, 1), np.float32)
    if before % 2 == 0:
        return slice(2 * first, 2 * last), np.full((last - first, 2), 0.5, np.float32)
    i = np.arange(first, last)
    weights = np.stack([after - i, np.full(len(i), after), i + 1], 1) / before
    return slice(2 * first, 2 * last + 1), weights.astype(np.float32)


def _mixed(source: Floats, weights: Floats) -> Floats:
    """Average rows (R, W, 3) to (N, W, 3). With weights (N, K), row i of the result is the weighted sum of the K source
    rows 2 i, 2 i + 1 and so on."""
    if weights.shape[1] == 1:
        return source
    count = len(weights)
    columns = weights.T[:, :, None, None]
    mixed: Floats = sum(columns[k] * source[k : k + 2 * count - 1 : 2] for k in range(weights.shape[1]))
    return mixed


def _halved(rows: Floats) -> Floats:
    """Average neighbouring texels of each row: (R, W, 3) to (R, W // 2, 3). Two texels are averaged, or three if W is
    odd (`_rows_below`). Rows of a single texel stay unchanged."""
    width = rows.shape[1]
    if width == 1:
        return rows
    _, weights = _rows_below(width, width // 2, 0, width // 2)
    return _mixed(rows.swapaxes(0, 1), weights).swapaxes(0, 1)
