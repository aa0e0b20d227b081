"""Photographs whose JPEGs a GPU decodes, crops and resizes, while the CPU only reads the files.

    files = EncodedImages(ImageFolder("photographs/train", transform))
    loader = Loader(files, 256, collate=encoded_batch, arrive=DeviceImages(transform), device="cuda")
    for batch in loader:
        pixels, labels = batch.value  # `Pixels` on the GPU

The random numbers are those of `ImageTransform`, drawn by the workers. The pixels are close to those of the CPU, but
not equal: NVJPEG's colours differ a little, and so does the arithmetic of resizing. RandAugment and colour jitter need
Pillow's operations, so they stay on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.data.headspace import loader_rate
from rooftop.data.image_folders import ImageFolder
from rooftop.data.image_transforms import Drawn, ImageTransform, box
from rooftop.data.loader import Loader
from rooftop.data.pieces import Damaged, Made, damage_in_words
from rooftop.data.pixels import Pixels
from rooftop.errors import InputError
from rooftop.media.images import ImageDecoder, upright_size
from rooftop.media.nvjpeg import missing

GROUP = 32  # photographs whose whole pixels are on the GPU at once
GAIN = 1.1  # of a GPU over the CPU, from which it decodes: it also has the model to compute
MEASURED_S = 3.0  # of each way


class Encoded(NamedTuple):
    """A photograph as a file, with its drawn changes and its name."""

    content: bytes
    drawn: Drawn
    name: str


class EncodedImages:
    """The files of an `ImageFolder`, which `DeviceImages` decodes.

    Args:
        images: its transform draws the changes.

    Raises:
        InputError: the transform has changes that only the CPU makes.
    """

    def __init__(self, images: ImageFolder) -> None:
        if not isinstance(images.transform, ImageTransform):
            raise InputError("a GPU decodes photographs only for an ImageTransform")
        if reason := only_on_cpu(images.transform):
            raise InputError(f"a GPU does not make these changes: {reason}; use the CPU (augment.decode=cpu)")
        self.images, self.transform = images, images.transform
        self.classes, self.labels, self.paths = images.classes, images.labels, images.paths

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Encoded, int]:
        return self._read(index, None)

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Encoded, int]:
        return self._read(index, generator)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def _read(self, index: int, generator: np.random.Generator | None) -> tuple[Encoded, int]:
        content, name = self.images.content(index), self.name(index)
        drawn = self.transform.draw(*upright_size(content, name), generator)
        return Encoded(content, drawn, name), self.labels[index]


def only_on_cpu(transform: ImageTransform) -> str:
    """The switches of a transform that only the CPU makes; "" if there are none."""
    augment = transform.augment
    switches = {"rand_augment": augment.rand_augment, "jitter": augment.jitter, "hue": augment.hue}
    return ", ".join(f"{name}={value:g}" for name, value in switches.items() if value and transform.train)


def encoded_batch(samples: Sequence[tuple[Encoded, int]]) -> tuple[list[Encoded], Tensor]:
    """A batch of files; its labels are (N,) int64."""
    return [each for each, _ in samples], torch.tensor([label for _, label in samples])


class DeviceImages:
    """Decodes, crops and resizes the files of a batch on the device.

    Args:
        transform: gives the size, and how images without a drawn crop are cut.
        decoder_of: makes the decoder of a device.
    """

    def __init__(
        self, transform: ImageTransform, decoder_of: Callable[[torch.device], ImageDecoder] = ImageDecoder
    ) -> None:
        self.transform, self._decoder_of = transform, decoder_of
        self._decoders: dict[torch.device, ImageDecoder] = {}

    def __call__(self, made: Made, device: torch.device | None, skip: bool) -> Made:
        """Replace the files of a batch by `Pixels` on the device; leave out damaged ones, or raise.

        Raises:
            InputError: a file is damaged, and damaged ones are not skipped; or the device is no GPU.
            NoImageDecoderError: NVJPEG is not available.
        """
        if made.value is None:
            return made
        files, labels = made.value
        decoder = self._decoder(device)
        images, kept, damaged = [], [], list(made.damaged)
        for start in range(0, len(files), GROUP):
            group = files[start : start + GROUP]
            found = decoder.decode_each([(each.content, each.name) for each in group])
            for place, (file, pixels) in enumerate(zip(group, found, strict=True), start):
                index = int(made.indices[place])
                if isinstance(pixels, Tensor):
                    images.append(self._changed(pixels, file.drawn))
                    kept.append(place)
                elif skip:
                    damaged.append(Damaged(index, file.name, str(pixels)))
                else:
                    raise InputError(damage_in_words(index, file.name, pixels)) from pixels
        erased = torch.tensor([files[place].drawn.erased or (0, 0, 0, 0) for place in kept], dtype=torch.int16)
        value = None
        if kept:
            stacked = torch.stack(images)
            value = [Pixels(stacked, _moved(erased, stacked.device)), _moved(labels[kept], stacked.device)]
        return Made(value, made.places[kept], made.indices[kept], tuple(damaged), made.finished)

    def _decoder(self, device: torch.device | None) -> ImageDecoder:
        if self._decoder_of is ImageDecoder and (device is None or device.type != "cuda"):
            raise InputError(
                f"augment.decode=gpu needs a GPU, but the training runs on {device}: use augment.decode=cpu"
            )
        device = device or torch.device("cpu")
        if device not in self._decoders:
            self._decoders[device] = self._decoder_of(device)
        return self._decoders[device]

    def _changed(self, pixels: Tensor, drawn: Drawn) -> Tensor:
        """(3, H, W) uint8, cropped, resized, flipped and shifted: (size, size, 3) uint8."""
        height, width = pixels.shape[1:]
        size = self.transform.size
        if drawn.crop is not None:
            x0, y0, x1, y1 = box(drawn.crop, width, height)
            image = _resized(pixels[:, y0:y1, x0:x1], size, size)
        else:
            side, short = self.transform.shorter_side, min(height, width)
            image = _resized(pixels, side * height // short, side * width // short)
            top, left = round((image.shape[1] - size) / 2), round((image.shape[2] - size) / 2)
            image = image[:, top : top + size, left : left + size]
        if drawn.flip:
            image = image.flip(2)
        if drawn.shift != (0, 0):
            right, down = drawn.shift
            image = F.pad(image, (right, -right, down, -down))  # black comes in
        return image.permute(1, 2, 0).contiguous()


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if pixels.shape[1:] == (height, width):
        return pixels
    values = F.interpolate(pixels[None].float(), (height, width), mode="bilinear", antialias=True)[0]
    return values.round_().clamp_(0, 255).byte()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# ---- the choice ------------------------------------------------------------------------------------------------------


class DecodingChoice(NamedTuple):
    """Which device decodes, "cpu" or "gpu", and the reason in words."""

    device: str
    why: str


def faster_decoding(
    images: ImageFolder,
    batch: int,
    device: torch.device,
    *,
    how: str = "auto",
    workers: int = 0,
    seconds: float = MEASURED_S,
    arrive: DeviceImages | None = None,
) -> DecodingChoice:
    """Measure how many photographs a second each device decodes, and choose.

    Args:
        images: with an `ImageTransform`.
        batch: photographs of a batch.
        device: device of the training.
        how, workers: of the loader.
        seconds: of each measurement.
        arrive: what decodes on the device.
    """
    assert isinstance(images.transform, ImageTransform)
    if reason := only_on_cpu(images.transform):
        return DecodingChoice("cpu", f"a GPU does not make these changes: {reason}")
    if arrive is None:
        if device.type != "cuda":
            return DecodingChoice("cpu", "the training runs on the CPU")
        if reason := missing(device) or "":
            return DecodingChoice("cpu", reason)
        arrive = DeviceImages(images.transform)
    options: dict[str, Any] = {"shuffle": True, "how": how, "workers": workers, "device": device, "on_damage": "skip"}
    size = min(batch, len(images))
    with (
        Loader(images, size, **options) as of_cpu,
        Loader(EncodedImages(images), size, collate=encoded_batch, arrive=arrive, **options) as of_gpu,
    ):
        cpu, gpu = (loader_rate(each, seconds)[0] for each in (of_cpu, of_gpu))
    chosen = "gpu" if gpu > GAIN * cpu else "cpu"
    return DecodingChoice(chosen, f"{gpu:,.0f} images/s by the GPU, {cpu:,.0f} by the CPU")
