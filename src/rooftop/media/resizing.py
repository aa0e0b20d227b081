"""Bilinear resizing with antialiasing, as in `torch.nn.functional.interpolate` with `antialias=True`.

PyTorch's own resizing on the CPU is wrong, or fails, for results of one column, and does not support half precision.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def taps(pixels: int, results: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bilinear weights for resizing one dimension from `pixels` to `results` pixels.

    Returns: for each result pixel, the index of the first pixel that contributes, the index after the last, and float64
    weights, which sum to 1. The weights are (results, maximum number of contributing pixels).
    """
    by = pixels / results
    wide = max(by, 1.0)
    centre = (np.arange(results) + 0.5) * by
    first = np.maximum((centre - wide + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + wide + 0.5).astype(np.int64), pixels)
    place = first[:, None] + np.arange(int((end - first).max()))
    weights = np.maximum(1 - np.abs(place - centre[:, None] + 0.5) / wide, 0.0)
    weights[place >= end[:, None]] = 0
    return first, end, weights / weights.sum(1, keepdims=True)


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (3, H, W) to (3, h, w) in its dtype, on the CPU. uint8 results are rounded once."""
    if tuple(x.shape[1:]) == size:
        return x
    exact = x if x.is_floating_point() else x.float()
    rows, columns = (
        _matrix(pixels, results).to(exact.dtype) for pixels, results in zip(x.shape[1:], size, strict=True)
    )
    found = rows @ (exact @ columns.mT)
    return found if x.is_floating_point() else found.round_().clamp_(0, 255).to(x.dtype)


@functools.lru_cache(maxsize=16)
def _matrix(pixels: int, results: int) -> Tensor:
    """The weights as a matrix (results, pixels), float64."""
    first, end, weights = taps(pixels, results)
    matrix = np.zeros((results, pixels))
    for n in range(results):
        matrix[n, first[n] : end[n]] = weights[n, : end[n] - first[n]]
    return torch.from_numpy(matrix)
