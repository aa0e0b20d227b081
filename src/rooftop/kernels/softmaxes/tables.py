"""Launch parameters of the Triton kernels of softmax, by the bytes of a row."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.operands.row_tiles import LongConfig, TileConfig

# The fastest of those measured on an H200 in half precision with 1024 (rows of 2 KiB forward, 4 KiB backward), 4096,
# 8192, 16384 and 32768 columns, long rows with 128256; between these sizes the shares of a thread are those of the
# layer norm's table, whose traffic is the same. Backward holds 128 KiB of a row in 16 warps, where few of the 128
# registers of a thread spill; of 64, in 32 warps, more do, and it is slower. Long rows: one wide program an SM, whose
# 132 rows of 128256 half precision elements are 34 MB, of the 50 MB of L2, when they are read again.
FORWARD = (
    *(TileConfig(256, 16, 256, 2, hold=True), TileConfig(512, 8, 256, 2, hold=True)),
    *(TileConfig(1024, 4, 1024, 2, hold=True), TileConfig(2048, 1, 512, 2, hold=True)),
    *(TileConfig(4096, 1, 1024, 4, hold=True), TileConfig(8192, 1, 8192, 8, hold=True)),
    *(TileConfig(16384, 1, 4096, 8), TileConfig(32768, 1, 8192, 16, hold=True), TileConfig(65536, 1, 16384, 32)),
)
BACKWARD = (
    *(TileConfig(512, 8, 512, 2), TileConfig(1024, 4, 1024, 2), TileConfig(2048, 2, 2048, 2)),
    *(TileConfig(4096, 1, 2048, 2), TileConfig(8192, 1, 4096, 4), TileConfig(16384, 1, 8192, 8)),
    *(TileConfig(32768, 1, 16384, 8), TileConfig(65536, 1, 16384, 16), TileConfig(131072, 1, 32768, 16)),
)
FORWARD_LONG = (LongConfig(ANY_BYTES, block_bytes=32768, warps=32, programs_per_sm=1, stages=1),)
BACKWARD_LONG = (LongConfig(ANY_BYTES, block_bytes=65536, warps=32, programs_per_sm=1, stages=1),)
