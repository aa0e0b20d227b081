"""The Triton kernels that correspond to `reduction.cu`. Within a program, Triton itself chooses shuffles and shared
memory for an addition (`tl.sum`). So the rungs that differ in how a block's threads add have no counterpart here."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_blocks(x, sums, n, BLOCK: tl.constexpr):  # x (n,), sums (programs,)
    """Each program stores the sum of its BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0)))


@triton.jit
def sum_one_pass(x, sums, result, done, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):  # PROGRAMS: power of 2
    """The grid has as many programs as the GPU holds, and together they read all of x. The program that finishes last
    adds up the sums of all programs."""
    lanes = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        lanes += tl.load(x + at, mask=at < n, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(lanes))
    tl.debug_barrier()  # the sum must be stored before the count
    before = tl.atomic_add(done, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        place = tl.arange(0, PROGRAMS)
        all_sums = tl.load(sums + place, mask=place < tl.num_programs(0), other=0.0, cache_modifier=".cg")
        tl.store(result, tl.sum(all_sums))
        tl.store(done, 0)
