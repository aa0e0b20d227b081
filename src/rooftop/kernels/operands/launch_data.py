"""Types and functions for launch parameters: constants of kernels, sizes of tiles and grids, properties of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.operands.references import without_kernels
from rooftop.launch import cuda
from rooftop.launch.triton_launch import processors, shared_memory_bytes

Constants = dict[str, int | bool]
"""A launch's values for the constants of a kernel, by argument name."""

WordConstants = dict[str, int | bool | str]
"""A launch's values for the constants of a kernel, some of which are strings, such as a precision."""

ANY_BYTES = 1 << 62
"""The row length in bytes of a table's last entry, so that this entry applies to rows of any length."""


@dataclass(frozen=True)
class ElementsConfig:
    """Launch parameters: elements per program, and warps. `measured`: True if the parameters were measured, False if
    they were predicted."""

    elements: int
    warps: int
    measured: bool = field(default=True, compare=False)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`. The sides of Triton's blocks must be powers of two."""
    return 1 << max(0, size - 1).bit_length()


def tile_of(elements: int, columns: int, warps: int) -> Constants:
    """Launch parameters of a tile of about `elements` elements, for a matrix with `columns` columns. If rows are
    shorter than the tile, the tile has several rows.
    """
    width = min(elements, power_of_two(columns))
    return {"ROWS": elements // width, "COLUMNS": width, "num_warps": warps}


def grid_of(rows: int, columns: int, tile: Constants) -> tuple[int]:
    """A grid with one program for each tile."""
    return (-(-rows // tile["ROWS"]) * -(-columns // tile["COLUMNS"]),)


def is_wide(*tensors: Tensor) -> bool:
    """Whether offsets in these tensors need 64 bits. An offset may reach past a tensor's end, to the end of a tile."""
    return any(t.numel() + (1 << 20) >= 1 << 31 for t in tensors)


@cache
def capability(device: torch.device) -> int:
    """The major compute capability of a device; 9 (Hopper) if Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


class Device(NamedTuple):
    """The properties of a device on which plans depend.

    Attributes:
        triton: whether Triton's kernels run on the device.
        processors: number of multiprocessors.
        shared_bytes: the maximum shared memory of a block, in bytes.
        cuda: the major compute capability; 0 if CUDA C++ kernels do not run on the device.
    """

    triton: bool
    processors: int
    shared_bytes: int
    cuda: int


@cache
def device_facts(device: torch.device) -> Device:
    """The `Device` properties of a device of this machine."""
    nothing = torch.empty(0, device=device)
    major = capability(device) if cuda.runs_on(nothing) else 0
    return Device(not without_kernels(device), processors(nothing), shared_memory_bytes(nothing), major)
