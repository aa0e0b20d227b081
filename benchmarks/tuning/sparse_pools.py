"""Tune pooling over sites: tables POOL_FORWARD, POOL_BACKWARD and GLOBAL of `sites/tables.py`.

    python benchmarks/tuning/sparse_pools.py [--out sparse_pools.json] [--seconds 60] [--quick]

The input is a wavy surface in float16, with rows in random order. Windows of 2 x 2 x 2 and overlapping windows of 3 x 3
x 3 halve its resolution. Global pools reduce four batch elements, with rows sorted by batch element. Tables are
computed in advance, and kept as in a rulebook. Candidates are checked on a surface with few sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels.sites import sparse_global_pools, sparse_pools, tables
from rooftop.kernels.sites.tables import GlobalConfig, PoolConfig
from rooftop.sparse import Rulebook, geometry
from rooftop.sparse.rulebook import rulebook_reference

SITES = (60,) if QUICK else (100_000, 400_000, 1_000_000)
CHANNELS = (8,) if QUICK else (64, 128)
PROVEN_SITES = 50 if QUICK else 3000
WINDOWS = {"2x2x2": (2, 2, 0), "3x3x3": (3, 2, 1)}  # size, stride, padding
ELEMENTS = 4


@cache
def book_of(count: int, window: str) -> Rulebook:
    """The rulebook of a surface of about `count` sites."""
    torch.manual_seed(count)
    side = int(count**0.5) + 1
    x, y = torch.meshgrid(*(torch.arange(side, device=DEVICE),) * 2, indexing="ij")
    z = (8 * (torch.sin(x / 9.0) + torch.cos(y / 13.0)) + 20).round().long()
    sites = torch.stack((torch.zeros_like(z), z, y, x), -1).view(-1, 4)
    sites = sites[torch.randperm(len(sites), device=DEVICE)]
    return rulebook_reference(sites, geometry(1, (64, side, side), *WINDOWS[window]))


@cache
def batch_of(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=DEVICE) * ELEMENTS // count


def forward(book: Rulebook, features: Tensor, average: bool) -> Tensor:
    return sparse_pools.SparsePool(features, book.neighbours, None, average).computed()[0]


def backward(book: Rulebook, dy: Tensor, y: Tensor, features: Tensor) -> Tensor:
    """Backward of max pooling, which reads more than backward of mean pooling."""
    counts = torch.empty(0, dtype=torch.int32, device=DEVICE)
    arguments = (dy, y, features, counts, book.neighbours, book.reverse, len(features))
    return sparse_pools.SparsePoolBackward(*arguments).computed()


def whole(features: Tensor, average: bool) -> Tensor:
    arguments = (features, batch_of(len(features)), ELEMENTS, average)
    return sparse_global_pools.SparseGlobalPool(*arguments).computed()[0]


def rows(count: int, channels: int) -> Tensor:
    return randn(count, channels, dtype=torch.float16)


def timed_forward(count: int, channels: int, window: str) -> Call:
    book = book_of(count, window)
    sets = [rows(len(book.in_indices), channels) for _ in range(repeats(count, channels))]
    return lambda: [forward(book, features, False) for features in sets]


def timed_backward(count: int, channels: int, window: str) -> Call:
    book = book_of(count, window)
    given = []
    for _ in range(repeats(count, channels)):
        features = rows(len(book.in_indices), channels)
        y = forward(book, features, False)
        given.append((torch.randn_like(y), y, features))
    return lambda: [backward(book, *each) for each in given]


def timed_whole(count: int, channels: int) -> Call:
    sets = [rows(count, channels) for _ in range(repeats(count, channels))]
    batch_of(count)
    return lambda: [whole(features, True) for features in sets]


def by_torch(count: int, channels: int) -> Call:
    """Global pooling by torch, one call per batch element. The host must know where each element's rows end."""
    sets = [rows(count, channels).chunk(ELEMENTS) for _ in range(repeats(count, channels))]
    return lambda: [torch.stack([part.mean(0) for part in parts]) for parts in sets]


def proven_forward(channels: int, window: str) -> None:
    book = book_of(PROVEN_SITES, window)
    features = rows(len(book.in_indices), channels)
    exact = sparse_pools.sparse_max_pool_reference(features.double(), book.neighbours)
    assert torch.equal(forward(book, features, False).double(), exact)
    exact = sparse_pools.sparse_avg_pool_reference(features.double(), book.neighbours)
    torch.testing.assert_close(forward(book, features, True).double(), exact, rtol=2e-3, atol=1e-3)


def proven_backward(channels: int, window: str) -> None:
    book = book_of(PROVEN_SITES, window)
    features = rows(len(book.in_indices), channels)
    y = forward(book, features, False)
    given = (torch.randn_like(y), y, features)
    exact = sparse_pools.max_pool_gradient_reference(*(t.double() for t in given), book.reverse)
    torch.testing.assert_close(backward(book, *given).double(), exact, rtol=2e-3, atol=1e-3)


def proven_whole(channels: int) -> None:
    features = rows(PROVEN_SITES, channels)
    for average in (True, False):
        exact = sparse_global_pools.sparse_global_pool_reference(
            features.double(), batch_of(PROVEN_SITES), ELEMENTS, average
        )[0]
        torch.testing.assert_close(whole(features, average).double(), exact, rtol=2e-3, atol=1e-3)


def repeats(count: int, channels: int) -> int:
    return copies_past_cache(2 * count * channels)


def pools(table: str, *found: tuple[int, int, int, int]) -> dict[str, Settings]:
    """Candidates: bytes per tile, maximum columns, taps in flight, warps."""
    return {f"{b}B {c}c {a}a {w}w": {(tables, table): PoolConfig(b, c, a, w)} for b, c, a, w in found}


def wholes() -> dict[str, Settings]:
    """Candidates: bytes per tile, maximum columns, minimum rows per program, programs per multiprocessor, warps."""
    found = [(4096, 64, 256, 8, 4), (2048, 64, 256, 8, 4), (8192, 64, 256, 4, 4), (4096, 128, 256, 8, 4)]
    found += [(8192, 128, 256, 8, 8), (4096, 64, 512, 4, 4), (4096, 64, 128, 16, 4)]
    return {f"{b}B {c}c {s}r x{p} {w}w": {(tables, "GLOBAL"): GlobalConfig(b, c, s, p, w)} for b, c, s, p, w in found}


FORWARDS = pools(
    "POOL_FORWARD", (2048, 128, 8, 4), (2048, 128, 4, 4), (1024, 128, 8, 2), (4096, 128, 8, 8), (4096, 128, 4, 4),
    (2048, 64, 8, 4), (1024, 64, 8, 4), (512, 128, 8, 1),
)  # fmt: skip
BACKWARDS = pools(
    "POOL_BACKWARD", (2048, 128, 4, 4), (2048, 128, 8, 4), (2048, 128, 2, 4), (1024, 128, 4, 2), (4096, 128, 4, 8),
    (2048, 64, 4, 4), (1024, 64, 4, 4),
)  # fmt: skip


def tasks() -> Iterator[Task]:
    for count, channels, window in product(SITES, CHANNELS, WINDOWS):
        taps = WINDOWS[window][0] ** 3
        results = count // 3  # about as many taps per site as a surface has neighbours
        moved = 2 * channels * (count + results) + 4 * taps * results
        yield Task(
            f"forward {window} {count} sites {channels} channels",
            moved,
            FORWARDS,
            partial(timed_forward, count, channels, window),
            partial(proven_forward, channels, window),
            goal="copy",
            repeats=repeats(count, channels),
        )
        yield Task(
            f"backward {window} {count} sites {channels} channels",
            2 * channels * 2 * (count + results) + 4 * taps * count,
            BACKWARDS,
            partial(timed_backward, count, channels, window),
            partial(proven_backward, channels, window),
            goal="copy",
            repeats=repeats(count, channels),
        )
    for count, channels in product(SITES, CHANNELS):
        yield Task(
            f"whole {count} sites {channels} channels",
            2 * count * channels + 4 * count,
            wholes(),
            partial(timed_whole, count, channels),
            partial(proven_whole, channels),
            {"torch": partial(by_torch, count, channels)},
            goal="read",
            repeats=repeats(count, channels),
        )


TASKS = list(tasks())

if __name__ == "__main__":
    main(TASKS, __doc__)
