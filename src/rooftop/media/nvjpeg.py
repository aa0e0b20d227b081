"""Decode JPEGs on a GPU (NVJPEG, through torchvision): whether NVJPEG is available, and which files it may decode.

NVJPEG must not decode files that it would decode differently from libjpeg, or whose damage it would miss. Such files
are CMYK files, files that store RGB, files of more than 8 bits and truncated files. `reason_against` detects these
files.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import RooftopError
from rooftop.words import counted, in_a_line

IS_DATA = np.isin(np.arange(256), [0x00, *range(0xD0, 0xD8), 0xFF])
"""For each value of the byte after 0xff: whether coded data continues. Coded data continues after stuffed bytes,
restart markers and padding."""

START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
RGB_IDS = (ord("R"), ord("G"), ord("B"))


class NoImageDecoderError(RooftopError, NotImplementedError):
    """The requested GPU cannot decode photographs here; the message says why, and which devices can."""


@cache
def missing(device: torch.device) -> str | None:
    """Return why NVJPEG is not available on this GPU, found by decoding a small JPEG; None if it is available."""
    if not torch.cuda.is_available():
        return "there is no NVJPEG, because torch finds no CUDA GPU here"
    if (device.index or 0) >= torch.cuda.device_count():
        return f"there is no {device}, only {counted(torch.cuda.device_count(), 'GPU')}"
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (0, 128, 255)).save(file, "JPEG", quality=95)
    try:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # an idle stream
            found = decode([file.getvalue()], device)[0].cpu()
    except ImportError as error:
        return f"NVJPEG needs torchvision, which is not installed ({error})"
    # torchvision's compiled part does not fit torch, or lacks NVJPEG
    except (RuntimeError, OSError, AttributeError) as error:
        return f"torchvision cannot reach NVJPEG ({in_a_line(error)})"
    apart = (found.int() - torch.tensor([0, 128, 255])[:, None, None]).abs().max().item()
    return None if apart <= 4 else f"NVJPEG returns wrong colours, which differ by {apart} of 255 levels"


def decode(contents: Sequence[bytes | memoryview], device: torch.device) -> list[Tensor]:
    """Decode each file to (3, H, W) uint8 RGB, not rotated. Later work on the current stream may use the results.

    torchvision writes from its own stream into memory of the current stream, without waiting for that stream. So the
    current stream must be idle during this call.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: NVJPEG refuses one of the files, or torchvision was built without NVJPEG.
    """
    torchvision_io: Any = import_module("torchvision.io")
    inputs = [  # copy read-only memory, because PyTorch would warn about it
        torch.frombuffer(bytearray(each) if isinstance(each, bytes) else each, dtype=torch.uint8) for each in contents
    ]
    found: list[Tensor] = torchvision_io.decode_jpeg(inputs, mode="RGB", device=device)
    return found


def reason_against(image: Image.Image, content: bytes) -> str | None:
    """Return why NVJPEG must not decode a file; None if NVJPEG may decode the file.

    Args:
        image: the file as Pillow opens it; its header is enough.
        content: content of the file.
    """
    if image.format not in ("JPEG", "MPO"):
        return str(image.format)
    if image.mode not in ("RGB", "L"):
        return f"JPEG in {image.mode}"
    parts = getattr(image, "layer", ())
    unmarked = "jfif" not in image.info and "adobe" not in image.info
    if len(parts) == 3 and (
        image.info.get("adobe_transform") == 0 or (unmarked and tuple(part[0] for part in parts) == RGB_IDS)
    ):
        return "JPEG stored as red, green and blue"
    if getattr(image, "bits", 8) != 8:
        return f"JPEG of {getattr(image, 'bits', 8)} bits"
    return None if is_whole(content) else "JPEG without its end"


def is_whole(content: bytes) -> bool:
    """Whether a JPEG has all its segments and coded data up to the end-of-image marker."""
    after_scan = _markers(content)
    at = 2  # skip the start-of-image marker
    while True:
        if not content.startswith(b"\xff", at):
            return False
        while content.startswith(b"\xff", at):
            at += 1
        if at >= len(content) or IS_DATA[content[at]]:
            return False
        marker, at = content[at], at + 1
        if marker == END_OF_IMAGE:
            return True
        length = int.from_bytes(content[at : at + 2], "big")
        if length < 2 or at + length > len(content):
            return False
        at += length
        if marker == START_OF_SCAN:
            place = np.searchsorted(after_scan, at)
            if place == len(after_scan):
                return False
            at = int(after_scan[place])


def _markers(content: bytes) -> Any:
    """Positions of the 0xff of each marker that ends coded data. NumPy takes 20 us for 45 KB, `re` 240 us."""
    values = np.frombuffer(content, np.uint8)
    places = np.flatnonzero(values[:-1] == 0xFF)
    return places[~IS_DATA[values[places + 1]]]


def turned(pixels: Tensor, orientation: int) -> Tensor:
    """Turn (3, H, W) upright by its EXIF orientation number; the result is a view."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 2)
    flips = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation, ())
    return pixels.flip(flips) if flips else pixels
