"""Photographs as a batch for image models: decode, resize, crop, normalize.

The preprocessing of torchvision's ImageNet models: the shorter side to 256 pixels (bilinear, antialiased), the central
224 x 224, divided by 255, normalized by ImageNet's mean and standard deviation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from rooftop.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB in 0..1
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}


def load_images(paths: Sequence[str | os.PathLike[str]], resize: int = 256, crop: int = 224) -> Tensor:
    """A batch (B, 3, crop, crop) float32 from photographs and folders of photographs, in the order of `find_images`.

    Raises:
        InputError: a path that does not exist, a folder without photographs, a file that is none.
    """
    return torch.stack([preprocess(read_image(path), resize, crop) for path in find_images(paths)])


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


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """A photograph as RGB, turned as its EXIF orientation says.

    Raises:
        InputError: not an image, or a damaged one.
    """
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16-bit: Pillow would clip, not scale
                upright = Image.fromarray((np.asarray(upright, dtype=np.float64) / 257).round().astype(np.uint8))
            return upright.convert("RGB")
    except UnidentifiedImageError as error:
        raise InputError(f"{os.fspath(path)} is no image that Pillow can read") from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's errors for damaged files
        raise InputError(f"{os.fspath(path)} cannot be read: {error}") from error


def preprocess(image: Image.Image, resize: int = 256, crop: int = 224) -> Tensor:
    """(3, crop, crop) float32 from an RGB image."""
    width, height = image.size
    short = min(width, height)
    image = image.resize((resize * width // short, resize * height // short), Image.Resampling.BILINEAR)
    width, height = image.size
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    image = image.crop((left, top, left + crop, top + crop))  # beyond the edges: black
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255  # (H, W, 3)
    normalized = (pixels - torch.tensor(MEAN)) / torch.tensor(STD)
    return normalized.permute(2, 0, 1).contiguous()  # (3, H, W)
