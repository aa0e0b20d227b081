"""Crop, resize, flip and shift photographs that are on a device.

On a GPU, two Triton kernels change many photographs at once. On the CPU, and on a GPU without Triton, PyTorch's
operators change one photograph after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.data.image_transforms import Drawn, ImageTransform, box
from rooftop.launch.triton_launch import INTERPRETED, has_triton, launch

ROWS = 8  # rows that one program computes: of a crop in `resize_rows`, of the result in `resize_columns`
WARPS = 4


class Placed(NamedTuple):
    """A crop of a photograph, the size to which it is resized, and the position of the result in the resized crop.

    Attributes:
        box: left, top, right and bottom edge of the crop, in pixels.
        resized: height and width of the whole crop after resizing.
        corner: top and left edge of the result within the resized crop, in pixels.
    """

    box: tuple[int, int, int, int]
    resized: tuple[int, int]
    corner: tuple[int, int]


def changed(photographs: Sequence[Tensor], drawn: Sequence[Drawn], transform: ImageTransform) -> Tensor:
    """Crop, resize, flip and shift photographs; returns (N, size, size, 3) uint8.

    Args:
        photographs: (3, H, W) uint8 each, contiguous, on one device.
        drawn: the drawn changes of each photograph; only crop, flip and shift are applied.
        transform: determines the size, and how photographs without a drawn crop are cut.
    """
    device = photographs[0].device
    if (device.type == "cuda" or INTERPRETED) and has_triton():
        return _by_kernels(photographs, drawn, transform)
    return torch.stack([changed_by_torch(*each, transform) for each in zip(photographs, drawn, strict=True)])


def changed_by_torch(pixels: Tensor, drawn: Drawn, transform: ImageTransform) -> Tensor:
    """Crop, resize, flip and shift a (3, H, W) uint8 photograph; returns (size, size, 3) uint8."""
    size = transform.size
    (left, top, right, bottom), resized, (y, x) = _placed(pixels.shape[1], pixels.shape[2], drawn, transform)
    image = _resized(pixels[:, top:bottom, left:right], *resized)[:, y : y + size, x : x + size]
    if drawn.flip:
        image = image.flip(2)
    if drawn.shift != (0, 0):
        across, down = drawn.shift
        image = F.pad(image, (across, -across, down, -down))  # fills with black
    return image.permute(1, 2, 0).contiguous()


def _placed(height: int, width: int, drawn: Drawn, transform: ImageTransform) -> Placed:
    size = transform.size
    if drawn.crop is not None:
        return Placed(box(drawn.crop, width, height), (size, size), (0, 0))
    side, short = transform.shorter_side, min(height, width)
    resized = (side * height // short, side * width // short)
    corner = (round((resized[0] - size) / 2), round((resized[1] - size) / 2))
    return Placed((0, 0, width, height), resized, corner)


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if pixels.shape[1:] == (height, width):
        return pixels
    values = F.interpolate(pixels[None].float(), (height, width), mode="bilinear", antialias=True)[0]
    return values.round_().clamp_(0, 255).byte()


def _by_kernels(photographs: Sequence[Tensor], drawn: Sequence[Drawn], transform: ImageTransform) -> Tensor:
    from rooftop.data import crop_kernels

    device, size = photographs[0].device, transform.size
    starts, crops, scales, rows = [], [], [], 0
    start = 0
    for pixels, each in zip(photographs, drawn, strict=True):
        height, width = pixels.shape[1:]
        (left, top, right, bottom), resized, corner = _placed(height, width, each, transform)
        scale = ((bottom - top) / resized[0], (right - left) / resized[1])
        taps = [2 * math.ceil(max(value, 1.0)) + 1 for value in scale]
        across, down = each.shift
        part = (top, left, bottom - top, right - left)
        crops.append((*part, width, height * width, rows, *corner, *taps, each.flip, down, across))
        starts.append(start)
        scales.append(scale)
        start += pixels.numel()
        rows += bottom - top
    tables = [np.array(starts), np.array(crops, dtype=np.int32), np.array(scales, dtype=np.float32)]
    on_device = [moved(torch.from_numpy(table), device) for table in tables]
    pixels = torch.cat([each.reshape(-1) for each in photographs])
    between = torch.empty((rows, 3, size), dtype=torch.float32, device=device)
    out = torch.zeros((len(photographs), size, size, 3), dtype=torch.uint8, device=device)
    highest = max(crop[2] for crop in crops)
    constants = {"ROWS": ROWS, "COLUMNS": 1 << (size - 1).bit_length(), "num_warps": WARPS}
    grid = (-(-highest // ROWS), len(photographs))
    launch(crop_kernels.resize_rows, grid, device, pixels, *on_device, between, size, **constants)
    grid = (-(-size // ROWS), len(photographs))
    launch(crop_kernels.resize_columns, grid, device, between, *on_device[1:], out, size, **constants)
    return out


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
