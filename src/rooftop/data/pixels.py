"""Images that are copied to the device as uint8 and normalized on the device, so that only a quarter of the bytes of
float32 are copied.

transform = ImageTransform(224, {"crop": 0.35, "erase": 0.25}, train=True, normalize=False)
normalize = Normalizer()
for batch in Loader(ImageFolder("photographs/train", transform), 64, device="cuda"):
    images, labels = batch.value
    images = normalize(images)  # (64, 3, 224, 224) float32, bit-identical to a transform with normalize=True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.data.device_augment import ENTRIES, augmented
from rooftop.errors import InputError
from rooftop.media.images import MEAN, STD

NO_OPERATIONS = torch.zeros(0, ENTRIES, dtype=torch.float64)


class Pixels(NamedTuple):
    """An image that is not normalized yet, or a batch of such images.

    Attributes:
        values: (H, W, 3) or (N, H, W, 3) uint8.
        erased: (4,) or (N, 4) int16: top, left, bottom and right of the erased part, which is 0 after the
            normalization. All four are 0 if no part is erased.
        operations: (count, 9) or (N, count, 9) float64: operations of RandAugment that are not applied yet, from
            `device_augment.encoded`.
    """

    values: Tensor
    erased: Tensor
    operations: Tensor = NO_OPERATIONS


class Normalizer:
    """Augments and normalizes batches on their device. The host does not wait for the device.

    Args:
        mean, std: mean and standard deviation of the red, green and blue values in 0..1.
        channels_last: whether the result is channels last in memory.

    Raises:
        InputError: `mean` or `std` is not three numbers, or a standard deviation is not above 0.
    """

    def __init__(
        self, mean: Sequence[float] = MEAN, std: Sequence[float] = STD, *, channels_last: bool = False
    ) -> None:
        self._rows = [[255.0] * 3, *colour_constants(mean, std)]
        self._channels_last = channels_last
        self._constants: dict[torch.device, Tensor] = {}  # made once per device, because their copy waits for the GPU

    def __call__(self, pixels: Pixels) -> Tensor:
        """Apply the RandAugment operations of `pixels.operations`, then normalize.

        Returns (N, 3, H, W) float32: (value / 255 - mean) / std, and 0 where the image is erased.

        Raises:
            InputError: the pixels are not a batch.
        """
        values, erased, operations = Pixels(*pixels)
        if values.dim() != 4:
            raise InputError(
                f"pixels are {tuple(values.shape)}: expected a batch, (N, H, W, 3); for one image, use image()"
            )
        if operations.numel():  # by default there are none, and this empty tensor is on the CPU
            values = augmented(values, operations)
        normal = self._normal(values)
        top, left, bottom, right = erased.unbind(1)  # (N,) each
        height, width = values.shape[1:3]
        inside = _between(top, bottom, height)[:, :, None] & _between(left, right, width)[:, None]  # (N, H, W)
        normal.masked_fill_(inside[..., None], 0.0)
        images = normal.movedim(-1, 1)
        return images if self._channels_last else images.contiguous()

    def image(self, values: Tensor) -> Tensor:
        """Return (3, H, W) float32 for one image (H, W, 3) uint8."""
        return self._normal(values).movedim(-1, 0).contiguous()

    def _normal(self, values: Tensor) -> Tensor:
        constants = self._constants.get(values.device)
        if constants is None:
            constants = self._constants[values.device] = torch.tensor(self._rows, device=values.device)
        scale, mean, std = constants
        # divide by tensors: instead of dividing by a Python number, PyTorch multiplies by its rounded inverse
        return values.float().div_(scale).sub_(mean).div_(std)


def colour_constants(mean: Sequence[float], std: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Check the mean and the standard deviation of the three colours, and return both as tuples.

    Raises:
        InputError: not three numbers each, or a standard deviation is not above 0.
    """
    means, stds = tuple(mean), tuple(std)
    if len(means) != 3 or len(stds) != 3 or not all(value > 0 for value in stds):
        raise InputError(f"mean is {mean!r} and std is {std!r}: expected three numbers each, and std above 0")
    return means, stds


def _between(start: Tensor, end: Tensor, count: int) -> Tensor:
    """Mask (N, count), in which row n is True at positions `start[n]`..`end[n] - 1`; `start` and `end` are (N,)."""
    numbers = torch.arange(count, device=start.device, dtype=start.dtype)
    return (numbers >= start[:, None]) & (numbers < end[:, None])
