"""Compute mip chains: copies of an image, each half as wide and high as the previous one, down to a single texel.

A texel of a level is the mean of the image over the texel's square, in linear light. If a side of a level is odd, each
square of the next level overlaps three of the level's texels along that side. Each of these texels is weighted by its
share of the square. All levels but the first are rounded to 8 bits once, as displayed (sRGB). float16 would take twice
the memory, and the error of 8-bit rounding (at most half a step of 255) is less than the error of any filter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene.materials import to_linear

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LINEAR = to_linear(np.arange(256) / 255).astype(np.float32)  # (256,) linear light of each 8-bit value
_BAND_ROWS = 256  # rows of a smaller level per step, so that a large image is never converted to floats as a whole
# The linear light at which rounding changes from one of 256 values to the next, so that np.searchsorted is exact.
_STEPS = to_linear((np.arange(255) + 0.5) / 255)


def levels_of(width: int, height: int) -> list[tuple[int, int]]:
    """The (width, height) of each level of a mip chain."""
    count = max(width, height).bit_length()
    return [(max(width >> level, 1), max(height >> level, 1)) for level in range(count)]


def mip_chain(texels: Bytes) -> list[Bytes]:
    """Compute all levels of an image (H, W, 3); the image comes first."""
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
    """The rows of a level that are averaged to rows first..last of the next level, and the weights of the average, with
    1 to 3 columns.
    """
    if before == 1:
        return slice(0, 1), np.ones((1, 1), np.float32)
    if before % 2 == 0:
        return slice(2 * first, 2 * last), np.full((last - first, 2), 0.5, np.float32)
    i = np.arange(first, last)
    weights = np.stack([after - i, np.full(len(i), after), i + 1], 1) / before
    return slice(2 * first, 2 * last + 1), weights.astype(np.float32)


def _mixed(source: Floats, weights: Floats) -> Floats:
    """Mix rows (R, W, 3) to (N, W, 3): row i is the weighted sum of the source rows from 2 i on."""
    if weights.shape[1] == 1:
        return source
    count = len(weights)
    columns = weights.T[:, :, None, None]
    mixed: Floats = sum(columns[k] * source[k : k + 2 * count - 1 : 2] for k in range(weights.shape[1]))
    return mixed


def _halved(rows: Floats) -> Floats:
    """Reduce rows (R, W, 3) to half their width."""
    width = rows.shape[1]
    if width == 1:
        return rows
    _, weights = _rows_below(width, width // 2, 0, width // 2)
    return _mixed(rows.swapaxes(0, 1), weights).swapaxes(0, 1)
