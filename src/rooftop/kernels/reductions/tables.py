"""Launch parameters of reductions and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftop.kernels.operands.launch_data import ANY_BYTES


@dataclass(frozen=True)
class RowConfig:
    """Launch parameters for a contiguous reduced dimension, in runs of up to `run_bytes`: results of a tile, and bytes
    per result. `stages`: tiles that are prefetched through shared memory; 1: no prefetch.
    """

    run_bytes: int
    rows: int
    block_bytes: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class SplitConfig:
    """The number of programs per SM that share a result's blocks, and whether the last program to arrive combines the
    parts.
    """

    programs_per_sm: int
    last_combines: bool


@dataclass(frozen=True)
class ColumnConfig:
    """Launch parameters for a contiguous kept dimension: bytes of a tile along that dimension (more if few elements are
    reduced), and bytes of the tile.
    """

    width_bytes: int
    tile_bytes: int
    warps: int
    stages: int = 1
    split: SplitConfig = SplitConfig(4, last_combines=True)


@dataclass(frozen=True)
class AllConfig:
    """Launch parameters for a single result from up to `total_bytes` of contiguous memory.

    `early`: programmatic dependent launch (compute capability 9.0): the kernel may start while the previous kernel
    still runs, and waits for the previous kernel's results.
    """

    total_bytes: int
    block_bytes: int
    warps: int
    split: SplitConfig
    stages: int = 1
    early: bool = False


# The fastest of the parameters measured on an H200. ROWS: rows of 32, 128, 512, 2048, 4096, 8192 and 16384 bytes in
# half precision. PLACES (argmax and argmin, with two numbers per element): rows of 256512 bytes. COLUMNS: sums over the
# first and over a middle dimension. ALL: 256 KiB, 4, 11, 23 and 64 MiB and 1 GiB in float32. Rows of 1 to 8 KiB, with
# one warp per block, need no sum across warps and are prefetched.
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
FAR_ROWS = (  # for a contiguous and a far reduced dimension
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
GRADIENT_BLOCK_BYTES, GRADIENT_WARPS = 8192, 4  # bytes of a tile of x, and warps
SHARE_ELEMENTS = 1 << 15  # largest tile of the kernel that counts ties and writes the gradient
SHARE_WIDTH_BYTES = 128  # least bytes of a row of that tile, for a contiguous kept dimension
SHARE_BLOCK_BYTES, SHARE_WARPS = 4096, 4  # bytes of a tile, and least number of warps
# Maximum elements of a thread. With small integers, a tile limited only in bytes would need too many registers.
LANE_ELEMENTS = 32
COMBINED = 4096  # maximum number of partial results in a program of four or more warps
