"""Launch parameters of the Triton kernels of the cross entropy, by the bytes of a row of logits."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.operands.row_tiles import LongConfig, TileConfig

# The fastest of the parameters measured on an H200 in half precision. FUSED (with the gradient) was measured at 1024,
# 8192, 16384, 32768, 50257, 50304 and 128256 classes, and the other tables at 128256 classes. LOSS has the tiles of
# FUSED. A loss without its gradient reads each row once, in blocks; it keeps few values, and many programs fit on an
# SM. With the gradient, reading rows of 64 KiB twice, in long blocks, is faster than keeping them in registers, so all
# rows of more than 32 KiB are read twice.
LOSS = (
    TileConfig(row_bytes=256, rows=16, block_bytes=256, warps=2),
    TileConfig(row_bytes=512, rows=8, block_bytes=256, warps=2),
    TileConfig(row_bytes=1024, rows=4, block_bytes=1024, warps=2),
    TileConfig(row_bytes=2048, rows=1, block_bytes=1024, warps=2),
    TileConfig(row_bytes=4096, rows=1, block_bytes=1024, warps=4),
    TileConfig(row_bytes=8192, rows=1, block_bytes=2048, warps=4),
    TileConfig(row_bytes=16384, rows=1, block_bytes=4096, warps=4),
)
LOSS_LONG = (LongConfig(row_bytes=ANY_BYTES, block_bytes=4096, warps=4, programs_per_sm=10, stages=1, again=""),)
FUSED = (
    *LOSS,
    TileConfig(row_bytes=32768, rows=1, block_bytes=8192, warps=16),
)
FUSED_LONG = (
    LongConfig(row_bytes=131072, block_bytes=8192, warps=8, programs_per_sm=4, stages=4),
    LongConfig(row_bytes=ANY_BYTES, block_bytes=32768, warps=32, programs_per_sm=1, stages=1),
)
GRADIENT_BYTES = 4096  # bytes of a tile's elements; a tile may contain several short rows
GRADIENT_WARPS = 2
SCALE = {"BLOCK": 8192, "num_warps": 8}
SCALE_PROGRAMS_PER_SM = 8
TARGETS = {"BLOCK": 4096, "num_warps": 8}
TOTAL = {"BLOCK": 4096, "num_warps": 8}
TOTAL_ROWS = 1 << 16  # maximum number of losses that one program adds; if there are more, PyTorch adds all of them
