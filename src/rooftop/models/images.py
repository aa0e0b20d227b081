"""Prepare a batch of photographs for image models: decode, resize, crop, normalize.

The preprocessing is the same as for torchvision's ImageNet models. The shorter side is resized to 256 pixels (bilinear,
antialiased), and the central 224 x 224 pixels are cropped. Then pixels are divided by 255, and normalized by ImageNet's
mean and standard deviation. For other weights and sizes use `Preprocessing`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError, ModelRunError
from rooftop.media.ahead import in_order
from rooftop.media.images import MEAN, STD, check_images, find_images, normalized, pillow_image
from rooftop.media.pillow_resize import Resize

__all__ = [
    "IMAGENET", "MEAN", "STD", "Preprocessing", "check_images", "cropped", "cropping", "find_images", "load_images",
    "normalization", "normalized", "normalized_by", "normalized_pixels", "not_finite", "prepared", "preprocess",
    "read_image",
]  # fmt: skip

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of a photograph for a model.

    Attributes:
        resize: length of the shorter side in pixels, before the crop.
        crop: side of the central square in pixels.
        interpolation: Pillow's filter for the resize.
        mean, std: mean and standard deviation of the red, green and blue values in 0..1.

    Raises:
        ValueError: a size is not an int of 1 or more, or mean or std are not three numbers, those of std positive.
    """

    resize: int = 256
    crop: int = 224
    interpolation: Image.Resampling = Image.Resampling.BILINEAR
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            if type(size := getattr(self, name)) is not int or size < 1:
                raise ValueError(f"Preprocessing: {name} must be an int of at least 1, got {size!r}")
        if len(self.mean) != 3 or not all(map(math.isfinite, self.mean)):
            raise ValueError(f"Preprocessing: mean must be three numbers, got {self.mean}")
        if len(self.std) != 3 or not all(0 < each < math.inf for each in self.std):
            raise ValueError(f"Preprocessing: std must be three positive numbers, got {self.std}")


IMAGENET = Preprocessing()


def load_images(paths: Sequence[str | os.PathLike[str]], preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """Load photographs and folders of photographs as a batch (B, 3, crop, crop) float32, in the order of `find_images`.

    Raises:
        InputError: there are no paths, a path does not exist, a folder has no photographs, or a file is not a
            photograph.
    """
    found = find_images(paths)
    if not found:
        raise InputError("load_images: got no paths, expected at least one photograph or folder of photographs")
    return torch.stack([image for _, image in prepared(found, lambda image: preprocess(image, preprocessing))])


def prepared(
    paths: Sequence[Path], prepare: Callable[[Image.Image], Prepared], ahead: int | None = None, on_error: str = "raise"
) -> Iterator[tuple[int, Prepared]]:
    """Call `prepare` for each photograph in threads; yields (index of the path, result), in the order of the paths.

    The threads run while the caller does other work.

    Args:
        paths: the files of the photographs.
        prepare: called with each image, as `read_image` returns it.
        ahead: the maximum number of photographs that are started and not yet yielded; None: two per thread.
        on_error: "raise" raises InputError at an unreadable file; "skip" leaves the file out with a warning.

    Raises:
        InputError: `on_error` is unknown. The iteration raises InputError at a file that is damaged or not an image,
            unless such files are skipped. The iteration also raises InputError at the end if all files were skipped.
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
    """Read a photograph as RGB, rotated by its EXIF orientation; transparent parts become white.

    Raises:
        InputError: the file is damaged or not an image.
    """
    return pillow_image(path)


def preprocess(image: Image.Image, preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """Resize, crop and normalize an RGB image: (3, crop, crop) float32."""
    return normalized(cropped(image, preprocessing), preprocessing.mean, preprocessing.std)


def cropped(image: Image.Image, preprocessing: Preprocessing = IMAGENET) -> Image.Image:
    """Resize an RGB image and crop it to the model's input size, without normalization."""
    return cropping(*image.size, preprocessing).by_pillow(image)


def cropping(width: int, height: int, preprocessing: Preprocessing = IMAGENET) -> Resize:
    """The resize and the crop of a photograph of this size.

    Where the crop extends beyond the resized photograph, pixels are black.
    """
    short, resize, crop = min(width, height), preprocessing.resize, preprocessing.crop
    size = resize * width // short, resize * height // short
    left, top = (round((side - crop) / 2) for side in size)
    return Resize(size, (left, top, left + crop, top + crop), preprocessing.interpolation)


def normalized_pixels(pixels: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Normalize (..., H, W, 3) uint8 to (..., 3, H, W) float32 on the pixels' device.

    For the pixels of an image, the result is bit-identical to that of `normalized`.

    The result is channels last in memory, like the pixels.
    """
    return normalized_by(pixels, normalization(mean, std, pixels.device))


def normalization(mean: Sequence[float], std: Sequence[float], device: torch.device) -> Tensor:
    """The constants of `normalized_by`: (3, 3), the rows 255, mean and std, with a column per channel.

    For a GPU, the host waits for all earlier work on the GPU.
    """
    # 255 is a tensor too: PyTorch does not divide by a Python number, but multiplies by its rounded inverse
    return torch.tensor([[255.0] * 3, list(mean), list(std)], device=device)


def normalized_by(pixels: Tensor, constants: Tensor) -> Tensor:
    """Normalize like `normalized_pixels`. `constants` has the scale, the mean and the standard deviation, already on
    the device."""
    scale, mean, std = constants
    return pixels.float().div_(scale).sub_(mean).div_(std).movedim(-1, -3)


def not_finite(called: object) -> ModelRunError:
    """Create the error for an image whose results are not finite."""
    return ModelRunError(
        f"the model's output for {called} is not finite: its weights are damaged, or its dtype overflows (float32 and "
        "bfloat16 have a larger range than float16)"
    )
