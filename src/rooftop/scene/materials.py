"""Materials of surfaces: a colour and a texture for each material number.

Colours and images are displayed values (sRGB), like vertex colours; images are filtered in linear light. Surfaces are
opaque: the alpha of an image is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftop.scene.arguments import real_numbers, short

if TYPE_CHECKING:
    from rooftop.scene.images import Texture

TABLE, IMAGES = "material", "images"  # names of sections of a geometry file; a name has at most 8 bytes
WRAPS = ("repeat", "clamp", "mirror")
MAGNIFIED = ("linear", "nearest")


class Material:
    """The colour and texture of all faces that have the material's number.

    Args:
        color: red, green and blue from 0 to 1, as displayed (sRGB). The colour is multiplied with the texture and the
            colours of vertices, in linear light.
        texture: an image: a path, a PIL image, or an array or tensor (H, W), (H, W, 3) or (H, W, 4) of uint8, or of
            floats from 0 to 1. The image's lower left corner is at (0, 0) of the mesh's `uv`. Alpha is ignored. An
            image has at most 16384 texels on a side and 2^27 in all.
        wrap: "repeat", "clamp" or "mirror", for u and v outside 0 to 1; or a pair, for u and for v.
        magnified: interpolation between texels where the texture is magnified: "linear" or "nearest".
        name: a readable name.

    Raises:
        FileNotFoundError, InputError: the texture's file is missing, is not an image that can be read, or is too large.
        TypeError, ValueError: another argument is invalid.

    Example:
        >>> Material((0.9, 0.8, 0.7), texture="bricks.jpg")
    """

    def __init__(
        self,
        color: Sequence[float] = (1.0, 1.0, 1.0),
        texture: Any = None,
        wrap: str | Sequence[str] = "repeat",
        magnified: str = "linear",
        name: str = "",
    ) -> None:
        numbers = real_numbers(color, "color", "red, green and blue, from 0 to 1 each")
        if numbers.shape != (3,) or not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
            raise ValueError(
                f"color={short(color)}: expected red, green and blue, from 0 to 1 each; transparency is not supported"
            )
        both = tuple(wrap) if isinstance(wrap, Sequence) and not isinstance(wrap, str) else (wrap, wrap)
        if len(both) != 2 or any(each not in WRAPS for each in both):
            raise ValueError(f"wrap={short(wrap)}: expected one of {', '.join(WRAPS)}, or a pair of these, for u and v")
        if magnified not in MAGNIFIED:
            raise ValueError(f"magnified={short(magnified)}: expected one of {', '.join(MAGNIFIED)}")
        if not isinstance(name, str):
            raise TypeError(f"name={short(name)}: expected a string")
        self.color: tuple[float, float, float] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
        self.texture: Texture | None = None
        if texture is not None:
            # imported here, because it imports Pillow, which scenes without textures do not need
            from rooftop.scene.images import Texture

            self.texture = Texture.of(texture)
        self.wrap: tuple[str, str] = (str(both[0]), str(both[1]))
        self.magnified, self.name = magnified, name

    @property
    def is_plain(self) -> bool:
        """Whether the material is white without a texture, so that it does not change the colours of vertices."""
        return self.texture is None and self.color == (1.0, 1.0, 1.0)

    def __repr__(self) -> str:
        image = "" if self.texture is None else f", texture of {self.texture.width} x {self.texture.height}"
        return f"Material({self.name!r}, color={self.color}{image})"


def checked_materials(materials: Sequence[Material], numbers: int, whose: str) -> tuple[Material, ...]:
    """Check that there is a material for each material number of a mesh.

    Args:
        numbers: the mesh's highest material number plus 1.
        whose: the mesh's name in messages.

    Raises:
        TypeError: an entry is not a material.
        ValueError: there are fewer materials than the mesh has numbers.
    """
    given = tuple(materials) if isinstance(materials, Sequence) else (materials,)
    wrong = [each for each in given if not isinstance(each, Material)]
    if wrong:
        raise TypeError(
            f"materials of {whose}: expected a list of scene.Material, one for each material number of the faces, "
            f"got {short(wrong[0])}"
        )
    if len(given) < numbers:
        raise ValueError(
            f"{whose} has faces with the material number {numbers - 1}, but there are {len(given)} materials: "
            f"expected {numbers} or more, the first for number 0"
        )
    return given


def to_linear(values: Any) -> Any:
    """Convert displayed values (sRGB, IEC 61966-2-1), 0 to 1, to linear light."""
    values = np.asarray(values, np.float64)
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def to_displayed(values: Any) -> Any:
    """Convert values in linear light, 0 to 1, to displayed values (sRGB)."""
    values = np.asarray(values, np.float64)
    curved = 1.055 * np.maximum(values, 0) ** (1 / 2.4) - 0.055
    # 1 is returned exactly, because 1.055 - 0.055 is not exactly 1
    return np.where(values == 1, 1.0, np.where(values <= 0.0031308, values * 12.92, curved))
