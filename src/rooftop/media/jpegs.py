"""Decode JPEGs on the CPU by simplejpeg, which lets libjpeg-turbo write RGB into an array.

Pillow uses the same library, so the pixels are the same. But Pillow's images have four bytes per pixel, and their
conversion to an array takes a third of the time of decoding.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

from PIL import Image

ORIENTATION = 0x0112  # EXIF


def decodes(image: Image.Image) -> bool:
    """Whether `rgb_pixels` is able to decode this file, which Pillow has opened: an upright JPEG in RGB or YCbCr."""
    if _simplejpeg() is None or image.format != "JPEG" or image.mode != "RGB":
        return False
    return bool(image.getexif().get(ORIENTATION, 1) == 1)


def rgb_pixels(content: bytes | memoryview) -> Any:
    """Decode a file for which `decodes` is true.

    Returns:
        (H, W, 3) uint8, a new NumPy array; None if the file is damaged. Pillow decides whether a damaged file has
        pixels.
    """
    simplejpeg = _simplejpeg()
    assert simplejpeg is not None
    try:
        return simplejpeg.decode_jpeg(content)
    except ValueError:
        return None


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg  # type: ignore[no-any-return]
