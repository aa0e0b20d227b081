"""Launch parameters of the kernels of embeddings and of trilinear interpolation."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.kernels.operands.launch_data import ANY_BYTES

# ---- embeddings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsConfig:
    """Items of a chunk, how many rows are loaded at once, columns of a program, and warps."""

    chunk: int
    ahead: int
    columns: int
    warps: int


# Measured on an H200, of 65536 tokens of a vocabulary of 128256 with 4096 half precision features: of tokens that are
# all alike or all over the table the fastest; chunks of 64 gain little where tokens are distributed as words are. A
# thread has 16 bytes of each of 8 rows at once.
RUNS = RunsConfig(chunk=32, ahead=8, columns=512, warps=2)


@dataclass(frozen=True)
class RowsConfig:
    """Rows of a program, columns of it, and warps."""

    rows: int
    columns: int
    warps: int


# Of tables whose rows are whole lines of memory (128 bytes), and of others, whose rows are best read whole. Rows that
# 16 bytes do not divide are PyTorch's to copy.
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
    """A program's block for cells of up to `row_bytes` a corner: bytes of one corner for all its points, bytes of one
    corner of one point, and warps."""

    row_bytes: int
    block_bytes: int
    channel_bytes: int
    warps: int


# The fastest of those measured on an H200 at 8, 32 and 128 channels in half precision (backward at 128: within the
# noise of it). Each thread has 8 bytes of each of the eight corners on their way; by the compiler's report for sm_90,
# with 32 bytes registers spill in backward.
CORNERS_FORWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
CORNERS_BACKWARD = (CornersConfig(row_bytes=ANY_BYTES, block_bytes=1024, channel_bytes=512, warps=4),)
