"""What a surface looks like: a colour and an image of it, by the number of its material.

Colours and images are as displayed (sRGB), as those of vertices are; images are filtered in linear light. Nothing is
transparent: alpha of an image is left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from rooftop.errors import InputError

Bytes = npt.NDArray[np.uint8]
Wrap = tuple[str, str]

WRAPS = ("repeat", "clamp", "mirror")
MAGNIFIED = ("linear", "nearest")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TGA", "TIFF", "GIF", "DDS")  # of images, as Pillow calls them
MOST_SIDE = 1 << 14  # texels
MOST_TEXELS = 1 << 27  # of an image: 0.5 GB on the device, and Pillow itself refuses 1.3 times as many


class Texture:
    """An image of a surface: the file that it was, or texels. It is decoded or encoded when that is asked for.

    Attributes:
        name: what messages call it.
        width, height: in texels.
    """

    def __init__(self, name: str, size: tuple[int, int], encoded: Callable[[], bytes] | None, texels: Bytes | None):
        self.name, (self.width, self.height) = name, size
        self._encoded, self._texels = encoded, texels

    @classmethod
    def of(cls, image: Any) -> Texture:
        """A texture from whatever holds an image.

        Args:
            image: a path, a PIL image, or an array or tensor (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of uint8, or of
                floats from 0 to 1; the first row is the top. Values are as displayed (sRGB). Alpha is left out.

        Raises:
            FileNotFoundError: there is no such file.
            InputError: the file is no image that Pillow reads, or too large.
            TypeError, ValueError: values of another shape, dtype or range.
        """
        if isinstance(image, Texture):
            return image
        if isinstance(image, str | PathLike):
            path = Path(fspath(image))
            if not path.is_file():
                raise FileNotFoundError(f"there is no image {path}")
            return cls.of_bytes(path.read_bytes(), str(path))
        if isinstance(image, Image.Image):
            _check_size(image.size, "the texture")
            return cls("the texture", image.size, None, np.asarray(_in_rgb(image)))
        texels = _of_array(image)
        return cls("the texture", (texels.shape[1], texels.shape[0]), None, texels)

    @classmethod
    def of_bytes(cls, content: bytes, name: str) -> Texture:
        """An image file; its head is looked at.

        Raises:
            InputError: it is no image that can be read, or it is too large.
        """
        return cls(name, _size_of(content, name), lambda: content, None)

    @property
    def is_file(self) -> bool:
        """Whether it is held as the file that it was, and not as texels."""
        return self._encoded is not None

    def encoded(self) -> bytes:
        """As an image file: the one that it was, else a PNG."""
        if self._encoded is not None:
            return self._encoded()
        file = io.BytesIO()
        assert self._texels is not None
        Image.fromarray(self._texels).save(file, format="PNG")
        return file.getvalue()

    def texels(self) -> Bytes:
        """(H, W, 3) uint8, the top row first.

        Raises:
            InputError: the image is damaged.
        """
        if self._texels is not None:
            return self._texels
        try:
            with _opened(self.encoded(), self.name) as image:
                found = np.asarray(_in_rgb(image))
        except InputError:
            raise
        except Exception as error:  # whatever a decoder meets in a damaged file
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.name} cannot be decoded ({what}); it may be damaged") from error
        if found.shape[:2] != (self.height, self.width):
            is_, said = f"{found.shape[1]} x {found.shape[0]}", f"{self.width} x {self.height}"
            raise InputError(f"{self.name} is {is_}, and {said} was said of it; it may be damaged")
        return found


class Material:
    """What faces with a material's number look like.

    Args:
        color: red, green and blue from 0 to 1, as displayed (sRGB). It multiplies the texture, and the colours of
            vertices, in linear light.
        texture: an image over the mesh's `uv`, whose (0, 0) is the lower left corner: a path, a PIL image, or an array
            or tensor (H, W), (H, W, 3) or (H, W, 4) of uint8, or of floats from 0 to 1. Alpha is left out. It has at
            most 16384 texels on a side and 2^27 in all.
        wrap: "repeat", "clamp" or "mirror": what is beyond 0 to 1 of u and of v; or a pair, of u and of v.
        magnified: "linear", or "nearest": what is between the texels of a texture that is seen from near.
        name: for people.

    Raises:
        FileNotFoundError, InputError: the texture's file is missing, or is no image that can be read, or is too large.
        TypeError, ValueError: numbers or words that cannot be.

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
        try:
            numbers = np.asarray(color, np.float64)
        except (TypeError, ValueError):
            numbers = np.zeros(0)
        if numbers.shape != (3,) or not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
            raise ValueError(f"color={color!r}: expected red, green and blue, from 0 to 1 each; nothing is transparent")
        both = (wrap, wrap) if isinstance(wrap, str) else tuple(wrap)
        if len(both) != 2 or any(each not in WRAPS for each in both):
            raise ValueError(f"wrap={wrap!r}: expected one of {', '.join(WRAPS)}, or a pair of these, of u and of v")
        if magnified not in MAGNIFIED:
            raise ValueError(f"magnified={magnified!r}: expected one of {', '.join(MAGNIFIED)}")
        self.color: tuple[float, float, float] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
        self.texture = None if texture is None else Texture.of(texture)
        self.wrap: Wrap = (str(both[0]), str(both[1]))
        self.magnified, self.name = magnified, name

    @property
    def is_plain(self) -> bool:
        """Whether it changes no colour."""
        return self.texture is None and self.color == (1.0, 1.0, 1.0)

    def __repr__(self) -> str:
        image = "" if self.texture is None else f", texture of {self.texture.width} x {self.texture.height}"
        return f"Material({self.name!r}, color={self.color}{image})"


def checked_materials(materials: Sequence[Material], numbers: int, whose: str) -> tuple[Material, ...]:
    """A material for each number of a mesh.

    Args:
        numbers: one more than the mesh's highest material number.
        whose: what messages call the mesh.

    Raises:
        TypeError: these are no materials.
        ValueError: they are fewer than the mesh has numbers.
    """
    given = tuple(materials) if isinstance(materials, Sequence) else (materials,)
    wrong = [each for each in given if not isinstance(each, Material)]
    if wrong:
        raise TypeError(
            f"materials of {whose}: expected a list of scene.Material, one for each number, got {wrong[0]!r}"
        )
    if len(given) < numbers:
        raise ValueError(
            f"{whose} has faces with the material number {numbers - 1}, and there are {len(given)} materials: expected "
            f"{numbers} or more, the first for number 0"
        )
    return given


def to_linear(values: Any) -> Any:
    """Values as displayed (sRGB, IEC 61966-2-1), 0 to 1, in linear light."""
    values = np.asarray(values, np.float64)
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def to_displayed(values: Any) -> Any:
    """Values in linear light, 0 to 1, as displayed (sRGB)."""
    values = np.asarray(values, np.float64)
    return np.where(values <= 0.0031308, values * 12.92, 1.055 * np.maximum(values, 0) ** (1 / 2.4) - 0.055)


def _size_of(content: bytes, name: str) -> tuple[int, int]:
    with _opened(content, name) as image:
        _check_size(image.size, name)
        return image.size


def _opened(content: bytes, name: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MOST_TEXELS is the limit here
            return Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} is too large ({error}); {_LIMIT}") from error
    except Exception as error:  # whatever a decoder meets
        expected = ", ".join(FORMATS)
        raise InputError(f"{name} is no image that can be read ({error}); expected {expected}") from error


_LIMIT = f"a texture has at most {MOST_SIDE} texels on a side and {MOST_TEXELS:,} in all: make it smaller"


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if min(size) < 1 or max(size) > MOST_SIDE or width * height > MOST_TEXELS:
        raise InputError(f"{name} is {width} x {height}; {_LIMIT}")


def _in_rgb(image: Image.Image) -> Image.Image:
    """Any mode in 8 bits of red, green and blue; 16 bits are rounded to these."""
    if image.mode in ("I;16", "I;16L", "I;16B", "I"):
        rounded = np.rint(np.asarray(image.convert("I")).clip(0, 65535) / 257)
        return Image.fromarray(rounded.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(np.rint(255 * np.asarray(image).clip(0, 1)).astype(np.uint8)).convert("RGB")
    if "A" in image.mode or "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _of_array(image: Any) -> Bytes:
    """(H, W, 3) of an array or tensor."""
    detached = image.detach().cpu() if hasattr(image, "detach") else image
    array = np.asarray(detached)
    if array.dtype.kind not in "uif":
        raise TypeError(f"texture={image!r}: expected a path, a PIL image, or an array of uint8 or floats")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise ValueError(f"a texture has shape (H, W), (H, W, 3) or (H, W, 4), not {np.asarray(detached).shape}")
    _check_size((array.shape[1], array.shape[0]), "the texture")
    array = array[:, :, :3]
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise ValueError("texels are finite numbers from 0 to 1, or uint8")
        array = np.rint(255 * array.astype(np.float64))
    elif array.dtype != np.uint8:
        raise TypeError(f"texels are uint8, or floats from 0 to 1, not {array.dtype}")
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)), np.uint8)
