"""Launch the kernels of `triton_kernels.py`; `randoms.py` has the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rooftop.kernels.operands.launch_data import Constants, ElementsConfig, grid_of, tile_of
from rooftop.kernels.randoms import tables
from rooftop.kernels.randoms.words import WORD, Values, quantile_table
from rooftop.launch.triton_launch import launch, require_triton

MOST_DIMENSIONS = 4  # maximum number of dimensions of a part after merging


def fill(
    out: Tensor, values: Values, sizes: list[int], strides: list[int], offset: int, key: int, step: int
) -> None:  # fmt: skip
    """Write random numbers with the distribution `values` to `out` (prod(sizes),). `sizes`, `strides` and `offset`
    locate the elements in the whole tensor."""
    require_triton()
    from rooftop.kernels.randoms.triton_kernels import random_fill

    grid, tile = _grid_and_tile(tables.FILL, sizes, strides, offset)
    numbers = (values.scale, values.shift, values.low, values.high)
    words = (_signed(values.lower_word), _signed(values.last_word))
    launch(
        random_fill, grid, out.device, out, quantile_table(out.device), *_halves(key), *_halves(step),
        *_layout(sizes, strides, offset), *numbers, *words, NORMAL=values.normal, **tile,
    )  # fmt: skip


def drop(
    x: Tensor, y: Tensor, dropped: int, scale: float, key: int, step: int | Tensor, sizes: list[int],
    strides: list[int], offset: int,
) -> None:  # fmt: skip
    """Write x * scale to y, or 0 for elements whose random word is below `dropped`. x and y must be contiguous."""
    require_triton()
    from rooftop.kernels.randoms.triton_kernels import dropout_tile

    grid, tile = _grid_and_tile(tables.DROPOUT, sizes, strides, offset)
    there, number = (step, 0) if isinstance(step, Tensor) else (y, step)
    launch(
        dropout_tile, grid, x.device, x, y, there, *_halves(key), *_halves(number),
        *_layout(sizes, strides, offset), _signed(dropped), scale, STEP_THERE=there is step, **tile,
    )  # fmt: skip


def grouped(sizes: Sequence[int], strides: Sequence[int], offset: int) -> bool:
    """Whether a part of a whole tensor consists of whole groups of four consecutive elements of the whole tensor. Such
    a group shares one evaluation of the generator."""
    return strides[-1] == 1 and sizes[-1] % 4 == 0 and offset % 4 == 0 and all(s % 4 == 0 for s in strides[:-1])


def _grid_and_tile(
    config: ElementsConfig, sizes: list[int], strides: list[int], offset: int
) -> tuple[tuple[int], Constants]:
    tile = tile_of(config.elements, sizes[-1], config.warps) | {"GROUPED": grouped(sizes, strides, offset)}
    return grid_of(math.prod(sizes[:-1]), sizes[-1], tile), tile


def _halves(value: int) -> tuple[int, int]:
    """The lower and the upper 32 bits of an integer, each as int32."""
    return _signed(value & WORD), _signed(value >> 32 & WORD)


def _signed(word: int) -> int:
    """Reinterpret the bits of an unsigned 32-bit word as int32."""
    return word - (1 << 32) if word >> 31 else word


def _layout(sizes: list[int], strides: list[int], offset: int) -> tuple[int, ...]:
    """The kernel arguments of a part: (rows, columns, sizes of the second and third dimension, four strides, offset).
    The part gets four dimensions; if it has fewer, the first ones have size 1. The last dimension has the columns, and
    the other three together the rows. If the part consists of whole groups of four elements (`grouped`), columns,
    strides and offset count groups.
    """
    outer = [1] * (MOST_DIMENSIONS - len(sizes)) + sizes[:-1]
    paces = [0] * (MOST_DIMENSIONS - len(sizes)) + strides
    if grouped(sizes, strides, offset):
        paces = [pace // 4 for pace in paces[:-1]] + [1]
        return math.prod(outer), sizes[-1] // 4, *outer[1:], *paces, offset // 4
    return math.prod(outer), sizes[-1], *outer[1:], *paces, offset
