"""Launch parameters by the bytes of a row: Triton kernels of softmax, cluster kernels of softmax and cross entropy."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.operands.row_tiles import LongConfig, TileConfig
from rooftop.kernels.operands.strided_rows import LINE_BYTES

# The fastest of the parameters measured on an H200 in half precision with 1024, 4096, 8192, 16384 and 32768 columns,
# and for long rows with 128256 columns. (In backward, the bytes of a row count dy and y together: 1024 columns are
# 4 KiB.) At all other sizes, a thread processes as many elements of a row as in the layer norm's table, since the
# memory traffic is the same. In backward, 16 warps keep up to 128 KiB of a row in registers, and few of a thread's 128
# registers spill. With 32 warps and 64 registers per thread, more registers spill, and backward is slower than with 16
# warps. Long rows have one wide program per SM, so that the second read of a row is from L2: 132 rows of 128256 half
# precision elements take 34 MB of the 50 MB of L2.
FORWARD = (
    TileConfig(row_bytes=256, rows=16, block_bytes=256, warps=2, hold=True),
    TileConfig(row_bytes=512, rows=8, block_bytes=256, warps=2, hold=True),
    TileConfig(row_bytes=1024, rows=4, block_bytes=1024, warps=2, hold=True),
    TileConfig(row_bytes=2048, rows=1, block_bytes=512, warps=2, hold=True),
    TileConfig(row_bytes=4096, rows=1, block_bytes=1024, warps=4, hold=True),
    TileConfig(row_bytes=8192, rows=1, block_bytes=8192, warps=8, hold=True),
    TileConfig(row_bytes=16384, rows=1, block_bytes=4096, warps=8),
    TileConfig(row_bytes=32768, rows=1, block_bytes=8192, warps=16, hold=True),
    TileConfig(row_bytes=65536, rows=1, block_bytes=16384, warps=32),
)
BACKWARD = (
    TileConfig(row_bytes=512, rows=8, block_bytes=512, warps=2),
    TileConfig(row_bytes=1024, rows=4, block_bytes=1024, warps=2),
    TileConfig(row_bytes=2048, rows=2, block_bytes=2048, warps=2),
    TileConfig(row_bytes=4096, rows=1, block_bytes=2048, warps=2),
    TileConfig(row_bytes=8192, rows=1, block_bytes=4096, warps=4),
    TileConfig(row_bytes=16384, rows=1, block_bytes=8192, warps=8),
    TileConfig(row_bytes=32768, rows=1, block_bytes=16384, warps=8),
    TileConfig(row_bytes=65536, rows=1, block_bytes=16384, warps=16),
    TileConfig(row_bytes=131072, rows=1, block_bytes=32768, warps=16),
)
FORWARD_LONG = (LongConfig(row_bytes=ANY_BYTES, block_bytes=32768, warps=32, programs_per_sm=1, stages=1),)
BACKWARD_LONG = (LongConfig(row_bytes=ANY_BYTES, block_bytes=65536, warps=32, programs_per_sm=1, stages=1),)


@dataclass(frozen=True)
class ClusterConfig:
    """Launch parameters for rows of more than `above_bytes` and up to `row_bytes` bytes of one tensor.

    Attributes:
        blocks: blocks of a cluster, 1 to 16, which share a row.
        threads: threads of a block, a multiple of 32.
        held: number of 16-byte groups of each tensor that a thread keeps in registers, which suffice for the thread's
            part of a row.
        stages: number of rows in shared memory at the same time, 1 to 6.
        odd: whether the entry is for rows that begin or end within a group of 16 bytes, instead of rows of whole
            groups.
    """

    above_bytes: int
    row_bytes: int
    blocks: int
    threads: int
    held: int
    stages: int = 2
    odd: bool = False


@dataclass(frozen=True)
class OddRows:
    """A table entry for rows that begin or end within a group of 16 bytes. `fullest` chooses the cluster for such rows.

    Attributes:
        above_bytes, row_bytes, stages: as in ClusterConfig.
        unless: the entry excludes tensors whose rows all begin at multiples of this number of bytes, because Triton's
            kernels load such rows without a shift.
    """

    above_bytes: int
    row_bytes: int
    stages: int = 2
    unless: int = LINE_BYTES


Table = tuple[ClusterConfig | OddRows, ...]

# Measured on an H200 (benchmarks/results/h200/tune_clusters.json). For rows that are not listed, Triton's kernels are
# faster.
CLUSTER_FORWARD: Table = (
    OddRows(above_bytes=4096, row_bytes=12_000),
    OddRows(above_bytes=12_000, row_bytes=32_768, unless=8),
    OddRows(above_bytes=32_768, row_bytes=524_000),
    ClusterConfig(above_bytes=32_768, row_bytes=65_536, blocks=4, threads=128, held=8),
    ClusterConfig(above_bytes=65_536, row_bytes=131_072, blocks=8, threads=128, held=8),
    ClusterConfig(above_bytes=131_072, row_bytes=262_144, blocks=8, threads=256, held=8),
    ClusterConfig(above_bytes=262_144, row_bytes=524_288, blocks=16, threads=256, held=8),
)
CLUSTER_BACKWARD: Table = (
    OddRows(above_bytes=4096, row_bytes=49_000, unless=4),
    OddRows(above_bytes=49_000, row_bytes=262_000),
    OddRows(above_bytes=262_000, row_bytes=524_000, stages=1),
    ClusterConfig(above_bytes=24_576, row_bytes=32_768, blocks=1, threads=256, held=8),
    ClusterConfig(above_bytes=32_768, row_bytes=65_536, blocks=4, threads=256, held=4),
    ClusterConfig(above_bytes=65_536, row_bytes=131_072, blocks=4, threads=256, held=8),
    ClusterConfig(above_bytes=131_072, row_bytes=262_144, blocks=8, threads=512, held=4),
    ClusterConfig(above_bytes=262_144, row_bytes=524_288, blocks=16, threads=256, held=8, stages=1),
)
CLUSTER_FUSED: Table = (  # cross entropy and its gradient
    OddRows(above_bytes=4096, row_bytes=8200, unless=8),
    OddRows(above_bytes=8200, row_bytes=524_000),
    ClusterConfig(above_bytes=16_384, row_bytes=32_768, blocks=2, threads=128, held=8),
    ClusterConfig(above_bytes=32_768, row_bytes=65_536, blocks=2, threads=256, held=8),
    ClusterConfig(above_bytes=65_536, row_bytes=131_072, blocks=4, threads=256, held=8),
    ClusterConfig(above_bytes=131_072, row_bytes=262_144, blocks=8, threads=256, held=8),
    ClusterConfig(above_bytes=262_144, row_bytes=524_288, blocks=8, threads=512, held=8),
)
