"""Resize and crop photographs on a GPU, to exactly the pixels that Pillow computes.

    change = Resize((341, 256), box=(58, 16, 282, 240))
    change.by_pillow(image)                                      # on the CPU
    resized_on_device(pixels, [(0, 375, 500)], [change])         # on the GPU: (1, 224, 224, 3) uint8

Pillow resizes rows, rounds them to uint8, and then resizes columns. Its weights are integers: 2**22 stands for 1. So
the results do not depend on the order of the sums, and a GPU computes the same pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError
from rooftop.launch.triton_launch import launch

ONE_BITS = 22  # a weight of 1 is 2**22
MOST_VALUES = 2**31 - 1  # values of an image that a kernel counts in int32
BLOCK, WARPS = 512, 4
PILLOW = int(PIL.__version__.split(".")[0])


@dataclass(frozen=True)
class Resize:
    """A resize of a whole photograph, and the part of the result that is kept.

    Attributes:
        size: width and height of the whole photograph after the resize, in pixels.
        box: left, top, right and bottom edge of the kept part, in pixels of the resized photograph. Pixels outside the
            photograph are black. None: everything is kept.
        interpolation: Pillow's filter.
    """

    size: tuple[int, int]
    box: tuple[int, int, int, int] | None = None
    interpolation: Image.Resampling = Image.Resampling.BILINEAR

    @property
    def result(self) -> tuple[int, int]:
        """Width and height of the result."""
        if self.box is None:
            return self.size
        left, top, right, bottom = self.box
        return right - left, bottom - top

    def runs_on_device(self, width: int, height: int) -> bool:
        """Whether `resized_on_device` gives Pillow's pixels for a photograph of this size."""
        return self.interpolation in FILTERS and not self._columns_first(width, height)

    def _columns_first(self, width: int, height: int) -> bool:
        """Whether Pillow resizes columns before rows. Pillow 13 does so if the height loses more than twice as many
        pixels as the width."""
        less = height - self.size[1]
        return PILLOW >= 13 and less > 0 and less > 2 * (width - self.size[0])

    def by_pillow(self, image: Image.Image) -> Image.Image:
        """Resize and crop an image on the CPU."""
        image = image.resize(self.size, self.interpolation)
        return image if self.box is None else image.crop(self.box)


def resized_on_device(
    pixels: Tensor, photographs: Sequence[tuple[int, int, int]], changes: Sequence[Resize]
) -> list[Tensor]:
    """Resize and crop photographs by Triton kernels.

    Args:
        pixels: (bytes,) uint8 on a GPU, contiguous: the RGB values of all photographs.
        photographs: for each photograph, the index of its first byte in `pixels`, its height and its width. Its values
            are (height, width, 3).
        changes: the change of each photograph.

    Returns:
        One (N, H, W, 3) uint8 if all results have the same size; if not, a (1, H, W, 3) for each photograph.

    Raises:
        InputError: a photograph does not lie inside `pixels`, a result is empty, a photograph or result has 2**31
            values or more, or `Resize.runs_on_device` is False for a photograph.
    """
    from rooftop.media import pillow_resize_kernels as kernels

    _check(pixels, photographs, changes)
    tables: list[np.ndarray] = []
    places: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
    end_of_tables = 0

    def placed(*axis: object) -> tuple[int, int, int, int]:
        """Add the table of an axis. Return the table's place and its weights per result, and the first pixel that
        contributes to a result and the number of pixels up to the last one."""
        nonlocal end_of_tables
        if axis not in places:
            table, first, count = _table(*axis)  # type: ignore[arg-type]
            places[axis] = end_of_tables, table.shape[1] - 1, first, count
            tables.append(table.reshape(-1))
            end_of_tables += table.size
        return places[axis]

    entries = np.empty((len(photographs), kernels.ENTRIES.value), np.int64)
    between = out = most_between = most_out = 0
    for entry, (start, height, width), change in zip(entries, photographs, changes, strict=True):
        left, top, right, bottom = change.box or (0, 0, *change.size)
        across = placed(width, change.size[0], left, right - left, change.interpolation)
        down = placed(height, change.size[1], top, bottom - top, change.interpolation)
        start += 3 * (down[2] * width + across[2])
        entry[:] = start, 3 * width, down[3], right - left, *across[:2], bottom - top, *down[:2], between, out
        between += down[3] * (right - left) * 3
        out += (bottom - top) * (right - left) * 3
        most_between = max(most_between, down[3] * (right - left))
        most_out = max(most_out, (bottom - top) * (right - left) * 3)
    on_device = [_moved(each, pixels.device) for each in (entries, np.concatenate(tables))]
    rows = torch.empty(between, dtype=torch.uint8, device=pixels.device)
    results = torch.empty(out, dtype=torch.uint8, device=pixels.device)
    for kernel, source, to, most in (
        (kernels.resize_across, pixels, rows, most_between),
        (kernels.resize_down, rows, results, most_out),
    ):
        grid = (-(-most // BLOCK), len(photographs))
        launch(kernel, grid, pixels.device, source, *on_device, to, BLOCK=BLOCK, num_warps=WARPS)
    sizes = [change.result[::-1] for change in changes]
    if len(set(sizes)) == 1:
        return [results.view(len(sizes), *sizes[0], 3)]
    parts = results.split([3 * height * width for height, width in sizes])
    return [part.view(1, *size, 3) for part, size in zip(parts, sizes, strict=True)]


def _check(pixels: Tensor, photographs: Sequence[tuple[int, int, int]], changes: Sequence[Resize]) -> None:
    if pixels.dim() != 1 or pixels.dtype != torch.uint8 or not pixels.is_contiguous():
        raise InputError(
            f"pixels have shape {tuple(pixels.shape)}, dtype {pixels.dtype} and strides {pixels.stride()}: expected "
            "(bytes,) uint8, contiguous"
        )
    if not photographs or len(photographs) != len(changes):
        raise InputError(
            f"got {len(photographs)} photographs and {len(changes)} changes: expected one change for each of at least "
            "one photograph"
        )
    for (start, height, width), change in zip(photographs, changes, strict=True):
        values = 3 * height * width
        if height < 1 or width < 1 or start < 0 or start + values > len(pixels):
            raise InputError(
                f"a photograph of {width} x {height} pixels starts at byte {start}: expected one that lies inside the "
                f"{len(pixels):,} bytes of pixels"
            )
        if min(*change.size, *change.result) < 1:
            raise InputError(f"{change}: expected a size and a box of at least 1 x 1 pixel")
        if not change.runs_on_device(width, height):
            names = " or ".join(each.name for each in FILTERS)
            raise InputError(
                f"{change} of {width} x {height} pixels: expected the filter {names}, and a size for which Pillow "
                "resizes rows first; use Resize.by_pillow"
            )
        rows = 3 * height * change.result[0]
        if max(values, rows, 3 * math.prod(change.result)) > MOST_VALUES:
            raise InputError(
                f"a photograph of {width} x {height} pixels, resized to {change.result[0]} x {change.result[1]}, has "
                "2**31 values or more: resize it by Pillow"
            )


def _moved(table: np.ndarray, device: torch.device) -> Tensor:
    """Copy a table to the device; the host does not wait."""
    tensor = torch.from_numpy(table)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# ---- Pillow's weights ------------------------------------------------------------------------------------------------


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5."""
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


FILTERS: dict[Image.Resampling, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    Image.Resampling.BILINEAR: (_triangle, 1.0),
    Image.Resampling.BICUBIC: (_cubic, 2.0),
}
"""Filter -> its function, and the distance from the centre, in pixels, beyond which the function is 0."""


@functools.lru_cache(maxsize=4096)
def _table(
    pixels: int, results: int, first: int, count: int, interpolation: Image.Resampling
) -> tuple[np.ndarray, int, int]:
    """Pillow's weights for resizing an axis of `pixels` pixels to `results` pixels.

    Args:
        first, count: the first result pixel that is kept, and the number of kept pixels. Some may lie outside the axis.

    Returns:
        The table, (count, 1 + taps) int32: for each kept result pixel, the first pixel that contributes, and the
        integer weights of this pixel and the following ones. First pixels are counted from the smallest of them. Then
        this smallest first pixel, and the number of pixels from there to the last one that contributes.
    """
    weigh, distance = FILTERS[interpolation]
    scale = pixels / results
    wide = max(scale, 1.0)
    support = distance * wide
    place = np.arange(first, first + count)
    inside = (place >= 0) & (place < results)
    centre = (place + 0.5) * scale
    begin = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), pixels)
    end = np.where(inside, end, begin)
    position = begin[:, None] + np.arange(max(1, int((end - begin).max())))
    weights = weigh((position - centre[:, None] + 0.5) * (1.0 / wide))
    weights[position >= end[:, None]] = 0.0
    total = np.zeros(count)
    for each in weights.T:  # in this order, as Pillow adds them
        total += each
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    whole = np.trunc(weights * (1 << ONE_BITS) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    if not inside.any():
        return np.zeros((count, 2), np.int32), 0, 1
    smallest, last = int(begin[inside].min()), int(end[inside].max())
    table = np.concatenate([np.where(inside, begin - smallest, 0)[:, None].astype(np.int32), whole], 1)
    return table, smallest, last - smallest
