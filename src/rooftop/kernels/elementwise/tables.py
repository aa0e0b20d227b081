"""Launch parameters of elementwise kernels."""

from __future__ import annotations

from dataclasses import dataclass

# ---- results in new memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatConfig:
    """Launch parameters of kernels that compute one index for all tensors: elements and warps of a program. They are
    for kernels that read and write up to `element_bytes` bytes per element, summed over all tensors.
    """

    element_bytes: int
    block: int
    warps: int


@dataclass(frozen=True)
class TileConfig:
    """Elements of a tile, its maximum number of columns, and warps. If rows have fewer columns than this maximum, the
    tile has more rows.
    """

    elements: int
    columns: int
    warps: int


# Measured on an H200 with up to four inputs. The parameters do not depend on the number of inputs, since the
# differences were small, with two exceptions. Activations of one tensor in half precision need 16 elements a thread.
# Transposed tensors need large tiles. Tiles larger than `SQUARE` are hardly faster, and spill registers if there are
# many tensors.
FLAT = (
    FlatConfig(element_bytes=4, block=2048, warps=4),
    FlatConfig(element_bytes=1 << 30, block=1024, warps=4),
)
TILES = TileConfig(elements=4096, columns=1024, warps=8)
SQUARE = TileConfig(elements=8192, columns=64, warps=8)  # for transposed tensors

# A sum over columns needs whole rows in a tile. A sum over rows needs several tiles per program.
SUMS = TileConfig(elements=4096, columns=4096, warps=4)
LONG_SUMS = TileConfig(elements=4096, columns=1024, warps=8)
# a program that sums over rows reads many tiles for each sum that it writes
PROGRAMS_PER_SM = 8

# ---- results in existing memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreConfig:
    """Launch parameters if the narrowest tensor has elements of up to `bytes` bytes: elements and warps of a program,
    and the maximum number of columns of its tiles."""

    bytes: int
    elements: int
    columns: int
    warps: int


# A thread handles 16 elements if the narrowest dtype has one byte, and otherwise 8: at least 16 bytes of each tensor.
STORES = (
    StoreConfig(bytes=1, elements=2048, columns=2048, warps=4),
    StoreConfig(bytes=8, elements=1024, columns=1024, warps=4),
)
TURNED = StoreConfig(bytes=8, elements=4096, columns=64, warps=4)  # for transposed operands
