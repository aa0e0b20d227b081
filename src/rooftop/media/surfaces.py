"""Luma and chroma in a GPU's memory as a tensor of red, green and blue, by one kernel.

A surface is what a decoder writes: NV12 and P010 (a plane of luma, one of pairs of chroma), or three planes. Rows may
be longer than the picture, and numbers of 10 and 12 bits stand in the upper bits of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.launch.triton_launch import launch, require_triton
from rooftop.media.colours import WEIGHTS, Colours, extents, pixels_a_sample
from rooftop.media.forms import Form

ROWS, COLUMNS = 4, 128  # pixels of a program


@dataclass(frozen=True)
class Surface:
    """A picture as a decoder leaves it.

    Attributes:
        y: (H, W) uint8 or uint16.
        u, v: (H', W') of Cb and Cr, of like strides; H' is H or half of it rounded up (or a quarter), W' likewise.
        bits: of a number, the upper ones of its 8 or 16.
        colours: what the numbers mean.
    """

    y: Tensor
    u: Tensor
    v: Tensor
    bits: int
    colours: Colours


def to_rgb(surface: Surface, form: Form, turns: int = 0, mirrored: bool = False) -> Tensor:
    """(3, H, W), upright, as `form` says, on the device of the surface.

    Args:
        surface: of the picture, on a GPU (or on the CPU, where Triton's kernels are interpreted).
        form: size, dtype and normalization.
        turns: quarter turns counterclockwise that put it upright.
        mirrored: whether it is then mirrored left to right.
    """
    require_triton()
    from rooftop.media import frame_kernels

    y, u, v = surface.y, surface.u, surface.v
    height, width = y.shape
    upright = form.resize or ((width, height) if turns % 2 else (height, width))
    out = torch.empty(3, *upright, dtype=form.dtype, device=y.device)
    rows, columns = upright[::-1] if turns % 2 else upright  # as the surface lies
    placed = (*_placed(rows, columns, turns, mirrored, upright[1]),)
    numbers = (*_matrix(surface, form.white), *_gains(form))
    constants = {
        "DOWN": pixels_a_sample(height, u.shape[0]),
        "ACROSS": pixels_a_sample(width, u.shape[1]),
        "ROUND": not form.dtype.is_floating_point,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
    }
    strides = (y.stride(0), u.stride(0), u.stride(1), placed[0], out.stride(0), *placed[1:])
    grid = (-(-rows // ROWS), -(-columns // COLUMNS))
    if (rows, columns) == (height, width):
        launch(frame_kernels.frame_to_rgb, grid, y.device, y, u, v, out, height, width, *strides, *numbers, **constants)
        return out
    down_by, across_by = height / rows, width / columns
    taps = (math.ceil(2 * max(down_by, 1)) + 1, math.ceil(2 * max(across_by, 1)) + 1)
    sizes = (height, width, rows, columns, down_by, across_by, *taps)
    launch(frame_kernels.frame_to_resized_rgb, grid, y.device, y, u, v, out, *sizes, *strides, *numbers, **constants)
    return out


def _placed(rows: int, columns: int, turns: int, mirrored: bool, width: int) -> tuple[int, int, int]:
    """Where (row, column) of the surface lies in an upright plane of this width: (origin, of a row, of a column)."""
    i, j = (0, 1, 0), (0, 0, 1)  # the place upright: (constant, times the row, times the column)
    size = (rows, columns)
    for _ in range(turns % 4):  # (i, j) goes to (width - 1 - j, i)
        i, j = (size[1] - 1 - j[0], -j[1], -j[2]), i
        size = size[::-1]
    if mirrored:
        j = (size[1] - 1 - j[0], -j[1], -j[2])
    origin, of_row, of_column = (a * width + b for a, b in zip(i, j, strict=True))
    return origin, of_row, of_column


def _matrix(surface: Surface, white: float) -> tuple[float, ...]:
    """black, the middle of chroma, and what luma and chroma are multiplied with to become colours in 0..white."""
    kr, kb = WEIGHTS[surface.colours.matrix]
    kg = 1 - kr - kb
    unit = 1 << (8 * surface.y.element_size() - surface.bits)
    black, luma, chroma = (each * unit for each in extents(surface.colours.full_range, surface.bits))
    middle = (1 << (surface.bits - 1)) * unit
    differences = (2 * (1 - kr), -2 * (1 - kb) * kb / kg, -2 * (1 - kr) * kr / kg, 2 * (1 - kb))
    return (float(black), float(middle), white / luma, *(white / chroma * each for each in differences), white)


def _gains(form: Form) -> tuple[float, ...]:
    mean, std = form.mean or (0.0, 0.0, 0.0), form.std or (1.0, 1.0, 1.0)
    return (*(1 / each for each in std), *(-a / b for a, b in zip(mean, std, strict=True)))
