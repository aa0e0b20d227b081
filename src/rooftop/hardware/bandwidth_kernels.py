"""Triton kernels that only move memory: read, write, copy, triad; and two kernels that do nothing.

torch can measure a read only by a reduction, and a reduction may be slower than the memory. torch's kernels also do not
always use 16-byte accesses. A ceiling is the better of torch's rate and these kernels' rate. `copy` from one dtype to
another measures a cast, and `copy` within one tensor an in-place update.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Launch parameters: elements and warps per program."""

    elements: int
    warps: int


LARGE = Blocks(4096, 8)  # 16 KiB of float32 per program: each of 256 threads has four 16-byte accesses in flight
# 4 KiB of float32 per program, so even a tensor of 1 MiB gives each multiprocessor a program; each of 128 threads has
# two 16-byte accesses in flight
SMALL = Blocks(1024, 4)

_ORDER = ["first", "step"]  # these arguments differ from launch to launch, and must not cause a new compilation


@triton.jit(do_not_specialize=_ORDER)
def _read(source, sums, n, first, step, BLOCK: tl.constexpr):  # source (n,), sums (programs,)
    block = first + step * tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < n, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(values, axis=0))


@triton.jit(do_not_specialize=_ORDER)
def _write(target, value, n, first, step, BLOCK: tl.constexpr):  # target (n,)
    block = first + step * tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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


@triton.jit
def rooftop_marker():
    """Do nothing. Launches of this kernel mark positions among the kernels of a trace."""


def programs(tensor: Tensor, blocks: Blocks = LARGE) -> int:
    """The number of Triton programs that cover a tensor."""
    return int(triton.cdiv(tensor.numel(), blocks.elements))


def read(source: Tensor, sums: Tensor, blocks: Blocks = LARGE, backwards: bool = False) -> None:
    """Sum each block of `source` into `sums`; both are contiguous, and `sums` has at least `programs(source, blocks)`
    elements.

    With `backwards`, the last block is read first, so that the beginning of the tensor is still in the cache when the
    kernel ends.
    """
    grid = programs(source, blocks)
    first, step = (grid - 1, -1) if backwards else (0, 1)
    _read[(grid,)](source, sums, source.numel(), first, step, BLOCK=blocks.elements, num_warps=blocks.warps)


def write(target: Tensor, value: float, blocks: Blocks = LARGE, backwards: bool = False) -> None:
    """Fill a contiguous tensor. With `backwards`, the last block is written first."""
    grid = programs(target, blocks)
    first, step = (grid - 1, -1) if backwards else (0, 1)
    _write[(grid,)](target, value, target.numel(), first, step, BLOCK=blocks.elements, num_warps=blocks.warps)


def copy(source: Tensor, target: Tensor, blocks: Blocks = LARGE) -> None:
    """target = source, cast to target's dtype. Both tensors are contiguous and of equal size."""
    n = source.numel()
    _copy[(programs(source, blocks),)](source, target, n, BLOCK=blocks.elements, num_warps=blocks.warps)


def triad(left: Tensor, right: Tensor, target: Tensor, scale: float, blocks: Blocks = LARGE) -> None:
    """target = left + scale * right. All tensors are contiguous and of equal size."""
    n = left.numel()
    grid = (programs(left, blocks),)
    _triad[grid](left, right, target, scale, n, BLOCK=blocks.elements, num_warps=blocks.warps)


def empty() -> None:
    """Launch a kernel that does nothing."""
    _empty[(1,)](num_warps=1)


def marker() -> None:
    """Launch an empty kernel whose name marks the beginning and end of a call (see `kernel_times`)."""
    rooftop_marker[(1,)](num_warps=1)
