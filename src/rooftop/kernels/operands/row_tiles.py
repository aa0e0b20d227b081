"""Launch data of kernels that work on rows: short ones as tiles in registers, long ones block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rooftop.kernels.operands.launch_data import WordConstants, power_of_two


@dataclass(frozen=True)
class TileConfig:
    """How rows of up to `row_bytes` (of all tensors that are held) are worked on: rows a program, bytes of a block of
    one row, and warps. `hold`: exponentials, or of logarithms what they are of, stay in float32 registers, or else
    both are computed twice."""

    row_bytes: int
    rows: int
    block_bytes: int
    warps: int
    hold: bool = False


@dataclass(frozen=True)
class LongConfig:
    """Rows of up to `row_bytes` in blocks of so many bytes, fetched `stages` ahead; the programs on an SM bound what L2
    must keep. `again`: how L2 is to treat what will be read a second time."""

    row_bytes: int
    block_bytes: int
    warps: int
    programs_per_sm: int
    stages: int
    again: str = "evict_last"


Config = TypeVar("Config", TileConfig, LongConfig)


def tile(config: TileConfig, columns: int, element_bytes: int) -> WordConstants:
    """Launch parameters of a tile; `element_bytes`: of all tensors that are held."""
    block = min(config.block_bytes // element_bytes, power_of_two(columns))
    blocks = -(-columns // block)
    even = blocks * block == columns
    return {"ROWS": config.rows, "BLOCKS": blocks, "COLUMNS": block, "EVEN": even, "num_warps": config.warps}


def tile_config(table: Sequence[Config], row_bytes: int) -> Config | None:
    """The parameters for rows of so many bytes; None where they are too long for the table."""
    return next((config for config in table if row_bytes <= config.row_bytes), None)


def long_tile(table: Sequence[LongConfig], row_bytes: int, element_bytes: int) -> tuple[int, WordConstants]:
    """(programs an SM, constants of the kernels) for long rows, of elements of that many bytes."""
    config = next(config for config in table if row_bytes <= config.row_bytes)
    block = config.block_bytes // element_bytes
    constants: WordConstants = {"COLUMNS": block, "STAGES": config.stages, "AGAIN": config.again}
    return config.programs_per_sm, constants | {"num_warps": config.warps}


def group_of(elements: int, element_bytes: int) -> int:
    """Of so many neighbours, how many a thread loads at once, 16 bytes at most: they need no other thread's maximum."""
    return math.gcd(elements, 16 // element_bytes)
