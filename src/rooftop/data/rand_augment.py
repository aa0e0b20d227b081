"""RandAugment: apply several random operations, all equally probable and of the same magnitude.

Cubuk et al. 2020, "RandAugment: Practical automated data augmentation with a reduced search space". The ranges are
those of AutoAugment (Cubuk et al. 2019), in which 10 is the greatest magnitude. Colours change by a factor from 0.1 to
1.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

GREATEST = 10.0  # greatest magnitude
FILL = (124, 116, 104)  # fill colour beyond the image's edge: ImageNet's mean
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
MOST_SHEAR, MOST_DEGREES, MOST_SHIFT, MOST_COLOUR = 0.3, 30.0, 0.45, 0.9


class Operation(NamedTuple):
    """An operation's name, and its strength from -1 to 1; the sign is the direction."""

    name: str
    strength: float


def draw_operations(count: int, magnitude: float, generator: np.random.Generator) -> tuple[Operation, ...]:
    """Draw `count` random operations; the same operation may be drawn more than once."""
    names = generator.integers(len(OPERATIONS), size=count)
    signs = generator.integers(2, size=count) * 2 - 1
    return tuple(
        Operation(NAMES[name], float(sign) * magnitude / GREATEST) for name, sign in zip(names, signs, strict=True)
    )


def apply_operations(image: Image.Image, operations: Sequence[Operation]) -> Image.Image:
    """Apply the operations to an RGB image; the size stays the same."""
    for name, strength in operations:
        image = OPERATIONS[name](image, strength)
    return image


def matrix_of(operation: Operation, width: int, height: int) -> tuple[float, ...]:
    """Return the affine matrix (a, b, c, d, e, f) of an operation: pixel (x, y) of the result comes from pixel
    (a * x + b * y + c, d * x + e * y + f). For operations that move no pixels, the matrix is the identity."""
    name, strength = operation
    if name == "shear_x":
        return 1.0, MOST_SHEAR * strength, 0.0, 0.0, 1.0, 0.0
    if name == "shear_y":
        return 1.0, 0.0, 0.0, MOST_SHEAR * strength, 1.0, 0.0
    if name == "shift_x":
        return 1.0, 0.0, float(math.floor(MOST_SHIFT * strength * width + 0.5)), 0.0, 1.0, 0.0
    if name == "shift_y":
        return 1.0, 0.0, 0.0, 0.0, 1.0, float(math.floor(MOST_SHIFT * strength * height + 0.5))
    if name != "rotate":
        return IDENTITY
    angle = -math.radians(MOST_DEGREES * strength)
    a, b = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return a, b, x - a * x - b * y, -b, a, y + b * x - a * y


def _moved(name: str) -> Callable[[Image.Image, float], Image.Image]:
    def moved(image: Image.Image, strength: float) -> Image.Image:
        matrix = matrix_of(Operation(name, strength), image.width, image.height)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=FILL)

    return moved


def _posterized(image: Image.Image, strength: float) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(4 * abs(strength)))


def _solarized(image: Image.Image, strength: float) -> Image.Image:
    return ImageOps.solarize(image, round(256 * (1 - abs(strength))))


def factor_of(strength: float) -> float:
    """The blending factor of a colour operation. 0 changes the image fully, 1 keeps it, more than 1 extrapolates."""
    return 1 + MOST_COLOUR * strength


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, strength: kind(image).enhance(factor_of(strength))


OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, strength: image,
    **{name: _moved(name) for name in ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")},
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": _posterized,
    "solarize": _solarized,
    "auto_contrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
}
NAMES = tuple(OPERATIONS)
