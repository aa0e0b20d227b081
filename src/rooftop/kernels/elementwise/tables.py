"""Launch parameters of the kernels of elementwise expressions."""

from __future__ import annotations

from dataclasses import dataclass

# ---- results of their own ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program, for kernels that move up to `element_bytes` for each element."""

    element_bytes: int
    block: int
    warps: int


@dataclass(frozen=True)
class TileConfig:
    """Elements of a tile, its columns at most, and warps. Rows of fewer columns leave room for more rows."""

    elements: int
    columns: int
    warps: int


# Measured on an H200 with up to four inputs, and chosen for all of them: differences are small but for activations of
# one tensor in half precision, which want 16 elements a thread, and for transposed ones, which want large tiles (larger
# ones still gain little, and more tensors would spill).
FLAT = (
    FlatConfig(element_bytes=4, block=2048, warps=4),
    FlatConfig(element_bytes=1 << 30, block=1024, warps=4),
)
TILES = TileConfig(elements=4096, columns=1024, warps=8)
SQUARE = TileConfig(elements=8192, columns=64, warps=8)  # where a tensor's neighbours lie along rows: transposed

# Sums over columns want whole rows in a tile, sums over rows several tiles a program.
SUMS = TileConfig(elements=4096, columns=4096, warps=4)
LONG_SUMS = TileConfig(elements=4096, columns=1024, warps=8)
PROGRAMS_PER_SM = 8  # that sum over rows: their sums are little beside what they read

# ---- into memory that is there -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreConfig:
    """Elements and warps of a program whose narrowest tensor has elements of so many bytes, and the columns of its
    tiles at most."""

    bytes: int
    elements: int
    columns: int
    warps: int


# 16 bytes a thread of the narrowest tensor.
STORES = (
    StoreConfig(bytes=1, elements=2048, columns=2048, warps=4),
    StoreConfig(bytes=8, elements=1024, columns=1024, warps=4),
)
TURNED = StoreConfig(bytes=8, elements=4096, columns=64, warps=4)  # where neighbours of an operand lie along rows
