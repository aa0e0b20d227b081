"""Photographs for models: decode a file, and resize it here or leave the resize to the GPU.

Resizing takes more time than decoding: for a detector, ten times as much. A GPU resizes almost at once to the same
pixels, and a photograph has fewer bytes to send than its enlargement. So if the worker has a GPU, decoding processes
leave the resize to it, except for large photographs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.launch.triton_launch import has_triton
from rooftop.media.images import rgb_pixels
from rooftop.media.pillow_resize import Resize

MOST_PIXELS = 4_000_000  # larger photographs are resized where they are decoded, since they are many bytes to send


@dataclass(frozen=True)
class Shown:
    """A photograph for a model: its original size (width, height), and pixels (H, W, 3) uint8, not yet normalized.

    Attributes:
        resized: whether the pixels are resized and cropped for the model. If not, they are the whole photograph.
    """

    size: tuple[int, int]
    pixels: Tensor
    resized: bool = True


class Preparation(ABC):
    """Turns photographs into a model's input."""

    @abstractmethod
    def change(self, width: int, height: int) -> Resize:
        """The resize and the crop of a photograph of this size."""

    def __call__(self, image: Image.Image) -> Shown:
        """Resize and crop an RGB image. The result has a quarter of the bytes of the model's float32 input."""
        changed = self.change(*image.size).by_pillow(image)
        return Shown(image.size, torch.from_numpy(np.array(changed)))

    def read(self, path: str, device: str) -> Shown:
        """Read a photograph's file, and resize it. For the device "cuda", the photograph is not resized, except if it
        has more than `MOST_PIXELS` pixels, or if the GPU cannot resize it to the same pixels.

        Raises:
            InputError: as in `rooftop.media.images.pillow_image`.
        """
        image = rgb_pixels(path)
        width, height = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
        if (
            device == "cuda"
            and width * height <= MOST_PIXELS
            and has_triton()
            and self.change(width, height).runs_on_device(width, height)
        ):
            pixels = np.array(image) if isinstance(image, Image.Image) else image
            return Shown((width, height), torch.from_numpy(pixels), resized=False)
        return self(image if isinstance(image, Image.Image) else Image.fromarray(image))
