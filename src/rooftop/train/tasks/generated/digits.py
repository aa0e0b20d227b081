"""scikit-learn's handwritten digits, and videos in which they move.

No file is downloaded. The first `TRAINED_ON` digits are for training; the others are held out.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.doctor.extras import Extra
from rooftop.errors import MissingExtraError

SCIKIT_LEARN = Extra("ladder", "sklearn", "scikit-learn", "the digits")
TRAINED_ON = 1500  # number of training digits among scikit-learn's 1797 digits


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Load all digits, (1797, 8, 8) float32 in 0..1, and their classes, (1797,) int64.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError('the digits need scikit-learn: pip install "rooftop[ladder]"') from error
    found = load_digits()
    return torch.from_numpy(found.images).float() / 16, torch.from_numpy(found.target).long()


def moving_digits(images: Tensor, count: int, frames: int, side: int, together: int, seed: int) -> Tensor:
    """Generate videos of digits that move straight and bounce off the edges; where digits overlap, the brighter pixel
    counts.

    Args:
        images: (M, 8, 8) in 0..1, the digits to choose from; the videos are on the device of these images.
        count, frames: N videos of T frames.
        side: side of the square frames in pixels; a digit's side is three eighths of this side.
        together: number of digits in each video.
        seed: the same seed gives the same videos.

    Returns:
        (N, T, side, side, 1) in 0..1.
    """
    generator, device = torch.Generator().manual_seed(seed), images.device
    chosen = torch.randint(len(images), (count, together), generator=generator).to(device)
    start, angle, speed = (torch.rand(count, together, k, generator=generator).to(device) for k in (2, 1, 1))
    direction = torch.cat(((2 * torch.pi * angle).cos(), (2 * torch.pi * angle).sin()), -1)
    step = direction * (0.03 + 0.03 * speed) * side  # pixels per frame
    size = 3 * side / 8
    room = side - size
    times = torch.arange(frames, device=device)[:, None, None]
    unfolded = start[:, None] * 2 * room + times * step[:, None]  # (N, T, together, 2)
    corner = room - (unfolded % (2 * room) - room).abs()  # reflected at the edges
    pixels = torch.arange(side, device=device) + 0.5
    grid = (pixels - corner[..., None]) / size * 2 - 1  # (N, T, together, 2, side): -1..1 across the digit
    row, column = (grid[..., 0, :, None], grid[..., 1, None, :])
    places = torch.stack(torch.broadcast_tensors(column, row), -1).flatten(0, 2)  # (N * T * together, side, side, 2)
    sources = images[chosen][:, None].expand(-1, frames, -1, -1, -1).flatten(0, 2)[:, None]
    drawn = F.grid_sample(sources, places, align_corners=False).view(count, frames, together, side, side)
    return drawn.amax(2)[..., None].clamp(0, 1)
