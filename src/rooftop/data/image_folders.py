"""Photographs in folders, one folder per class.

photographs/train/cat/1.jpg, photographs/train/cat/2.jpg, photographs/train/dog/1.jpg, ...
"""

from __future__ import annotations

import mimetypes
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.data.image_transforms import Drawn, ImageTransform
from rooftop.errors import InputError
from rooftop.media.images import SUFFIXES, RgbPixels, pillow_image
from rooftop.user_paths import user_path
from rooftop.words import counted

Transform = Callable[[Image.Image, np.random.Generator | None], Any]


class ImageFolder:
    """Photographs whose class is the name of their folder: `data[i]` is (image, class number).

        data = ImageFolder("photographs/train", ImageTransform(224, {"crop": 0.35, "flip": 0.5}, train=True))
        for images, labels in (batch.value for batch in Loader(data, 64, shuffle=True)): ...

    Args:
        root: a folder with one folder per class, which holds the class's photographs, also in subfolders. Names that
            begin with a dot are ignored. A warning counts the images of formats that are not read, such as GIF, and
            names the first of these files.
        transform: (RGB image, generator or None) -> image. With an `ImageTransform`, JPEGs are decoded no larger than
            needed. None: images are (3, H, W) uint8.

    Attributes:
        classes: names of the folders, sorted; a class's number is its index.
        paths, labels: paths and labels of the samples, sorted by class, then by path.

    Raises:
        InputError: the folder does not exist, has no folders, or has a class without photographs. `data[i]` raises
            InputError if a file is not a photograph or is damaged.
    """

    def __init__(self, root: str | os.PathLike[str], transform: Transform | None = None) -> None:
        self.root, self.transform = user_path(root), transform
        if not self.root.is_dir():
            raise InputError(f"{root} is not a folder")
        folders = sorted(each.name for each in os.scandir(self.root) if each.is_dir() and not each.name.startswith("."))
        if not folders:
            raise InputError(f"{root} holds no folders: expected one folder of photographs for each class")
        self.classes = folders
        self.paths: list[str] = []  # strings take a quarter of the memory of Path objects
        self.labels: list[int] = []
        ignored: list[str] = []
        for label, name in enumerate(self.classes):
            found = _photographs(os.path.join(self.root, name), ignored)
            if not found:
                raise InputError(
                    f"{self.root / name} holds no photographs ({', '.join(sorted(SUFFIXES))}): add photographs of this "
                    "class, or remove the folder"
                )
            self.paths += found
            self.labels += [label] * len(found)
        if ignored:
            warnings.warn(
                f"{self.root} holds {counted(len(ignored), 'unused image')}, the first one is {ignored[0]}: expected "
                f"{', '.join(sorted(SUFFIXES))}",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return read(self.transform, self.paths[index], None), self.labels[index]

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Any, int]:
        """Return a sample; the transform augments the image with random numbers from this generator."""
        return read(self.transform, self.paths[index], generator), self.labels[index]

    def name(self, index: int) -> str:
        """The path of the sample's file."""
        return self.paths[index]

    def content(self, index: int) -> bytes:
        """The bytes of the sample's file."""
        return Path(self.paths[index]).read_bytes()

    def decoded(self, index: int, content: bytes, generator: np.random.Generator | None = None) -> Any:
        """Return the decoded photograph, in the form that `changed` accepts."""
        return decode(self.transform, content, generator, self.name(index))

    def changed(self, index: int, decoded: Any, generator: np.random.Generator | None) -> tuple[Any, int]:
        """Transform a photograph from `decoded`; return the sample, (image, class number)."""
        return change(self.transform, decoded, generator), self.labels[index]


def read(
    transform: Transform | None,
    source: str | bytes,
    generator: np.random.Generator | None,
    name: str | None = None,
) -> Any:
    """Decode and transform a photograph."""
    return change(transform, decode(transform, source, generator, name), generator)


def decode(
    transform: Transform | None, source: str | bytes, generator: np.random.Generator | None, name: str | None = None
) -> tuple[RgbPixels | Image.Image, Drawn | None]:
    """Decode a photograph.

    An `ImageTransform` draws its changes first, so that no more pixels than needed are decoded. It also accepts
    arrays, so a file is decoded to an array, instead of a Pillow image, if this is faster.
    """
    if isinstance(transform, ImageTransform):
        return transform.decode(source, generator, name)
    return pillow_image(source, name=name), None


def change(
    transform: Transform | None,
    decoded: tuple[RgbPixels | Image.Image, Drawn | None],
    generator: np.random.Generator | None,
) -> Any:
    """Apply the transform to a photograph from `decode`."""
    image, drawn = decoded
    if isinstance(transform, ImageTransform) and drawn is not None:
        return transform.apply(image, drawn)
    assert isinstance(image, Image.Image)  # only an `ImageTransform` takes arrays
    return _pixels(image) if transform is None else transform(image, generator)


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def _photographs(folder: str, ignored: list[str]) -> list[str]:
    """List the photographs in a folder; add images of other formats, such as GIF, to `ignored`.

    Links to folders are followed, except a link to a folder that contains the link.
    """
    found: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        around = os.path.realpath(place) + os.sep
        folders[:] = [
            each
            for each in folders
            if not each.startswith(".") and not around.startswith(os.path.realpath(os.path.join(place, each)) + os.sep)
        ]
        for name in sorted(names):
            if name.startswith("."):
                continue
            if os.path.splitext(name)[1].lower() in SUFFIXES:
                found.append(os.path.join(place, name))
            elif (mimetypes.guess_type(name)[0] or "").startswith("image/"):
                ignored.append(os.path.join(place, name))
    return sorted(found)
