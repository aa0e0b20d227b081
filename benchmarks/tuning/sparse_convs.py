"""The tables of sparse convolution: HALF and WEIGHT_HALF of `sparse_conv_launches.py`, and whether rows are sorted.

    python benchmarks/tuning/sparse_convs.py [--out sparse_convs.json] [--seconds 100] [--quick]

A submanifold convolution of 3 x 3 x 3 over a wavy surface one or two sites thick, its rows in random order, in float16.
Tables, orders and lists of pairs are made before, as a rulebook keeps them; "sort" and "list pairs" time the making of
them. The gradient of the features is the forward kernel with the weight transposed, and has the same candidates.
Candidates are proven on a surface of few sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels import sparse_conv_launches, sparse_convs
from rooftop.kernels.sparse_conv_launches import (
    RowsConfig,
    WeightConfig,
    convolved,
    neighbour_masks,
    pairs_of,
    rows_by_mask,
    weight_gradient,
)

SITES = (60,) if QUICK else (100_000, 400_000, 1_000_000)
CHANNELS = (8,) if QUICK else (64, 128)
PROVEN_SITES = 50 if QUICK else 3000
TAPS = 27


@cache
def surface(count: int) -> Tensor:
    """Neighbours (N, 27) int32 of at least `count` sites, by a search among sorted keys."""
    torch.manual_seed(count)
    side = int((count / 1.9) ** 0.5) + 1
    x, y = torch.meshgrid(*(torch.arange(side, device=DEVICE),) * 2, indexing="ij")
    z = (8 * (torch.sin(x / 9.0) + torch.cos(y / 13.0)) + 20).round().long()
    # A second layer where the surface is steep keeps it connected, as one that was scanned is.
    site = torch.stack((x, y, z), -1).reshape(-1, 3)
    above = site[torch.rand(len(site), device=DEVICE) < 0.9] + torch.tensor([0, 0, 1], device=DEVICE)
    site = torch.cat((site, above))
    site = site[torch.randperm(len(site), device=DEVICE)]

    def keys(at: Tensor) -> Tensor:
        return (at[:, 0] + 1) << 40 | (at[:, 1] + 1) << 20 | (at[:, 2] + 1)

    ordered, place = keys(site).sort()
    columns = []
    for offset in product((-1, 0, 1), repeat=3):
        wanted = keys(site + torch.tensor(offset, device=DEVICE))
        found = torch.searchsorted(ordered, wanted).clamp_(max=len(site) - 1)
        columns.append(torch.where(ordered[found] == wanted, place[found], -1))
    return torch.stack(columns, 1).int()


@cache
def order_of(count: int) -> Tensor:
    return rows_by_mask(neighbour_masks(surface(count)))


@cache
def lists_of(count: int) -> tuple[Tensor, Tensor]:
    return pairs_of(surface(count), len(surface(count)))


Work = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # sites of the surface, features, gradient, weight


def forward(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(features, weight, None, surface(count), order_of(count), mirrored=False)


def for_features(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(gradient, weight.permute(2, 1, 0), None, surface(count), order_of(count), mirrored=True)


def for_weight(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return weight_gradient(gradient, features, TAPS, *lists_of(count))


def unsorted(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    natural = torch.arange(len(features), dtype=torch.int32, device=DEVICE)
    return convolved(features, weight, None, surface(count), natural, mirrored=False)


EXACT: dict[Work, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    forward: lambda table, features, gradient, weight: sparse_convs.sparse_conv_reference(
        features, weight, None, table
    ),
    for_features: lambda table, features, gradient, weight: sparse_convs.features_gradient_reference(
        gradient, weight, table, len(table)
    ),
    for_weight: lambda table, features, gradient, weight: sparse_convs.weight_gradient_reference(
        gradient, features, table
    ),
}


def operands(count: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(features, gradient, weight)."""
    sites = len(surface(count))
    half = torch.float16
    weight = randn(channels, TAPS, channels, dtype=half) * (9 * channels) ** -0.5
    return randn(sites, channels, dtype=half), randn(sites, channels, dtype=half), weight


def repeats(count: int, channels: int) -> int:
    return copies_past_cache(4 * count * channels)


def timed(work: Work, count: int, channels: int) -> Call:
    sets = [operands(count, channels) for _ in range(repeats(count, channels))]
    order_of(count), lists_of(count)  # as a rulebook keeps them
    return lambda: [work(count, *each) for each in sets]


def proven(work: Work, channels: int) -> None:
    given = operands(PROVEN_SITES, channels)
    exact = EXACT[work](surface(PROVEN_SITES), *(t.double() for t in given))
    torch.testing.assert_close(work(PROVEN_SITES, *given).double(), exact, rtol=1e-2, atol=1e-2 * float(exact.std()))


def rows(channels: int) -> dict[str, Settings]:
    """By rows, columns, channels at a time, warps and stages, which count by twos here: 3 and 4 are the same."""
    found = [(128, 64, 64, 4, 3), (128, 64, 64, 4, 5), (128, 64, 32, 4, 5), (64, 64, 64, 4, 3), (64, 64, 64, 4, 5)]
    found += [(256, 64, 64, 8, 3), (128, 64, 64, 8, 3)]
    if channels > 64:
        found += [(128, 128, 64, 8, 3), (128, 128, 64, 8, 5), (128, 128, 32, 8, 5), (64, 128, 64, 4, 3)]
        found += [(128, 128, 64, 4, 3), (64, 128, 128, 4, 3)]
    return {
        f"{rows}x{columns}x{depth} {warps}w {stages}s": {
            (sparse_conv_launches, "HALF"): (RowsConfig(sparse_conv_launches.ANY, rows, columns, depth, warps, stages),)
        }
        for rows, columns, depth, warps, stages in found
    }


def weights(channels: int) -> dict[str, Settings]:
    """By channels of the result, of the features, pairs at a time, warps, stages, and programs a multiprocessor."""
    found = [(64, 64, 64, 4, 3, 8), (64, 64, 64, 4, 5, 4), (64, 64, 128, 4, 3, 4), (64, 64, 32, 4, 5, 8)]
    found += [(64, 64, 64, 4, 3, 16), (64, 64, 128, 8, 3, 4)]
    if channels > 64:
        found += [(128, 128, 64, 8, 3, 4), (128, 128, 32, 8, 5, 4), (128, 64, 64, 4, 3, 8), (128, 128, 64, 4, 3, 2)]
    return {
        f"{outs}x{ins}x{depth} {warps}w {stages}s x{programs}": {
            (sparse_conv_launches, "WEIGHT_HALF"): WeightConfig(outs, ins, depth, warps, stages, programs)
        }
        for outs, ins, depth, warps, stages, programs in found
    }


def tasks() -> Iterator[Task]:
    for count, channels in product(SITES, CHANNELS):
        table = 4 * TAPS * count
        moved = 2 * (2 * count * channels + TAPS * channels * channels) + table
        for work, candidates in ((forward, rows), (for_features, rows), (for_weight, weights)):
            peers = {"unsorted": partial(timed, unsorted, count, channels)} if work is forward else {}
            yield Task(
                f"{work.__name__} {count} sites {channels} channels",
                moved,
                candidates(channels),
                partial(timed, work, count, channels),
                partial(proven, work, channels),
                peers,
                repeats=repeats(count, channels),
            )
    for count in SITES:
        yield Task(f"sort {count} sites", 4 * TAPS * count, table_rows("MASK_ROWS"), partial(sorting, count), checked)
        yield Task(
            f"list pairs {count} sites", 4 * TAPS * count, table_rows("PAIR_ROWS"), partial(listing, count), checked
        )


def table_rows(name: str) -> dict[str, Settings]:
    return {f"{rows} rows": {(sparse_conv_launches, name): rows} for rows in (32, 64, 128)}


def sorting(count: int) -> Call:
    table = surface(count)
    return lambda: rows_by_mask(neighbour_masks(table))


def listing(count: int) -> Call:
    table = surface(count)
    return lambda: pairs_of(table, len(table))


def checked() -> None:
    """Masks and pairs against the table."""
    table = surface(PROVEN_SITES)
    masks = neighbour_masks(table)[:, 0]
    assert all(torch.equal((masks >> tap) & 1, (table[:, tap] >= 0).int()) for tap in range(TAPS)), "wrong masks"
    pairs, counts = pairs_of(table, len(table))
    for tap, many in enumerate(counts.tolist()):
        row = (table[:, tap] >= 0).nonzero().squeeze(1)
        assert torch.equal(pairs[:, tap, :many], torch.stack((table[row, tap], row.int()))), "wrong pairs"


TASKS = list(tasks())

if __name__ == "__main__":
    main(TASKS, __doc__)
