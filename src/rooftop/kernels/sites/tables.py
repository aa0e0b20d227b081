"""Launch parameters of sparse convolution and of pooling over sites."""

from __future__ import annotations

from dataclasses import dataclass, field

# ---- convolution ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsConfig:
    """The tile of `sparse_conv_rows` for up to `channels` channels of the result: rows and columns of the tile, operand
    channels per step, warps, and pipeline stages.
    """

    channels: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    measured: bool = field(default=True, compare=False)  # False: predicted


@dataclass(frozen=True)
class WeightConfig:
    """The tile of `sparse_conv_weight_gradient` for up to `channels` channels of features and result: channels of the
    result and of the features, pairs per step, warps, stages, and programs per multiprocessor.
    """

    channels: int
    outs: int
    ins: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int
    measured: bool = field(default=True, compare=False)  # False: predicted


ANY = 1 << 31

# Measured on an H200 (benchmarks/results/h200/tune_sparse_convs.json). HALF has the fastest parameters at 64, 128 and
# 256 channels, and parameters within 1% of the fastest at 32 channels. WEIGHT_HALF has the fastest parameters at 32, 64
# and 128 channels, and was not timed beyond 128. The parameters for float32 (SINGLE and WEIGHT_SINGLE) are predicted.
HALF = (
    RowsConfig(channels=32, rows=128, columns=32, depth=32, warps=4, stages=5),
    RowsConfig(channels=64, rows=128, columns=64, depth=64, warps=4, stages=5),
    RowsConfig(channels=128, rows=128, columns=128, depth=64, warps=8, stages=5),
    RowsConfig(channels=ANY, rows=128, columns=256, depth=64, warps=8, stages=5),
)
SINGLE = (
    RowsConfig(channels=32, rows=64, columns=32, depth=32, warps=4, stages=3, measured=False),
    RowsConfig(channels=ANY, rows=64, columns=64, depth=32, warps=4, stages=3, measured=False),
)
WEIGHT_HALF = (
    WeightConfig(channels=32, outs=32, ins=32, depth=64, warps=4, stages=3, programs_per_sm=8),
    WeightConfig(channels=64, outs=64, ins=64, depth=64, warps=4, stages=5, programs_per_sm=4),
    WeightConfig(channels=ANY, outs=128, ins=128, depth=64, warps=8, stages=5, programs_per_sm=2, measured=False),
)
WEIGHT_SINGLE = (
    WeightConfig(channels=ANY, outs=64, ins=64, depth=32, warps=4, stages=3, programs_per_sm=8, measured=False),
)

# If there are fewer tiles than multiprocessors, tiles get fewer rows, but at least this number.
LEAST_ROWS = 32

# A table with at least this many rows is sorted if the caller passes no order. For smaller tables, a sort takes more
# time than it saves (predicted).
SORTED_FROM = 1 << 16

# Whether `row_order` also returns the sorted table.
TABLES_SORTED = True

# For unsorted tables with at least this many rows, the gradient of the weight reads lists of pairs. For smaller tables,
# computing the lists takes longer than reading rows without a neighbour (predicted).
LISTED_FROM = 1 << 14

# Number of rows of a block of a sorted table. The gradient of the weight processes or skips a block as a whole.
# BLOCK_ROWS must be a multiple of each `depth` of WEIGHT_HALF and WEIGHT_SINGLE. If the sites are on a surface, nearly
# all rows of a block that is processed for a tap have a neighbour at this tap.
BLOCK_ROWS = 64

# Tables with more rows than this are not stored as sorted tables: the end of a piece of rows, computed as its begin
# plus its length, could exceed int32 in `sparse_conv_weight_gradient`.
MOST_SORTED = 1 << 30
MASK_ROWS, SORT_ROWS, PAIR_ROWS, TABLE_WARPS = 64, 128, 128, 4  # rows and warps of kernels that read only tables
KEY_ROWS, SAMPLE, SAMPLE_ROWS, SAMPLE_WARPS, SCANNED = 256, 4096, 1024, 16, 1024
PIECES, ELEMENTS = 32, 128  # sizes of a tile in `sum_pieces`: pieces, and elements of each piece

# ---- pooling in windows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolConfig:
    """Launch parameters of pooling in windows: bytes of features that a tile loads for one tap, the tile's maximum
    number of columns, number of taps that are loaded at the same time, and warps.
    """

    tile_bytes: int
    columns: int
    ahead: int
    warps: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# Predicted, not measured: a thread loads 16 bytes per tap. Backward loads two tensors per tap.
POOL_FORWARD = PoolConfig(tile_bytes=2048, columns=128, ahead=8, warps=4, measured=False)
POOL_BACKWARD = PoolConfig(tile_bytes=2048, columns=128, ahead=4, warps=4, measured=False)

# ---- pooling of batch elements -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlobalConfig:
    """Launch parameters of pooling over batch elements: bytes of a tile, the tile's maximum number of columns, the
    minimum number of rows of a program, programs per multiprocessor, and warps.
    """

    tile_bytes: int
    columns: int
    share: int
    programs_per_sm: int
    warps: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# Predicted, not measured: each thread loads 2 x 16 bytes, and there are eight programs for each multiprocessor.
GLOBAL = GlobalConfig(tile_bytes=4096, columns=64, share=256, programs_per_sm=8, warps=4, measured=False)
