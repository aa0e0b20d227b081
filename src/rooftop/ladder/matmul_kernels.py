"""The Triton kernels that correspond to `matmul.cu`. `tl.dot` runs on the ordinary cores for float32 without TF32, and
on the tensor cores for half precision. The launch parameter `num_stages` determines how far the kernel prefetches. The
compiler then assigns registers and shared memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    a, b, c, n,  # (n, n) each
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of C. With WIDE the program computes in float32, without tensor cores."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, n, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            a + rows[:, None].to(tl.int64) * n + k[None, :], mask=(rows[:, None] < n) & (k[None, :] < n), other=0.0
        )
        right = tl.load(
            b + k[:, None].to(tl.int64) * n + columns[None, :],
            mask=(k[:, None] < n) & (columns[None, :] < n),
            other=0.0,
        )
        if WIDE:
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    tl.store(c + rows[:, None].to(tl.int64) * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def product_persistent(
    a, b, c, n,  # tensor descriptors of (n, n): the tensor memory accelerator, if there is one, copies the tiles
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As many programs run as there are multiprocessors. Each program computes tile after tile. The order of the tiles
    goes through one group of GROUP rows of tiles after another, so that L2 holds the rows of A that a group needs."""
    across, down = tl.cdiv(n, COLUMNS), tl.cdiv(n, ROWS)
    for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * across)
        height = min(down - group * GROUP, GROUP)
        row = (group * GROUP + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, n, DEPTH):
            total = tl.dot(a.load([row, first]), b.load([first, column]), total)
        c.store([row, column], total.to(tl.float16))
