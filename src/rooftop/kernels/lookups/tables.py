"""Launch parameters of embeddings and trilinear interpolation."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftop.kernels.operands.launch_data import ANY_BYTES

# ---- embeddings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsConfig:
    """Launch parameters of the embedding's gradient: tokens of a chunk, rows in flight at a time, columns of a program,
    and warps.
    """

    chunk: int
    ahead: int
    columns: int
    warps: int


# Measured on an H200, with 65536 tokens of a vocabulary of 128256 and 4096 half precision features. This entry is the
# fastest for equal tokens and for uniformly distributed tokens. Chunks of 64 gain little for tokens with the
# frequencies of words. A thread loads 16 bytes of each of 8 rows at a time.
RUNS = RunsConfig(chunk=32, ahead=8, columns=512, warps=2)


@dataclass(frozen=True)
class FewConfig:
    """Parameters of the embedding's gradient without a sort: the maximum number of tokens, tokens that are compared at
    once, columns of a program, and warps."""

    most: int
    items: int
    columns: int
    warps: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# For few tokens the host's time decides: two launches instead of a sort and up to three passes. The number of
# comparisons grows with the square of the tokens. Not measured yet.
FEW = FewConfig(most=2048, items=32, columns=256, warps=4, measured=False)


@dataclass(frozen=True)
class RowsConfig:
    """Launch parameters: rows and columns of a program, and its warps."""

    rows: int
    columns: int
    warps: int


# One entry is for tables whose rows are whole lines of memory (128 bytes). The other entry is for all other tables,
# whose rows are best read as a whole. PyTorch copies rows that are not a multiple of 16 bytes.
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
        block_bytes: number of bytes of one corner that a block processes, summed over the points of the block.
        channel_bytes: maximum number of bytes that a block processes of one corner of one point.
        warps: warps of a program.
    """

    row_bytes: int
    block_bytes: int
    channel_bytes: int
    warps: int


# The fastest of the parameters measured on an H200 at 8, 32 and 128 channels in half precision (backward at 128: equal
# within the noise). Each thread has 8 bytes of each of the eight corners in flight; with 32 bytes, registers spill in
# backward by the compiler's report for sm_90.
CORNERS_FORWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
CORNERS_BACKWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
