"""Photographs as a batch for image models: decode, resize, crop, normalize.

The preprocessing of torchvision's ImageNet models: the shorter side to 256 pixels (bilinear, antialiased), the central
224 x 224, divided by 255, normalized by ImageNet's mean and standard deviation. Other weights, other sizes:
`Preprocessing`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media.ahead import in_order
from rooftop.media.images import check_images, find_images, pillow_image

__all__ = [
    "IMAGENET", "MEAN", "STD", "Preprocessing", "check_images", "find_images", "load_images", "normalized", "prepared",
    "preprocess", "read_image",
]  # fmt: skip

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB in 0..1

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Preprocessing:
    """How a photograph becomes the input of a model.

    Attributes:
        resize: length of the shorter side in pixels, before the crop.
        crop: side of the central square in pixels.
        interpolation: Pillow's filter for the resize.
        mean, std: of the red, green and blue values in 0..1.
    """

    resize: int = 256
    crop: int = 224
    interpolation: Image.Resampling = Image.Resampling.BILINEAR
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD


IMAGENET = Preprocessing()


def load_images(paths: Sequence[str | os.PathLike[str]], preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """A batch (B, 3, crop, crop) float32 from photographs and folders of photographs, in the order of `find_images`.

    Raises:
        InputError: a path that does not exist, a folder without photographs, a file that is none.
    """
    found = prepared(find_images(paths), lambda image: preprocess(image, preprocessing))
    return torch.stack([image for _, image in found])


def prepared(
    paths: Sequence[Path], prepare: Callable[[Image.Image], Prepared], ahead: int | None = None, on_error: str = "raise"
) -> Iterator[tuple[int, Prepared]]:
    """What `prepare` makes of each photograph, by threads while the caller does something else; before it stands the
    number of the photograph among the paths.

    Args:
        paths: files.
        prepare: gets them as of `read_image`.
        ahead: how many are begun or done and not yet asked for, at most; None: two for each thread.
        on_error: "raise"; or "skip" what cannot be read, with a warning for each.

    Raises:
        InputError: another `on_error`. At its place, a file that is no image or a damaged one, unless it is skipped; at
            the end, if all were.
    """
    if on_error not in ("raise", "skip"):
        raise InputError(f'on_error {on_error!r} is not known: expected "raise" or "skip"')

    def outcome(path: Path) -> Prepared | InputError:
        try:
            return prepare(read_image(path))
        except InputError as error:
            if on_error == "raise":
                raise
            return error

    def read() -> Iterator[tuple[int, Prepared]]:
        skipped: list[InputError] = []
        for number, found in enumerate(in_order(outcome, paths, ahead=ahead)):
            if isinstance(found, InputError):
                warnings.warn(f"skipped: {found}", stacklevel=2)
                skipped.append(found)
            else:
                yield number, found
        if skipped and len(skipped) == len(paths):
            raise InputError(f"none of {len(paths)} photographs can be read: {skipped[0]}")

    return read()


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """A photograph as RGB, turned as its EXIF orientation says; what is transparent lies on white.

    Raises:
        InputError: not an image, or a damaged one.
    """
    return pillow_image(path)


def preprocess(image: Image.Image, preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """(3, crop, crop) float32 from an RGB image."""
    width, height = image.size
    short, resize, crop = min(width, height), preprocessing.resize, preprocessing.crop
    image = image.resize((resize * width // short, resize * height // short), preprocessing.interpolation)
    width, height = image.size
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    image = image.crop((left, top, left + crop, top + crop))  # beyond the edges: black
    return normalized(image, preprocessing.mean, preprocessing.std)


def normalized(image: Image.Image, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """(3, H, W) float32 from an RGB image: (value / 255 - mean) / std.

    By NumPy, bit by bit what torch gives: its operators would start a team of threads for each thread that prepares.
    """
    pixels = np.array(image, dtype=np.float32) / np.float32(255)  # (H, W, 3)
    values = (pixels - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
