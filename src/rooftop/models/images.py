"""Photographs as a batch for image models: decode, resize, crop, normalize.

The preprocessing of torchvision's ImageNet models: the shorter side to 256 pixels (bilinear, antialiased), the central
224 x 224, divided by 255, normalized by ImageNet's mean and standard deviation. Other weights, other sizes:
`Preprocessing`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from rooftop.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB in 0..1
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}


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
    return torch.stack([preprocess(read_image(path), preprocessing) for path in find_images(paths)])


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The photographs that the paths name: files as given, those directly in a folder sorted by name.

    Raises:
        InputError: a path that does not exist, or a folder without photographs.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise InputError(f"{path} holds no photographs ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"{path} does not exist")
    return found


def check_images(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Look at the beginning of each file, so that what is no image is found before the work and not after it.

    Raises:
        InputError: not an image.
    """
    for path in paths:
        with _reading(path), Image.open(path):
            pass


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """A photograph as RGB, turned as its EXIF orientation says; what is transparent lies on white.

    Raises:
        InputError: not an image, or a damaged one.
    """
    with _reading(path), Image.open(path) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16-bit: Pillow would clip, not scale
            upright = Image.fromarray((np.asarray(upright, dtype=np.float64) / 257).round().astype(np.uint8))
        if upright.has_transparency_data:  # the colour under transparent pixels means nothing
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Pillow's errors for files that are no images, or damaged, or huge, as one that names the file."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise InputError(f"{os.fspath(path)} is no image that Pillow can read") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error}") from error


def preprocess(image: Image.Image, preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """(3, crop, crop) float32 from an RGB image."""
    width, height = image.size
    short, resize, crop = min(width, height), preprocessing.resize, preprocessing.crop
    image = image.resize((resize * width // short, resize * height // short), preprocessing.interpolation)
    width, height = image.size
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    image = image.crop((left, top, left + crop, top + crop))  # beyond the edges: black
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255  # (H, W, 3)
    normalized = (pixels - torch.tensor(preprocessing.mean)) / torch.tensor(preprocessing.std)
    return normalized.permute(2, 0, 1).contiguous()  # (3, H, W)
