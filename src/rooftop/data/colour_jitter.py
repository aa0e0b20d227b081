"""Colour jitter: brightness, contrast, saturation and hue change by random amounts, in a random order.

The method is from Howard 2013, "Some improvements on deep convolutional neural network based image classification". The
operations and their ranges are those of torchvision's `ColorJitter` for Pillow images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance


class Colour(NamedTuple):
    """A colour change: its name and its amount. The amount is a factor; for "hue", a fraction of the colour circle."""

    name: str
    amount: float


def draw_jitter(strength: float, hue: float, generator: np.random.Generator) -> tuple[Colour, ...]:
    """Draw colour changes in random order: factors within 1 +- strength (at least 0), and a hue shift within +- hue."""
    low, high = max(0.0, 1 - strength), 1 + strength
    drawn = [Colour(name, float(generator.uniform(low, high))) for name in FACTORS] if strength else []
    if hue:
        drawn.append(Colour("hue", float(generator.uniform(-hue, hue))))
    return tuple(drawn[place] for place in generator.permutation(len(drawn)))


def jittered(image: Image.Image, colours: Sequence[Colour]) -> Image.Image:
    """Apply the colour changes to an RGB image."""
    for name, amount in colours:
        image = _with_hue(image, amount) if name == "hue" else FACTORS[name](image).enhance(amount)
    return image


def _with_hue(image: Image.Image, amount: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(amount * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), saturation, value)).convert("RGB")


FACTORS: dict[str, Callable[[Image.Image], ImageEnhance._Enhance]] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}
