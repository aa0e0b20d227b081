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
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError
from rooftop.launch.triton_launch import launch

ONE_BITS = 22  # a weight of 1 is 2**22
MOST_VALUES = 2**31 - 1  # most values of one image, because a kernel counts an image's values in int32
MOST_SIDE = 65535  # rows of a result, and photographs of a batch: limits of a CUDA grid
BLOCK, WARPS = 512, 4


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
        return (
            self.interpolation in FILTERS
            and not self._columns_first(width, height)
            and self.result[1] <= MOST_SIDE
            and max(3 * height * width, 3 * height * self.result[0], 3 * math.prod(self.result)) <= MOST_VALUES
        )

    def _columns_first(self, width: int, height: int) -> bool:
        """Whether any version of Pillow resizes the height before the width, which rounds differently. Pillow 13 does
        so if the height loses more than twice as many pixels as the width. Pillow 12.2 does so if the height shrinks
        and the photograph is more than 100 times as high as wide before the resize."""
        less = height - self.size[1]
        return less > 0 and (less > 2 * (width - self.size[0]) or height > 100 * width)

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
            are stored in the order of (height, width, 3).
        changes: the `Resize` of each photograph.

    Returns:
        One (N, H, W, 3) uint8 if all results have the same size; if not, a (1, H, W, 3) for each photograph.

    Raises:
        InputError: a photograph does not lie inside `pixels`, a result is empty, or `Resize.runs_on_device` is False
            for a photograph.
    """
    from rooftop.media import pillow_resize_kernels as kernels

    if pixels.dim() != 1 or pixels.dtype != torch.uint8 or not pixels.is_contiguous():
        raise InputError(
            f"pixels have shape {tuple(pixels.shape)}, dtype {pixels.dtype} and strides {pixels.stride()}: expected "
            "(bytes,) uint8, contiguous"
        )
    if len(photographs) != len(changes) or not 0 < len(photographs) <= MOST_SIDE:
        raise InputError(
            f"got {len(photographs)} photographs and {len(changes)} changes: expected one change for each "
            f"photograph, and 1 to {MOST_SIDE} photographs"
        )
    tables = _Tables()
    kinds: dict[tuple[int, int, Resize], int] = {}  # most photographs of a batch have the same size
    kind_of = [
        kinds.setdefault((height, width, change), len(kinds))
        for (_, height, width), change in zip(photographs, changes, strict=True)
    ]
    starts = np.array([start for start, _, _ in photographs])
    values = np.array([3 * height * width for height, width, _ in kinds])
    outside = (starts < 0) | (starts + values[kind_of] > len(pixels))
    if outside.any():
        start, height, width = photographs[int(outside.argmax())]
        raise InputError(
            f"a photograph of {width} x {height} pixels starts at byte {start}: expected one that lies inside the "
            f"{len(pixels):,} bytes of pixels"
        )
    entries = np.array([tables.entry(*kind) for kind in kinds])[kind_of]
    entries[:, kernels.START.value] += starts
    # bytes of each photograph's resized rows, and of its result
    rows = 3 * entries[:, kernels.ROWS.value] * entries[:, kernels.WIDTH.value]
    results = 3 * entries[:, kernels.HEIGHT.value] * entries[:, kernels.WIDTH.value]
    ends_of_rows, ends = rows.cumsum(), results.cumsum()
    entries[:, kernels.BETWEEN.value], entries[:, kernels.OUT.value] = ends_of_rows - rows, ends - results
    device = pixels.device
    on_device = [_moved(each, device) for each in (entries, np.concatenate(tables.tables))]
    between = torch.empty(int(ends_of_rows[-1]), dtype=torch.uint8, device=device)
    out = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
    width, height = (max(change.result[axis] for change in changes) for axis in (0, 1))
    for kernel, source, to, grid in (
        (kernels.resize_across, pixels, between, (-(-int(rows.max()) // (3 * BLOCK)), len(photographs))),
        (kernels.resize_down, between, out, (-(-3 * width // BLOCK), height, len(photographs))),
    ):
        launch(kernel, grid, device, source, *on_device, to, BLOCK=BLOCK, num_warps=WARPS)
    sizes = [change.result[::-1] for change in changes]
    if len(set(sizes)) == 1:
        return [out.view(len(sizes), *sizes[0], 3)]
    parts = out.split(results.tolist())
    return [part.view(1, *size, 3) for part, size in zip(parts, sizes, strict=True)]


class _Tables:
    """The weights that a batch needs, each axis only once.

    Attributes:
        tables: the weights of each axis, flattened. Concatenated, they are the kernels' argument `tables`.
    """

    def __init__(self) -> None:
        self.tables: list[np.ndarray] = []
        self._places: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
        self._end = 0

    def entry(self, height: int, width: int, change: Resize) -> list[int]:
        """A row of the kernels' table of photographs, for a photograph that begins at index 0 of `pixels`. The caller
        adds the index of the photograph's first byte to START, and sets BETWEEN and OUT, which are 0 here."""
        _check(height, width, change)
        left, top, right, bottom = change.box or (0, 0, *change.size)
        column_table, column_taps, column, _ = self._placed(
            width, change.size[0], left, right - left, change.interpolation
        )
        row_table, row_taps, row, rows = self._placed(height, change.size[1], top, bottom - top, change.interpolation)
        start = 3 * (row * width + column)
        across = [start, 3 * width, rows, right - left, column_table, column_taps]
        return [*across, bottom - top, row_table, row_taps, 0, 0]

    def _placed(self, *axis: Any) -> tuple[int, int, int, int]:
        """The index of an axis's first weight in the concatenated tables, the number of weights per result pixel, the
        first pixel that contributes to any kept result pixel, and the number of pixels from there to the last one that
        contributes. `axis` has the arguments of `_table`."""
        if axis not in self._places:
            table, first, count = _table(*axis)
            self._places[axis] = self._end, table.shape[1] - 1, first, count
            self.tables.append(table.reshape(-1))
            self._end += table.size
        return self._places[axis]


def _check(height: int, width: int, change: Resize) -> None:
    if min(height, width, *change.size, *change.result) < 1:
        raise InputError(f"{change} of {width} x {height} pixels: expected sizes of at least 1 x 1 pixel")
    if not change.runs_on_device(width, height):
        names = " or ".join(each.name for each in FILTERS)
        raise InputError(
            f"{change} of {width} x {height} pixels: expected the filter {names}, sizes for which every version of "
            f"Pillow resizes rows first, a result of at most {MOST_SIDE} rows, and fewer than 2**31 values in each of "
            "the photograph, its resized rows and the result; use Resize.by_pillow"
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
        first, count: the first result pixel that is kept, and the number of kept pixels. Pixels outside of 0 to
            `results` - 1 have weights of 0.

    Returns:
        (table, smallest, number). `table` is (count, 1 + taps) int32: for each kept result pixel, the first pixel that
        contributes, counted from `smallest`, and the integer weights of this pixel and the following ones. `smallest`
        is the first pixel that contributes to any of them. `number` is the number of pixels from `smallest` to the last
        one that contributes.
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
