"""Triton kernels that do nothing but move memory: read, write, copy, triad.

torch alone cannot read without also reducing well, nor be sure to use 16-byte accesses everywhere; a ceiling is the
better of both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # 16 KiB of float32 a program: four 16-byte accesses in flight for each of 256 threads
WARPS = 8


@triton.jit
def _read(source, sums, n, BLOCK: tl.constexpr):  # source (n,), sums (programs,)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < n, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(values, axis=0))


@triton.jit
def _write(target, value, n, BLOCK: tl.constexpr):  # target (n,)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.zeros((BLOCK,), tl.float32) + value, mask=at < n)


@triton.jit
def _copy(source, target, n, BLOCK: tl.constexpr):  # source, target (n,)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def _triad(left, right, target, scale, n, BLOCK: tl.constexpr):  # left, right, target (n,)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(left + at, mask=at < n) + scale * tl.load(right + at, mask=at < n)
    tl.store(target + at, values, mask=at < n)


@triton.jit
def _empty():
    pass


def programs(tensor: Tensor) -> int:
    """Programs that cover a tensor."""
    return int(triton.cdiv(tensor.numel(), BLOCK))


def read(source: Tensor, sums: Tensor) -> None:
    """`sums[i]` is the sum of block i of `source`; float32, contiguous, `sums` has at least `programs(source)`."""
    _read[(programs(source),)](source, sums, source.numel(), BLOCK=BLOCK, num_warps=WARPS)


def write(target: Tensor, value: float) -> None:
    """Fill; float32, contiguous."""
    _write[(programs(target),)](target, value, target.numel(), BLOCK=BLOCK, num_warps=WARPS)


def copy(source: Tensor, target: Tensor) -> None:
    """target = source; float32, contiguous, equal sizes."""
    _copy[(programs(source),)](source, target, source.numel(), BLOCK=BLOCK, num_warps=WARPS)


def triad(left: Tensor, right: Tensor, target: Tensor, scale: float) -> None:
    """target = left + scale * right; float32, contiguous, equal sizes."""
    _triad[(programs(left),)](left, right, target, scale, left.numel(), BLOCK=BLOCK, num_warps=WARPS)


def empty() -> None:
    """A kernel that does nothing."""
    _empty[(1,)](num_warps=1)
