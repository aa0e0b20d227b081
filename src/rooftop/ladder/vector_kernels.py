"""The Triton kernels that correspond to `vector.cu`. A Triton program corresponds to a CUDA block. Triton divides BLOCK
elements among the threads, and makes 16-byte accesses wherever one thread gets four neighbouring elements."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_alone(x, y, z, n, BLOCK: tl.constexpr):  # (n,) each
    """A single program adds all elements."""
    for start in tl.range(0, n, BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        tl.store(z + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def add_block(x, y, z, n, BLOCK: tl.constexpr):
    """Each program adds BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def add_grid_stride(x, y, z, n, BLOCK: tl.constexpr):
    """As many programs run as the GPU holds at a time. Each program adds block after block."""
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        tl.store(z + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)
