"""Launch parameters as data: constants of kernels, sizes of blocks, limits of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

Constants = dict[str, int | bool]
"""Of a launch, by the names of the kernel's arguments."""

WordConstants = dict[str, int | bool | str]
"""The same, where some are words, such as a precision."""

ANY_BYTES = 1 << 62
"""Rows of any length: the limit of a table's last entry."""


@dataclass(frozen=True)
class ElementsConfig:
    """Elements that a program works on, and warps. `measured`: or predicted."""

    elements: int
    warps: int
    measured: bool = field(default=True, compare=False)


def power_of_two(size: int) -> int:
    """The smallest that is not less than `size`, as sides of blocks must be."""
    return 1 << max(0, size - 1).bit_length()


def tile_of(elements: int, columns: int, warps: int) -> Constants:
    """A tile of so many elements of rows of so many columns; short rows share one."""
    width = min(elements, power_of_two(columns))
    return {"ROWS": elements // width, "COLUMNS": width, "num_warps": warps}


def grid_of(rows: int, columns: int, tile: Constants) -> tuple[int]:
    """A program for each tile."""
    return (-(-rows // tile["ROWS"]) * -(-columns // tile["COLUMNS"]),)


def is_wide(*tensors: Tensor) -> bool:
    """Whether an offset within one needs 64 bits, also where it lies beyond the end of a tile."""
    return any(t.numel() + (1 << 20) >= 1 << 31 for t in tensors)


@cache
def capability(device: torch.device) -> int:
    """The major compute capability; interpreted kernels run as on Hopper."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
