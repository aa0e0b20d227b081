"""Launch parameters of kernels over rows: short rows are tiles in registers, long rows are read block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rooftop.kernels.operands.launch_data import WordConstants, power_of_two


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters for rows of up to `row_bytes` bytes: rows per program, bytes of a block of one row, and warps.
    If several tensors are in registers, `row_bytes` and the bytes of a block count all these tensors together. `hold`:
    keep the exponentials in float32 registers instead of computing them twice. If the result is a logarithm, `hold`
    keeps the arguments of the exponentials.
    """

    row_bytes: int
    rows: int
    block_bytes: int
    warps: int
    hold: bool = False


@dataclass(frozen=True)
class LongConfig:
    """Launch parameters for rows of up to `row_bytes` bytes that are read in blocks. `stages` blocks are loaded at the
    same time. `programs_per_sm` limits the number of rows that are processed at the same time, so that these rows are
    still in L2 when they are read again. `again`: L2's eviction policy for the data that is read again.
    """

    row_bytes: int
    block_bytes: int
    warps: int
    programs_per_sm: int
    stages: int
    again: str = "evict_last"


Config = TypeVar("Config", TileConfig, LongConfig)


def tile(config: TileConfig, columns: int, element_bytes: int) -> WordConstants:
    """Kernel constants of a tile of whole rows, each of `columns` elements. `element_bytes`: bytes that one column of a
    row takes in registers, over all tensors.
    """
    block = min(config.block_bytes // element_bytes, power_of_two(columns))
    blocks = -(-columns // block)
    even = blocks * block == columns
    return {"ROWS": config.rows, "BLOCKS": blocks, "COLUMNS": block, "EVEN": even, "num_warps": config.warps}


def tile_config(table: Sequence[Config], row_bytes: int) -> Config | None:
    """Launch parameters for rows of `row_bytes` bytes; None if the rows are too long for the table."""
    return next((config for config in table if row_bytes <= config.row_bytes), None)


def long_tile(table: Sequence[LongConfig], row_bytes: int, element_bytes: int) -> tuple[int, WordConstants]:
    """Return (number of programs per SM, kernel constants) for long rows of `row_bytes` bytes. `element_bytes`: bytes
    of one element. If `row_bytes` counts several tensors together, so does `element_bytes`.
    """
    config = next(config for config in table if row_bytes <= config.row_bytes)
    block = config.block_bytes // element_bytes
    constants: WordConstants = {"COLUMNS": block, "STAGES": config.stages, "AGAIN": config.again}
    return config.programs_per_sm, constants | {"num_warps": config.warps}


def group_of(elements: int, element_bytes: int) -> int:
    """The number of neighbouring elements, at most 16 bytes together, that a thread loads at once. The thread updates
    its running maximum, and rescales its sum, once for all elements of a load (`fold_scores`).
    """
    return math.gcd(elements, 16 // element_bytes)
