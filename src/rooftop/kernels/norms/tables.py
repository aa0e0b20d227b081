"""Launch parameters of layer norm's and RMS norm's kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

# ---- Triton --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardConfig:
    """Launch parameters of forward for rows of up to `columns` elements: rows of a program, elements of a block, and
    warps.
    """

    columns: int
    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """Launch parameters of backward: as in `ForwardConfig`; also programs per SM, and pipeline stages."""

    columns: int
    rows: int
    block: int
    warps: int
    programs_per_sm: int
    stages: int
    hold: bool = False  # keep the weight in registers
    again: bool = False  # load rows a second time instead of keeping them in registers


@dataclass(frozen=True)
class LongConfig:
    """Launch parameters of kernels that read long rows block by block: elements of a block, warps, the maximum number
    of programs per SM, and the number of blocks loaded at the same time (`stages`).
    """

    block: int
    warps: int
    programs_per_sm: int
    stages: int
    shifted: bool = True  # whether rows that are not aligned to 16 bytes are loaded 16 bytes at a time, with a shift


# Chosen by benchmarks/kernels/norm_variants.py on an H200 (bfloat16, 2^27 elements). For the fastest loads, each thread
# must load 8 bytes or more of each block, and the masked part of the last block must be small. Backward must prefetch
# rows to shared memory; keeping the weight in registers leaves more shared memory for rows.
FORWARD = (
    ForwardConfig(columns=128, rows=8, block=128, warps=2),
    ForwardConfig(columns=256, rows=8, block=256, warps=4),
    ForwardConfig(columns=512, rows=4, block=512, warps=2),
    ForwardConfig(columns=1024, rows=1, block=256, warps=2),
    ForwardConfig(columns=2048, rows=1, block=512, warps=4),
    ForwardConfig(columns=3072, rows=1, block=1024, warps=4),
    ForwardConfig(columns=4096, rows=1, block=4096, warps=4),
    ForwardConfig(columns=6144, rows=1, block=1024, warps=8),
    ForwardConfig(columns=8192, rows=1, block=2048, warps=8),
    ForwardConfig(columns=16384, rows=1, block=4096, warps=8),
    ForwardConfig(columns=32768, rows=1, block=8192, warps=16),
)

# For rows of more than 256 elements that begin at multiples of 2, 4 or 8 bytes instead of 16 bytes. These entries have
# at most one warp per row, and more warps on an SM than FORWARD, and are faster than FORWARD.
FORWARD_NARROW = (
    ForwardConfig(columns=512, rows=4, block=128, warps=2),
    ForwardConfig(columns=1024, rows=1, block=256, warps=1),
)

# For half precision rows from `FOURS_FROM` to `columns` elements that begin at multiples of 8 bytes: loads of 8 bytes
# are faster than staging the rows in shared memory (`clusters`).
FORWARD_FOURS, FORWARD_FOURS_RMS = (
    (ForwardConfig(columns=16_384, rows=1, block=2048, warps=8),),
    (ForwardConfig(columns=24_568, rows=1, block=2048, warps=8),),
)
FOURS_FROM = 4097  # columns
BACKWARD = (
    BackwardConfig(columns=128, rows=8, block=128, warps=2, programs_per_sm=6, stages=3),
    BackwardConfig(columns=256, rows=4, block=256, warps=2, programs_per_sm=6, stages=3),
    BackwardConfig(columns=512, rows=4, block=512, warps=4, programs_per_sm=3, stages=3),
    BackwardConfig(columns=768, rows=2, block=256, warps=4, programs_per_sm=3, stages=4, hold=True),
    BackwardConfig(columns=1023, rows=1, block=256, warps=2, programs_per_sm=6, stages=3, hold=True),
    BackwardConfig(columns=1024, rows=2, block=1024, warps=4, programs_per_sm=3, stages=3),
    BackwardConfig(columns=1536, rows=1, block=512, warps=4, programs_per_sm=3, stages=4, hold=True),
    BackwardConfig(columns=2048, rows=2, block=2048, warps=8, programs_per_sm=2, stages=3),
    BackwardConfig(columns=2560, rows=1, block=1024, warps=4, programs_per_sm=4, stages=4, hold=True),
    BackwardConfig(columns=3072, rows=1, block=1024, warps=8, programs_per_sm=2, stages=4, hold=True),
    BackwardConfig(columns=4096, rows=1, block=4096, warps=8, programs_per_sm=2, stages=3),
    BackwardConfig(columns=6144, rows=1, block=2048, warps=8, programs_per_sm=2, stages=4, hold=True),
    BackwardConfig(columns=8192, rows=1, block=4096, warps=16, programs_per_sm=1, stages=4),
    BackwardConfig(columns=12288, rows=1, block=4096, warps=16, programs_per_sm=1, stages=3),
    BackwardConfig(columns=16384, rows=1, block=4096, warps=16, programs_per_sm=1, stages=1, again=True),
)

# For half precision rows of 32769 to 65536 elements whose length is a multiple of 16 bytes: reading a row once, and
# keeping it in registers, is faster than reading it twice.
FORWARD_HELD = ForwardConfig(columns=65536, rows=1, block=16384, warps=32)

# For rows that are not aligned to 16 bytes, but are loaded 16 bytes at a time, with a shift (`plans.parts_of`). Forward
# loads only rows of up to 256 elements like this. At 381, 505, 601, 839, 894, 1002, 2601 and 12287 elements, loads of
# two bytes (four at even lengths) were faster in nearly all cases, because the masks of the first and the last group
# take more instructions than the wide loads save.
FORWARD_SHIFTED = (BackwardConfig(columns=256, rows=4, block=256, warps=4, programs_per_sm=8, stages=1),)
BACKWARD_SHIFTED = (
    BackwardConfig(columns=512, rows=4, block=256, warps=4, programs_per_sm=4, stages=3),
    BackwardConfig(columns=1024, rows=1, block=512, warps=2, programs_per_sm=6, stages=3),
    BackwardConfig(columns=2048, rows=1, block=1024, warps=4, programs_per_sm=3, stages=3),
    BackwardConfig(columns=3072, rows=1, block=1024, warps=4, programs_per_sm=2, stages=4),
    BackwardConfig(columns=4096, rows=1, block=2048, warps=8, programs_per_sm=1, stages=3),
    BackwardConfig(columns=6144, rows=1, block=2048, warps=16, programs_per_sm=1, stages=3),
)

# For half precision rows of 130 to 510 elements, if the length is even but not a multiple of four: one warp per row and
# twelve warps on an SM are faster than loads with a shift.
BACKWARD_PAIRS = (BackwardConfig(columns=512, rows=1, block=256, warps=1, programs_per_sm=12, stages=3, hold=True),)
SHIFTED_FROM = 128  # minimum columns for loads with a shift; shorter rows need few loads even without a shift

# In forward, rows too long for FORWARD have one program per row. With few persistent programs, the second pass would
# find a row in L2. But few persistent programs were slower, because 132 programs have too few loads in flight.
MANY = 64
FORWARD_LONG = LongConfig(block=8192, warps=16, programs_per_sm=MANY, stages=3)
FORWARD_LONG_ODD = LongConfig(block=1024, warps=8, programs_per_sm=MANY, stages=1, shifted=False)
ROW_SUMS = {"COLUMNS": 2048, "num_warps": 8}
BACKWARD_LONG = LongConfig(block=2048, warps=8, programs_per_sm=2, stages=4)
ADD_PARTIAL_SUMS = {"ROWS": 128, "COLUMNS": 16, "num_warps": 4}

# ---- clusters of blocks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterConfig:
    """Launch parameters for rows of `least` to `most` elements.

    Attributes:
        blocks: blocks of a cluster, which share a row: 1, 2, 4 or 8.
        warps: warps of a block.
        blocks_per_sm: number of blocks on an SM, which divide its shared memory.
        stages: number of rows that a block loads or computes at the same time; fewer if shared memory is too small.
        odd: which tensors the entry is for. True: some rows do not begin at a multiple of 16 bytes. False: all rows
            begin at multiples of 16 bytes. None: any tensor.
    """

    least: int
    most: int
    blocks: int
    warps: int
    blocks_per_sm: int = 1
    stages: int = 3
    odd: bool | None = None


# Measured on an H200 (benchmarks/results/h200/tune_norms.json). For rows that are not listed, Triton's kernels are
# faster.
CLUSTER_FORWARD: tuple[ClusterConfig, ...] = (
    ClusterConfig(least=4097, most=8184, blocks=1, warps=8, blocks_per_sm=3, stages=2, odd=True),
    ClusterConfig(least=8185, most=13_304, blocks=1, warps=13, blocks_per_sm=2, stages=2, odd=True),
    ClusterConfig(least=13_305, most=24_568, blocks=1, warps=24, blocks_per_sm=1, stages=3, odd=True),
    ClusterConfig(least=24_569, most=32_760, blocks=4, warps=8, blocks_per_sm=2, stages=2, odd=True),
    ClusterConfig(least=32_761, most=40_952, blocks=4, warps=10, blocks_per_sm=2, stages=2, odd=True),
    ClusterConfig(least=40_953, most=51_192, blocks=2, warps=25, blocks_per_sm=1, stages=2, odd=True),
    ClusterConfig(least=32_769, most=65_536, blocks=4, warps=16, blocks_per_sm=1, stages=2, odd=False),
    ClusterConfig(least=65_537, most=131_072, blocks=8, warps=16, blocks_per_sm=1, stages=2, odd=False),
)
CLUSTER_BACKWARD: tuple[ClusterConfig, ...] = (
    ClusterConfig(least=4097, most=8184, blocks=1, warps=8, blocks_per_sm=2, stages=3, odd=True),
    ClusterConfig(least=8185, most=14_328, blocks=2, warps=7, blocks_per_sm=2, stages=4, odd=True),
    ClusterConfig(least=14_329, most=22_520, blocks=2, warps=11, blocks_per_sm=1, stages=5, odd=True),
    ClusterConfig(least=22_521, most=57_336, blocks=8, warps=7, blocks_per_sm=2, stages=3, odd=True),
    ClusterConfig(least=8193, most=16_384, blocks=1, warps=16, blocks_per_sm=1, stages=3, odd=False),
    ClusterConfig(least=16_385, most=32_768, blocks=2, warps=16, blocks_per_sm=1, stages=3, odd=False),
    ClusterConfig(least=32_769, most=65_536, blocks=8, warps=8, blocks_per_sm=2, stages=3, odd=False),
)

# ---- CUDA C++, a block or a warp for each row ----------------------------------------------------------------------


@dataclass(frozen=True)
class CudaConfig:
    """Launch parameters of the CUDA C++ norm for rows of up to `columns` elements.

    Attributes:
        elements: elements of a row in one thread.
        warps: warps of a row. Rows of one warp need no shared memory.
        rows: rows of a block; more than one only if a row has one warp.
    """

    columns: int
    elements: int
    warps: int
    rows: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# A thread loads 16 to 64 bytes of half precision at a time. One warp keeps a row of up to 1024 columns in registers.
# The parameters in CUDA are not measured yet.
CUDA = (
    CudaConfig(columns=256, elements=8, warps=1, rows=4, measured=False),
    CudaConfig(columns=512, elements=16, warps=1, rows=4, measured=False),
    CudaConfig(columns=1024, elements=32, warps=1, rows=4, measured=False),
    CudaConfig(columns=2048, elements=16, warps=4, rows=1, measured=False),
    CudaConfig(columns=4096, elements=16, warps=8, rows=1, measured=False),
    CudaConfig(columns=8192, elements=32, warps=8, rows=1, measured=False),
    CudaConfig(columns=16384, elements=32, warps=16, rows=1, measured=False),
)
CUDA_LONG_WARPS = 32  # warps of a row that does not fit in registers

# ---- CUDA C++, norms of sums over ranks ----------------------------------------------------------------------------

# One block computes one row. It has the fewest warps that let each thread load at most one pack (at most 16 bytes), so
# that all loads of the row run at the same time. For longer rows, each thread loads several packs, which together have
# at most 32 elements. The parameters of rank sums are not measured yet.
RANK_SUM_WARPS = (4, 8, 16)
RANK_SUM_CHUNKS = (1, 2, 4, 8, 16, 32)
