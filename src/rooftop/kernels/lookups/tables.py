"""Launch parameters of embeddings and trilinear interpolation."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftop.kernels.operands.launch_data import ANY_BYTES

# ---- embeddings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsConfig:
    """Launch parameters for the gradient of an embedding table from sorted tokens: tokens that a program adds up
    (`chunk`), rows that a thread loads ahead, columns of a program, and warps.
    """

    chunk: int
    ahead: int
    columns: int
    warps: int


# Measured on an H200, with 65536 tokens of a vocabulary of 128256 and 4096 half precision features. RUNS is the fastest
# both if all tokens are equal and if they are uniformly distributed. For tokens with the frequencies of words, chunks
# of 64 tokens are slightly faster. A thread loads 16 bytes of each of 8 rows at a time.
RUNS = RunsConfig(chunk=32, ahead=8, columns=512, warps=2)


@dataclass(frozen=True)
class FewConfig:
    """Launch parameters of the embedding's gradient without sorting: the maximum number of tokens, tokens compared at
    once, columns of a program, and warps.
    """

    most: int
    items: int
    columns: int
    warps: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# For few tokens, time on the host dominates. Without sorting, the gradient takes two launches, which is faster. With
# sorting, it takes a sort and up to three launches. But without sorting, each token is compared with all tokens, so the
# number of comparisons grows with the square of the number of tokens. The parameters in FEW are not measured yet.
FEW = FewConfig(most=2048, items=32, columns=256, warps=4, measured=False)


@dataclass(frozen=True)
class RowsConfig:
    """Launch parameters for gathering rows: rows, columns and warps of a program."""

    rows: int
    columns: int
    warps: int


# OF_LINES is for tables whose row stride is a multiple of 128 bytes, the size of a cache line. OF_ANY is for all
# others, for which it is fastest if one program reads a whole row. If the size of a row is not a multiple of 16 bytes,
# PyTorch gathers the rows.
OF_LINES, OF_ANY = (
    RowsConfig(rows=16, columns=128, warps=4),
    RowsConfig(
        rows=1,
        columns=4096,
        warps=8,
    ),
)

# ---- trilinear interpolation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CornersConfig:
    """Launch parameters for points whose corners have up to `row_bytes` bytes each.

    Attributes:
        block_bytes: bytes that a program processes at a time of one corner, for all its points together.
        channel_bytes: maximum number of bytes that a program processes at a time of one corner of one point.
        warps: warps of a program.
    """

    row_bytes: int
    block_bytes: int
    channel_bytes: int
    warps: int


# The fastest of the parameters measured on an H200 at 8, 32 and 128 channels in half precision (for backward at 128
# channels, as fast as the fastest within the noise). Each thread loads 8 bytes of each of the eight corners at a time.
# With 32 bytes, backward spills registers, as the compiler reports for sm_90.
CORNERS_FORWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
CORNERS_BACKWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
