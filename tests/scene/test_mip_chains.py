"""Images in smaller and smaller sizes: each texel is the mean of the image over its square, in linear light."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rooftop.scene.materials import to_displayed, to_linear
from rooftop.scene.rendering.mip_chains import levels_of, mip_chain

Floats = NDArray[np.float64]


def resized(image: Floats, size: int) -> Floats:
    """Means over equal parts along the first axis, computed from the sums up to each border."""
    sums = np.concatenate([np.zeros((1, *image.shape[1:])), np.cumsum(image, 0)])
    borders = np.linspace(0, len(image), size + 1)
    low = np.minimum(borders.astype(int), len(image) - 1)
    upto = sums[low] + (borders - low).reshape(-1, *[1] * (image.ndim - 1)) * image[low]
    return np.diff(upto, axis=0) * size / len(image)


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (2, 2), (64, 64), (5, 1), (1, 7), (37, 23), (13, 600), (255, 256), (3, 2)]
)
def test_a_texel_is_the_mean_of_the_level_before(width: int, height: int) -> None:
    """Sides may be odd, and there may be more rows than are processed at a time."""
    image = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    chain = mip_chain(image)
    assert [(level.shape[1], level.shape[0]) for level in chain] == levels_of(width, height)
    assert chain[0] is image
    assert chain[-1].shape == (1, 1, 3)
    exact = to_linear(image / 255)
    for level in chain[1:]:
        exact = resized(resized(exact, level.shape[0]).swapaxes(0, 1), level.shape[1]).swapaxes(0, 1)
        assert np.abs(255 * to_displayed(exact) - level).max() <= 0.501


def test_light_is_averaged_and_not_numbers() -> None:
    chequers = np.zeros((2, 2, 3), np.uint8)
    chequers[0, 0] = chequers[1, 1] = 255
    assert mip_chain(chequers)[1].tolist() == [[[188] * 3]]  # half the light, not half of 255


def test_an_even_image_stays_even() -> None:
    for value in (0, 1, 10, 127, 254, 255):
        assert all((level == value).all() for level in mip_chain(np.full((21, 34, 3), value, np.uint8)))
