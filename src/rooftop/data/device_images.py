"""Decode, crop and resize JPEG photographs on a GPU; the CPU only reads the files.

    files = EncodedImages(ImageFolder("photographs/train", transform))
    loader = Loader(files, 256, collate=encoded_batch, arrive=DeviceImages(transform), device="cuda")
    for batch in loader:
        pixels, labels = batch.value  # `Pixels` on the GPU

The loader's workers draw the random changes of each photograph by `ImageTransform`, so the crops and flips are the same
as with decoding on the CPU. A GPU's pixels are close to the CPU's but not equal: NVJPEG's colours and the arithmetic of
resizing differ slightly. RandAugment runs on the batch after decoding (`device_augment`). Colour jitter needs Pillow's
operations, so it stays on the CPU.

A GPU that decodes all photographs has less time for the training step. So the CPU can decode a fixed part of the
photographs: `share` is the fraction that the GPU decodes. The CPU decodes the same photographs in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from rooftop.data.device_crops import changed, moved
from rooftop.data.headspace import loader_rate
from rooftop.data.image_folders import ImageFolder
from rooftop.data.image_transforms import Drawn, ImageTransform
from rooftop.data.loader import Loader
from rooftop.data.pieces import TO_SKIP, Damaged, Made, collated, damage_in_words
from rooftop.data.pixels import Pixels
from rooftop.errors import InputError
from rooftop.media.images import ImageDecoder, ImageFile
from rooftop.media.nvjpeg import missing

# maximum number of pixels of the photographs that are on the GPU at the same time: 192 MiB, or 350 photographs of
# 500 x 375
GROUP_PIXELS = 64 << 20
GAIN = 2.5
"""The GPU is chosen if it decodes more than this many times as many images per second as the CPU.

Suppose that the CPU decodes C images/s, that the GPU decodes G images/s, and that the training step alone processes S
images/s. A GPU that decodes and then trains processes 1 / (1/G + 1/S) images/s. This rate exceeds C if
G > C * S / (S - C). S is not known yet, and is assumed to be 1.67 * C.
On H200s with 16 cores, decoding on the GPU gained 9% for ResNet-50 (G = 2.9 * C), and lost 35% for Swin-T
(G = 2.1 * C).
"""
MEASURED_S = 3.0  # seconds to measure each device
NO_VALUES = torch.empty(0, dtype=torch.uint8)
GOLDEN = 2654435769  # 2^32 divided by the golden ratio: its multiples modulo 2^32 are spread evenly


class Encoded(NamedTuple):
    """An undecoded photograph, with its drawn changes."""

    file: ImageFile
    drawn: Drawn


@dataclass(frozen=True)
class EncodedBatch:
    """A batch that consists of undecoded files and of images that the CPU has decoded.

    The contents of the files are one tensor, so that a worker process of the loader passes them to the training process
    in shared memory.

    Attributes:
        content: uint8, the concatenated contents of all files.
        ends: index in `content` of the end of each file.
        files: the descriptions of the files, without the contents.
        drawn: the drawn changes of each file.
        places: positions of the files in the batch; the other positions belong to `decoded`, in order.
        decoded: the decoded images; None if there are none.
    """

    content: Tensor
    ends: list[int]
    files: list[ImageFile]
    drawn: list[Drawn]
    places: list[int]
    decoded: Pixels | None = None

    @classmethod
    def of(cls, samples: Sequence[Encoded | Pixels]) -> EncodedBatch:
        """Make a batch: concatenate the contents of the samples that are undecoded files, and stack the samples that
        are decoded images."""
        files = [(place, each) for place, each in enumerate(samples) if isinstance(each, Encoded)]
        contents = [np.frombuffer(each.file.content, np.uint8) for _, each in files]
        decoded = [each for each in samples if isinstance(each, Pixels)]
        return cls(
            torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *contents])),
            np.cumsum([len(each) for each in contents]).tolist(),
            [replace(each.file, content=b"") for _, each in files],
            [each.drawn for _, each in files],
            [place for place, _ in files],
            collated(decoded, default_collate) if decoded else None,
        )

    def decoded_places(self) -> list[int]:
        """The positions of the decoded images in the batch."""
        count = 0 if self.decoded is None else len(self.decoded.values)
        return sorted(set(range(len(self.files) + count)).difference(self.places))

    def whole_files(self) -> list[ImageFile]:
        """The files with their contents, which are views of `content`."""
        whole = self.content.numpy().data
        starts = [0, *self.ends][:-1]
        return [
            replace(file, content=whole[start:end])
            for file, start, end in zip(self.files, starts, self.ends, strict=True)
        ]

    def groups(self) -> Iterator[range]:
        """Split the files into groups of at most `GROUP_PIXELS` pixels (or one file); yields each group's range of
        indices in `files`."""
        start, pixels = 0, 0
        for place, file in enumerate(self.files):
            pixels += file.shape[0] * file.shape[1]
            if place > start and pixels > GROUP_PIXELS:
                yield range(start, place)
                start, pixels = place, file.shape[0] * file.shape[1]
        if start < len(self.files):
            yield range(start, len(self.files))


class EncodedImages:
    """The undecoded files of an `ImageFolder`, for `DeviceImages` to decode.

    Args:
        images: the data set, whose transform draws the changes. With a share below 1, the transform must not normalize.
        share: fraction of the files that `DeviceImages` decodes, above 0 and up to 1. The CPU decodes all other files,
            as `images` does. The index of a file alone determines which device decodes the file.

    Raises:
        InputError: the transform is not an `ImageTransform`, normalizes although the share is below 1, or has changes
            that only the CPU can make; or the share is out of range.
    """

    def __init__(self, images: ImageFolder, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share of files for the GPU is {share!r}: expected a number above 0, up to 1")
        if not isinstance(images.transform, ImageTransform):
            raise InputError("decoding on a GPU needs a data set whose transform is an ImageTransform")
        if share < 1 and images.transform.normalize:
            raise InputError(
                f"share is {share}: images that the CPU decodes must not be normalized yet: pass normalize=False to "
                "the transform"
            )
        if reason := only_on_cpu(images.transform):
            raise InputError(f"a GPU cannot apply {reason}: decode on the CPU (augment.decode=cpu)")
        self.images, self.transform, self.share = images, images.transform, share
        self.classes, self.labels, self.paths = images.classes, images.labels, images.paths

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Encoded | Pixels, int]:
        return self._read(index, None) if self._by_device(index) else self.images[index]

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Encoded | Pixels, int]:
        return self._read(index, generator) if self._by_device(index) else self.images.draw(index, generator)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def _by_device(self, index: int) -> bool:
        return index * GOLDEN % (1 << 32) < self.share * (1 << 32)

    def _read(self, index: int, generator: np.random.Generator | None) -> tuple[Encoded, int]:
        file = ImageFile.of(self.images.content(index), self.name(index))
        return Encoded(file, self.transform.draw(*file.upright_size, generator)), self.labels[index]


def only_on_cpu(transform: ImageTransform) -> str:
    """Name the changes of a transform that only the CPU can make; "" if there are none."""
    augment = transform.augment
    operations = 0 if transform.later else augment.rand_augment
    switches = {"rand_augment": operations, "jitter": augment.jitter, "hue": augment.hue}
    return ", ".join(f"{name}={value:g}" for name, value in switches.items() if value and transform.train)


def encoded_batch(samples: Sequence[tuple[Encoded | Pixels, int]]) -> tuple[EncodedBatch, Tensor]:
    """Collate undecoded files, decoded images and labels into a batch. The labels become (N,) int64."""
    return EncodedBatch.of([each for each, _ in samples]), torch.tensor([label for _, label in samples])


class DeviceImages:
    """Decodes, crops and resizes the files of a batch on the device.

    Args:
        transform: determines the size, and how images without a drawn crop are cut.
        decoder_of: creates the decoder for a device.
    """

    def __init__(
        self, transform: ImageTransform, decoder_of: Callable[[torch.device], ImageDecoder] = ImageDecoder
    ) -> None:
        self.transform, self._decoder_of = transform, decoder_of
        self._decoders: dict[torch.device, ImageDecoder] = {}

    def __call__(self, made: Made, device: torch.device | None, skip: bool) -> Made:
        """Replace the files of a batch by `Pixels` on the device. If `skip` is set, damaged files are left out.

        Raises:
            InputError: a file is damaged and damaged files are not skipped, or the device is not a GPU.
            NoImageDecoderError: NVJPEG is not available.
        """
        if made.value is None:
            return made
        batch, labels = made.value
        decoder, files = self._decoder(device), batch.whole_files()
        results, left, kept, damaged = [], [], [], list(made.damaged)
        for group in batch.groups():
            images, whole = decoder.decode_each([files[number] for number in group]), []
            for number, pixels in zip(group, images, strict=True):
                place, drawn = batch.places[number], batch.drawn[number]
                index, name = int(made.indices[place]), files[number].name
                if isinstance(pixels, Tensor):
                    whole.append((pixels, drawn))
                    left.append(self.transform.pixels(NO_VALUES, drawn))
                    kept.append(place)
                elif skip:
                    damaged.append(Damaged(index, name, str(pixels)))
                else:
                    raise InputError(f"{damage_in_words(index, name, pixels)}{TO_SKIP}") from pixels
            if whole:
                results.append(changed([each for each, _ in whole], [drawn for _, drawn in whole], self.transform))
        changes = [[each.erased for each in left], [each.operations for each in left]]
        if batch.decoded is not None:
            results.append(moved(batch.decoded.values, decoder.device))
            changes[0] += batch.decoded.erased
            changes[1] += batch.decoded.operations
            kept += batch.decoded_places()
        if not kept:
            return Made(None, made.places[kept], made.indices[kept], tuple(damaged), made.finished)
        values, order = torch.cat(results) if len(results) > 1 else results[0], np.argsort(kept)
        if batch.decoded is not None and batch.files:
            values = values.index_select(0, moved(torch.from_numpy(order), values.device))
        kept = sorted(kept)
        erased, operations = (moved(torch.stack(each)[order], values.device) for each in changes)
        value = [Pixels(values, erased, operations), moved(labels[kept], values.device)]
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
    """Measure how many photographs a second the CPU and the GPU decode, and choose.

    The GPU is chosen only if it decodes more than `GAIN` times as many as the CPU, because the GPU also has to train.

    Args:
        images: a data set with an `ImageTransform`.
        batch: number of photographs in a batch.
        device: the device that trains.
        how, workers: as in `Loader`.
        seconds: duration of each measurement.
        arrive: decodes a batch on the device. If None, a `DeviceImages` decodes; then the CPU is chosen without a
            measurement if `device` is not a GPU or has no NVJPEG.
    """
    assert isinstance(images.transform, ImageTransform)
    if reason := only_on_cpu(images.transform):
        return DecodingChoice("cpu", f"a GPU cannot apply {reason}")
    if arrive is None:
        if device.type != "cuda":
            return DecodingChoice("cpu", "the training runs on the CPU")
        if lacking := missing(device):
            return DecodingChoice("cpu", lacking)
        arrive = DeviceImages(images.transform)
    options: dict[str, Any] = {"shuffle": True, "how": how, "workers": workers, "device": device, "on_damage": "skip"}
    size = min(batch, len(images))
    with (
        Loader(images, size, **options) as of_cpu,
        Loader(EncodedImages(images), size, collate=encoded_batch, arrive=arrive, **options) as of_gpu,
    ):
        cpu, gpu = (loader_rate(each, seconds)[0] for each in (of_cpu, of_gpu))
    chosen = "gpu" if gpu > GAIN * cpu else "cpu"
    why = f"{gpu:,.0f} images/s by the GPU, {cpu:,.0f} by the CPU"
    if cpu < gpu <= GAIN * cpu:
        why += f"; the GPU also has to train, so it should decode {GAIN:g} times as many"
    return DecodingChoice(chosen, why)
