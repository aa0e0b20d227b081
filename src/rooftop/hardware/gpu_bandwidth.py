"""Measure a GPU's bandwidth by working set, as an operator in the middle of a program finds it.

In a program, the previous operator has just written an operator's input, so part of the input is still in L2. Part of
the output may still be in L2, not yet written to memory, when the operator's last kernel ends. So each pattern is timed
after each of several preparations. Preparations run backwards, so that they leave the beginning of the input, where the
timed kernel begins, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.hardware import bandwidth_kernels as kernels
from rooftop.hardware.figures import Samples, memory_figure
from rooftop.hardware.kernel_times import Variant, kernel_times, nothing

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALL_SETS = (256 * KIB, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)
AROUND_L2 = (0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Working sets as multiples of the size of L2. From half of L2 to four times L2 the rate falls by half."""
LARGE_SETS = (512 * MIB, 1 * GIB, 4 * GIB)

# as a multiple of L2's size; in a working set larger than this, the part in L2 makes no measurable difference
COLD_ABOVE = 8
# sizes are multiples of this many elements, so that kernels use 16-byte accesses even for two-byte elements
ALIGNED = 32
REPEATS, REPEATS_COLD = 4, 3

Work = Callable[[], object]


@dataclass(frozen=True)
class _Pattern:
    """An access pattern on a working set.

    Attributes:
        name: name of the figure.
        moved_bytes: bytes read plus bytes written by one call.
        source: the tensor that the pattern reads; None for a pattern that only writes.
        ways: the kernels that can run this pattern.
    """

    name: str
    moved_bytes: int
    source: Tensor | None
    ways: tuple[Work, ...]


def working_sets(l2_bytes: int, free_bytes: int) -> list[int]:
    """The sizes of working sets to measure, in bytes, in ascending order. No size exceeds half of the free memory."""
    around = (int(l2_bytes * share) // MIB * MIB for share in AROUND_L2)
    sizes = sorted({*SMALL_SETS, *around, *LARGE_SETS})
    return [size for size in sizes if 0 < size <= free_bytes // 2]


def measure_bandwidth(samples: Samples, device: torch.device, l2_bytes: int, progress: Callable[[float], None]) -> None:
    """Add samples of each pattern at each working set."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    sizes = working_sets(l2_bytes, free_bytes)
    whole = torch.randn(sizes[-1] // 4, device=device)
    sums = torch.empty(kernels.programs(whole, kernels.SMALL), device=device)
    smallest = whole[: sizes[0] // 4]
    for pattern in _patterns(smallest, sums):  # compile the kernels before the profiler starts
        for work in (*pattern.ways, *_preparations(pattern.source, smallest, sums)):
            work()
    for number, size in enumerate(sizes):
        _measure_at(samples, device, size, whole, sums, hot=size <= COLD_ABOVE * l2_bytes)
        progress((number + 1) / len(sizes))


def _measure_at(samples: Samples, device: torch.device, size: int, whole: Tensor, sums: Tensor, hot: bool) -> None:
    n = size // 4
    elsewhere = whole[n : 2 * n] if 2 * n <= whole.numel() else whole[-n:]
    names, moved, variants = [], [], []
    for pattern in _patterns(whole[:n], sums):
        for way in pattern.ways:
            for prepare in _preparations(pattern.source, elsewhere, sums) if hot else (nothing,):
                names.append(memory_figure(size, pattern.name))
                moved.append(pattern.moved_bytes)
                variants.append(Variant(way, prepare, REPEATS if hot else REPEATS_COLD))
    for name, bytes_, calls in zip(names, moved, kernel_times(variants, device), strict=True):
        samples.add(name, (bytes_ / (sum(call) / 1e3) for call in calls))


def _preparations(source: Tensor | None, elsewhere: Tensor, sums: Tensor) -> Iterator[Work]:
    """Functions that set the contents of the caches before the timed kernel begins.

    The first function does nothing, so the caches contain the data of the call's previous run. The second reads the
    pattern's input `source`, and the third overwrites it. If the pattern only writes (`source` is None), the second and
    last function reads other memory instead, so the caches contain data that need no write-back.
    """
    yield nothing
    if source is None:
        yield lambda: kernels.read(elsewhere, sums, kernels.SMALL, backwards=True)
        return
    words = source.view(torch.float32)  # the bits do not matter, so one float32 kernel serves all dtypes
    yield lambda: kernels.read(words, sums, kernels.SMALL, backwards=True)
    yield lambda: kernels.write(words, 0.5, kernels.SMALL, backwards=True)


def _patterns(whole: Tensor, sums: Tensor) -> Iterator[_Pattern]:
    """All access patterns for one working set, the memory of `whole`: (n,) in float32. Each pattern stays within this
    memory."""
    total = torch.empty((), device=whole.device)
    half, third = _aligned(whole.numel() // 2), _aligned(whole.numel() // 3)
    sizes = (kernels.LARGE, kernels.SMALL)

    yield _Pattern(
        "read",
        whole.nbytes,
        whole,
        (*(lambda s=s: kernels.read(whole, sums, s) for s in sizes), lambda: torch.sum(whole, 0, out=total)),  # type: ignore[misc]
    )
    yield _Pattern(
        "write",
        whole.nbytes,
        None,
        (*(lambda s=s: kernels.write(whole, 0.5, s) for s in sizes), lambda: whole.fill_(0.5)),  # type: ignore[misc]
    )
    yield _copying("copy", whole[:half], whole[half : 2 * half])
    halves = whole.view(torch.bfloat16)
    yield _copying("copy", halves[: 2 * half], halves[2 * half : 4 * half])
    x, y, z = (whole[i * third : (i + 1) * third] for i in range(3))
    yield _Pattern(
        "triad",
        3 * x.nbytes,
        whole[: 2 * third],
        (*(lambda s=s: kernels.triad(x, y, z, 0.5, s) for s in sizes), lambda: torch.add(x, y, alpha=0.5, out=z)),  # type: ignore[misc]
    )
    # `wide` has two thirds of the bytes, `narrow` one third
    wide, narrow = whole[: 2 * third], halves[4 * third : 6 * third]
    yield _copying("cast", wide, narrow)
    narrow, wide = halves[: 2 * third], whole[third : 3 * third]
    yield _copying("cast", narrow, wide)
    yield _Pattern(
        "update",
        2 * whole.nbytes,
        whole,
        (*(lambda s=s: kernels.copy(whole, whole, s) for s in sizes), lambda: whole.mul_(1.0)),  # type: ignore[misc]
    )


def _copying(name: str, source: Tensor, target: Tensor) -> _Pattern:
    ways = [lambda s=s: kernels.copy(source, target, s) for s in (kernels.LARGE, kernels.SMALL)]  # type: ignore[misc]
    return _Pattern(name, source.nbytes + target.nbytes, source, (*ways, lambda: target.copy_(source)))


def _aligned(elements: int) -> int:
    return elements // ALIGNED * ALIGNED
