"""Launch parameters of the kernels of reductions and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftop.kernels.operands.launch_data import ANY_BYTES


@dataclass(frozen=True)
class RowConfig:
    """Parameters if the reduced dimension is contiguous, in runs of up to `run_bytes`: results of a tile, and bytes of
    each result. `stages`: tiles that are prefetched through shared memory; 1: no prefetch."""

    run_bytes: int
    rows: int
    block_bytes: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class SplitConfig:
    """The number of programs per SM that share the blocks of a result, and whether the last program to arrive combines
    the parts.
    """

    programs_per_sm: int
    last_combines: bool


@dataclass(frozen=True)
class ColumnConfig:
    """Parameters if the kept dimension is contiguous: the bytes of that dimension in a tile (more if few elements are
    reduced), and the bytes of the tile.
    """

    width_bytes: int
    tile_bytes: int
    warps: int
    stages: int = 1
    split: SplitConfig = SplitConfig(4, last_combines=True)


@dataclass(frozen=True)
class AllConfig:
    """Parameters for one result of up to `total_bytes` in contiguous memory.

    `early`: whether the kernel is launched while the previous one may still run; it then waits for that one (compute
    capability 9.0).
    """

    total_bytes: int
    block_bytes: int
    warps: int
    split: SplitConfig
    stages: int = 1
    early: bool = False


# The fastest of the parameters measured on an H200. ROWS: half precision, 32, 128, 512, 2048, 4096, 8192 and 16384
# bytes. PLACES (positions of extremes: two numbers an element): 256512 bytes. COLUMNS: sums over the first and a middle
# dimension. ALL: 256 KiB, 4, 11, 23 and 64 MiB and 1 GiB in float32. Rows of 1 to 8 KiB, in blocks of one warp each,
# need no sum across warps and are fetched ahead.
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
FAR_ROWS = (  # for sums over rows and over a second dimension
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
GRADIENT_BLOCK_BYTES, GRADIENT_WARPS = 8192, 4  # bytes of a tile of x
SHARE_ELEMENTS = 1 << 15  # largest tile if the kernel that writes the gradient also counts the ties
SHARE_WIDTH_BYTES = 128  # least bytes of that tile's rows if the kept dimension is contiguous
SHARE_BLOCK_BYTES, SHARE_WARPS = 4096, 4  # warps of that tile, or more if it needs more
# elements of a thread; with small integers, a tile limited only in bytes would need too many registers
LANE_ELEMENTS = 32
COMBINED = 4096  # partial results that a program of four warps or more holds
