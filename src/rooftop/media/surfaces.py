"""Convert luma and chroma in a GPU's memory to a tensor of red, green and blue, by one kernel.

A surface is the output of a decoder: three planes, or a plane of luma and a plane of chroma pairs (NV12, P010). Rows in
memory may be longer than the picture. Samples of 10 and 12 bits are in the upper bits of 16-bit words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.launch.triton_launch import Repeated, require_triton
from rooftop.media.colours import Colours, chroma_factors, extents, pixels_a_sample
from rooftop.media.forms import Form

ROWS, COLUMNS = 4, 128  # pixels per Triton program
MOST_AT_ONCE = 8  # pictures per launch; the kernels have this many pointer parameters per plane


class Plane:
    """A plane of a picture in GPU memory that torch does not own. A `Plane` has the attributes of a tensor that kernels
    need, and is faster to create than a tensor.

    Args:
        pointer: address of the first sample.
        shape, strides: (rows, columns), in samples.
        dtype: uint8 or uint16.
        device: the GPU.
        owner: owner of the memory. This object, and tensors made from this object, keep the owner alive.
    """

    __slots__ = ("device", "dtype", "owner", "pointer", "shape", "strides")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, int],
        strides: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        owner: object,
    ) -> None:
        self.pointer, self.shape, self.strides = pointer, shape, strides
        self.dtype, self.device, self.owner = dtype, device, owner

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self, dimension: int) -> int:
        return self.strides[dimension]

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = self.element_size()
        return {
            "shape": self.shape,
            "typestr": "|u1" if size == 1 else "<u2",
            "data": (self.pointer, False),
            "strides": tuple(each * size for each in self.strides),
            "version": 3,
        }


def tensor_of(plane: Tensor | Plane) -> Tensor:
    """Return a tensor that shares the memory of a plane."""
    return plane if isinstance(plane, Tensor) else torch.as_tensor(plane, device=plane.device)


@dataclass(frozen=True)
class Surface:
    """A picture in a decoder's output format.

    Attributes:
        y: (H, W) uint8 or uint16; a tensor or a `Plane`, like u and v.
        u, v: (H', W') of Cb and Cr, with equal strides. H' is H, or a half or a quarter of H, rounded up; W' is derived
            from W in the same way.
        bits: significant bits of a sample, which are the upper bits of an 8-bit or 16-bit number.
        colours: colour matrix and range of the samples.
    """

    y: Tensor | Plane
    u: Tensor | Plane
    v: Tensor | Plane
    bits: int
    colours: Colours


class SurfaceLayout(NamedTuple):
    """Properties that all surfaces of a video share.

    Attributes:
        size, chroma: (rows, columns) of luma, and of each chroma plane.
        strides: row strides of luma and of chroma, and the column stride of chroma, in samples.
    """

    size: tuple[int, int]
    chroma: tuple[int, int]
    strides: tuple[int, int, int]
    element_bytes: int
    bits: int
    colours: Colours
    device: torch.device


def all_to_rgb(
    surfaces: Sequence[Surface],
    form: Form,
    turns: int = 0,
    mirrored: bool = False,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Convert each surface to (3, H, W), upright, in the requested form, on the surface's device. Consecutive surfaces
    of one layout share a launch.

    Args:
        surfaces: pictures on a GPU (or on the CPU, if Triton's kernels are interpreted).
        form: size, dtype and normalization.
        turns: quarter turns counterclockwise that make the pictures upright.
        mirrored: whether the turned pictures are then mirrored left to right.
        into: contiguous tensors to write to, one per surface, in the form's dtype; None allocates new tensors.

    Raises:
        ValueError: `into` has another number of tensors than `surfaces`, or a tensor of `into` has another dtype or is
            not contiguous.
    """
    if into is not None and (
        len(into) != len(surfaces) or any(each.dtype != form.dtype or not each.is_contiguous() for each in into)
    ):
        raise ValueError(f"into: expected {len(surfaces)} contiguous tensors of {form.dtype}, one for each picture")
    found: list[Tensor] = []
    for layout, group in groupby(surfaces, layout_of):
        whole = list(group)
        for start in range(0, len(whole), MOST_AT_ONCE):
            some = whole[start : start + MOST_AT_ONCE]
            kernel, upright = _conversion(layout, form, turns, mirrored, len(some))
            if into is None:
                outs = [torch.empty(3, *upright, dtype=form.dtype, device=layout.device) for _ in some]
            else:
                outs = list(into[len(found) : len(found) + len(some)])
            # unused pointer parameters repeat the pointers of the first picture
            filled = [*range(len(some)), *[0] * (MOST_AT_ONCE - len(some))]
            columns = ([each.y for each in some], [each.u for each in some], [each.v for each in some], outs)
            kernel(*[column[number] for column in columns for number in filled])  # type: ignore[index]
            found += outs
    return found


def layout_of(surface: Surface) -> SurfaceLayout:
    """The properties that decide which kernel converts a surface: its sizes, its strides (in elements), its bit depth
    and its colours."""
    y, u = surface.y, surface.u
    strides = (y.stride(0), u.stride(0), u.stride(1))
    size, chroma = (y.shape[0], y.shape[1]), (u.shape[0], u.shape[1])
    return SurfaceLayout(size, chroma, strides, y.element_size(), surface.bits, surface.colours, y.device)


@functools.lru_cache(maxsize=128)
def _conversion(
    layout: SurfaceLayout, form: Form, turns: int, mirrored: bool, count: int
) -> tuple[Repeated, tuple[int, int]]:
    """Return the kernel that converts `count` surfaces of a layout, ready to launch, and the (height, width) of the
    pictures that it writes."""
    require_triton()
    from rooftop.media import frame_kernels

    height, width = layout.size
    upright = form.resize or ((width, height) if turns % 2 else (height, width))
    rows, columns = upright[::-1] if turns % 2 else upright  # in the orientation of the surface
    origin, *steps = _placed(rows, columns, turns, mirrored, upright[1])
    strides = (*layout.strides, origin, upright[0] * upright[1], *steps)
    numbers = (*_matrix(layout, form.white), *_gains(form))
    constants = {
        "DOWN": pixels_a_sample(height, layout.chroma[0]),
        "ACROSS": pixels_a_sample(width, layout.chroma[1]),
        "ROUND": not form.dtype.is_floating_point,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
    }
    grid = (-(-rows // ROWS), -(-columns // COLUMNS), count)
    kernel = frame_kernels.frame_to_rgb
    arguments: tuple[float, ...] = (height, width, *strides, *numbers)
    if (rows, columns) != (height, width):
        kernel = frame_kernels.frame_to_resized_rgb
        down_by, across_by = height / rows, width / columns
        taps = (math.ceil(2 * max(down_by, 1)) + 1, math.ceil(2 * max(across_by, 1)) + 1)
        arguments = (height, width, rows, columns, down_by, across_by, *taps, *strides, *numbers)
    pointers = 4 * MOST_AT_ONCE  # for y, u, v and results
    arguments = (*[0] * pointers, *arguments)
    return Repeated(kernel, grid, layout.device, arguments, range(pointers), **constants), upright


def _placed(rows: int, columns: int, turns: int, mirrored: bool, width: int) -> tuple[int, int, int]:
    """Offsets of the surface's pixels in an upright plane of this width: (offset of the first pixel, step per row, step
    per column).
    """
    # the upright row i and column j of a surface's pixel: (constant, factor of the surface's row, factor of its column)
    i, j = (0, 1, 0), (0, 0, 1)
    size = (rows, columns)
    for _ in range(turns % 4):  # (i, j) goes to (width - 1 - j, i)
        i, j = (size[1] - 1 - j[0], -j[1], -j[2]), i
        size = size[::-1]
    if mirrored:
        j = (size[1] - 1 - j[0], -j[1], -j[2])
    origin, of_row, of_column = (a * width + b for a, b in zip(i, j, strict=True))
    return origin, of_row, of_column


def _matrix(layout: SurfaceLayout, white: float) -> tuple[float, ...]:
    """Compute the value of black, the middle of chroma, and the factors that turn luma and chroma into colours in
    0..white."""
    unit = 1 << (8 * layout.element_bytes - layout.bits)
    black, luma, chroma = (each * unit for each in extents(layout.colours.full_range, layout.bits))
    middle = (1 << (layout.bits - 1)) * unit
    red_cr, green_cr, green_cb, blue_cb = (white / chroma * each for each in chroma_factors(layout.colours.matrix))
    return (float(black), float(middle), white / luma, red_cr, green_cb, green_cr, blue_cb, white)


def _gains(form: Form) -> tuple[float, ...]:
    mean, std = form.mean or (0.0, 0.0, 0.0), form.std or (1.0, 1.0, 1.0)
    return (*(1 / each for each in std), *(-a / b for a, b in zip(mean, std, strict=True)))
