"""Launch parameters of reductions and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftop.kernels.operands.launch_data import ANY_BYTES


@dataclass(frozen=True)
class RowConfig:
    """Launch parameters if memory is contiguous along the reduced dimension or along neither, and the (near) reduced
    dimension has up to `run_bytes` bytes. `rows`: maximum number of results of a tile. `block_bytes`: maximum bytes
    that a tile contains for each result. `stages`: number of tiles in the prefetch pipeline in shared memory; 1: no
    prefetch.
    """

    run_bytes: int
    rows: int
    block_bytes: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class SplitConfig:
    """How a reduction splits the elements of each result over several programs: the number of programs per SM, and
    whether the program that finishes last also combines the partial results.
    """

    programs_per_sm: int
    last_combines: bool


@dataclass(frozen=True)
class ColumnConfig:
    """Launch parameters if memory is contiguous along the kept dimension. `width_bytes`: bytes of a tile along that
    dimension (more if few elements are reduced). `tile_bytes`: bytes of the whole tile.
    """

    width_bytes: int
    tile_bytes: int
    warps: int
    stages: int = 1
    split: SplitConfig = SplitConfig(4, last_combines=True)


@dataclass(frozen=True)
class AllConfig:
    """Launch parameters for a single result from up to `total_bytes` bytes of contiguous memory.

    `early`: programmatic dependent launch (compute capability 9.0): the kernel may start while the previous kernel
    still runs, and waits for the previous kernel's results.
    """

    total_bytes: int
    block_bytes: int
    warps: int
    split: SplitConfig
    stages: int = 1
    early: bool = False


# The fastest of the parameters measured on an H200. ROWS was measured with rows of 32, 128, 512, 2048, 4096, 8192 and
# 16384 bytes in half precision. PLACES (argmax and argmin, which keep a value and an index for each element) was
# measured with rows of 256512 bytes. COLUMNS was measured with sums over the first dimension and over a middle
# dimension. ALL was measured with tensors of 256 KiB, 4, 11, 23 and 64 MiB and 1 GiB in float32. In ROWS, for rows of
# more than 1 KiB up to 8 KiB, one warp reads a whole block of a row, so no sum across warps is needed; blocks are
# prefetched.
SHORT_ROWS = (
    RowConfig(run_bytes=64, rows=128, block_bytes=64, warps=4),
    RowConfig(run_bytes=128, rows=32, block_bytes=128, warps=2),
    RowConfig(run_bytes=256, rows=32, block_bytes=256, warps=4),
    RowConfig(run_bytes=1024, rows=8, block_bytes=1024, warps=4),
)
ROWS = (
    *SHORT_ROWS,
    RowConfig(run_bytes=4096, rows=8, block_bytes=512, warps=4, stages=3),
    RowConfig(run_bytes=8192, rows=4, block_bytes=512, warps=4, stages=3),
    RowConfig(run_bytes=ANY_BYTES, rows=1, block_bytes=16384, warps=8),
)
FAR_ROWS = (  # for two reduced dimensions: one with stride 1, one with a larger stride
    *(
        replace(config, stages=3)
        for config in (*SHORT_ROWS, RowConfig(run_bytes=4096, rows=2, block_bytes=4096, warps=4))
    ),
    RowConfig(run_bytes=ANY_BYTES, rows=1, block_bytes=16384, warps=8, stages=4),
)
PLACES = (
    *SHORT_ROWS,
    RowConfig(run_bytes=4096, rows=2, block_bytes=4096, warps=4),
    RowConfig(run_bytes=ANY_BYTES, rows=1, block_bytes=8192, warps=8),
)
COLUMNS = ColumnConfig(width_bytes=128, tile_bytes=4096, warps=2, stages=4, split=SplitConfig(8, last_combines=True))
SPLIT = SplitConfig(4, last_combines=True)
ALL = (
    AllConfig(total_bytes=1 << 15, block_bytes=32768, warps=16, split=SplitConfig(1, last_combines=True), early=True),
    AllConfig(total_bytes=1 << 23, block_bytes=8192, warps=8, split=SplitConfig(4, last_combines=True), early=True),
    AllConfig(total_bytes=1 << 25, block_bytes=8192, warps=8, split=SplitConfig(8, last_combines=True), early=True),
    AllConfig(total_bytes=1 << 27, block_bytes=16384, warps=8, split=SplitConfig(8, last_combines=True), early=True),
    AllConfig(total_bytes=ANY_BYTES, block_bytes=16384, warps=8, split=SplitConfig(4, last_combines=True), stages=3),
)
GRADIENT_BLOCK_BYTES, GRADIENT_WARPS = 8192, 4  # for the gradient: bytes of a tile of x, and warps of a program
SHARE_ELEMENTS = 1 << 15  # `share_gradient`: maximum elements per tile
SHARE_WIDTH_BYTES = 128  # `share_gradient`: minimum bytes of a tile along the kept dimension, if it is contiguous
# `share_gradient`: bytes per tile, or more if one result or SHARE_WIDTH_BYTES need more; minimum number of warps
SHARE_BLOCK_BYTES, SHARE_WARPS = 4096, 4
# Maximum number of elements per thread. The sizes of tiles above are in bytes, so without this limit a tile of one-byte
# elements would need too many registers for its accumulators of 4 or 8 bytes.
LANE_ELEMENTS = 32
COMBINED = 4096  # maximum number of partial results that a program loads at the same time to combine them
