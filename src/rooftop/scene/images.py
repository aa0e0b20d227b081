"""Texture images. Pillow reads them from files, or the caller gives the texels. Images are decoded or encoded on
request."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from rooftop.errors import InputError
from rooftop.scene.arguments import host_array, short
from rooftop.user_paths import user_path

Bytes = npt.NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TGA", "TIFF", "GIF", "DDS")  # Pillow's names of the formats
MOST_SIDE = 1 << 14  # texels
# maximum number of texels of an image; with its mip levels it takes 0.7 GB on the device. (Pillow refuses 1.3 times as
# many texels.)
MOST_TEXELS = 1 << 27
_LIMIT = f"a texture has at most {MOST_SIDE} texels on a side and {MOST_TEXELS:,} in all: make it smaller"


class Texture:
    """A texture image: the original file, or texels. The image is decoded or encoded on request.

    Attributes:
        name: name in messages.
        width, height: in texels.
    """

    def __init__(self, name: str, size: tuple[int, int], encoded: Callable[[], bytes] | None, texels: Bytes | None):
        self.name, (self.width, self.height) = name, size
        self._encoded, self._texels = encoded, texels

    @classmethod
    def of(cls, image: Any) -> Texture:
        """Make a texture from any kind of image.

        Args:
            image: a path, a PIL image, or an array or tensor (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of uint8, or of
                floats from 0 to 1; the first row is the top. Values are displayed values (sRGB). Alpha is ignored.

        Raises:
            FileNotFoundError: the file does not exist.
            InputError: the file is not an image that Pillow reads, or the image is too large.
            TypeError, ValueError: the values have another shape, dtype or range.
        """
        if isinstance(image, Texture):
            return image
        if isinstance(image, str | PathLike):
            path = user_path(image)
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
        """Make a texture from the bytes of an image file. Only the file's header is read.

        Raises:
            InputError: the bytes are not an image that Pillow reads, or the image is too large.
        """
        return cls(name, _size_of(content, name), lambda: content, None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the content: the bytes of the original file, or the texels."""
        return _unpickled, (
            self.name,
            (self.width, self.height),
            self.encoded() if self.is_file else None,
            self._texels,
        )

    @property
    def is_file(self) -> bool:
        """Whether the texture was made from an image file, and not from texels."""
        return self._encoded is not None

    def encoded(self) -> bytes:
        """The image as the bytes of a file: the original file, or a PNG of the texels."""
        if self._encoded is not None:
            return self._encoded()
        file = io.BytesIO()
        assert self._texels is not None
        Image.fromarray(self._texels).save(file, format="PNG")
        return file.getvalue()

    def texels(self) -> Bytes:
        """Decode the image to (H, W, 3) uint8, the top row first.

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
        except Exception as error:  # a decoder may raise any exception for a damaged file
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.name} cannot be decoded ({what}); it may be damaged") from error
        if found.shape[:2] != (self.height, self.width):
            is_, said = f"{found.shape[1]} x {found.shape[0]}", f"{self.width} x {self.height}"
            raise InputError(f"{self.name} is {is_}, but its file states {said}; it may be damaged")
        return found


def _unpickled(name: str, size: tuple[int, int], content: bytes | None, texels: Bytes | None) -> Texture:
    return Texture(name, size, None if content is None else lambda: content, texels)


def _size_of(content: bytes, name: str) -> tuple[int, int]:
    with _opened(content, name) as image:
        _check_size(image.size, name)
        return image.size


def _opened(content: bytes, name: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # this module's limit is MOST_TEXELS
            return Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} is too large ({error}); {_LIMIT}") from error
    except Exception as error:  # a decoder may raise any exception
        expected = ", ".join(FORMATS)
        why = str(error).partition(" <_io.")[0]  # Pillow's message contains a memory address
        raise InputError(f"{name} is not an image that can be read ({why}); expected {expected}") from error


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if min(size) < 1:
        raise InputError(f"{name} is {width} x {height}: it has no texels")
    if max(size) > MOST_SIDE or width * height > MOST_TEXELS:
        raise InputError(f"{name} is {width} x {height}; {_LIMIT}")


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB with 8 bits per channel. 16-bit grey is rounded to 8 bits; Pillow truncates
    16-bit colours."""
    if image.mode in ("I;16", "I;16L", "I;16B", "I"):
        rounded = np.rint(np.asarray(image.convert("I")).clip(0, 65535) / 257)
        return Image.fromarray(rounded.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(np.rint(255 * np.asarray(image).clip(0, 1)).astype(np.uint8)).convert("RGB")
    if image.mode == "La":  # Pillow converts mode La only to LA
        image = image.convert("LA")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _of_array(image: Any) -> Bytes:
    """Convert an array or tensor to (H, W, 3) uint8."""
    array = host_array(image)
    shape = array.shape
    if array.dtype.kind not in "uif":
        raise TypeError(f"texture={short(image)}: expected a path, a PIL image, or an array of uint8 or floats")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise ValueError(f"a texture must have shape (H, W), (H, W, 3) or (H, W, 4), not {shape}")
    _check_size((array.shape[1], array.shape[0]), "the texture")
    array = array[:, :, :3]
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise ValueError("texels must be finite numbers from 0 to 1, or uint8")
        array = np.rint(255 * array.astype(np.float64))
    elif array.dtype != np.uint8:
        raise TypeError(f"texels must be uint8, or floats from 0 to 1, not {array.dtype}")
    # Copy, because the caller may reuse the array.
    return np.array(np.broadcast_to(array, (*array.shape[:2], 3)), np.uint8, order="C")
