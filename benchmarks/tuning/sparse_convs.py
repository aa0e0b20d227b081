"""Tune sparse convolution: the tables of `sites/tables.py`, and the numbers of rows from which sorting and pair lists
pay off.

    python benchmarks/tuning/sparse_convs.py [--out sparse_convs.json] [--seconds 100] [--quick]

The work is a submanifold convolution of 3 x 3 x 3 in float16, over a wavy surface one or two sites thick, with rows in
random order. Row orders and pair lists are computed in advance, and kept as in a rulebook. "row order" and "list pairs"
time computing them. "sorting at" and "lists at" time this together with a convolution, to find the number of rows from
which they pay off for a single convolution. The gradient of the features is the forward kernel with a transposed
weight, so it has the same candidates. Other row orders are timed for comparison: the original order, rows sorted by
their masks as numbers, the order without its sorted table, and a surface whose sites are sorted from the start. The
goal states the work of a convolution. It has the flops of its pairs, the flops that tiles of 128 rows multiply, and the
bytes of features and weight that these tiles load from L2. Candidates are checked on a surface with few sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels.sites import sparse_convs, tables
from rooftop.kernels.sites.launches import (
    convolved,
    neighbour_masks,
    pairs_of,
    row_order,
    rows_by_mask,
    sorted_table,
    weight_gradient,
)
from rooftop.kernels.sites.tables import ANY, RowsConfig, WeightConfig

SIZES = [(400_000, 64), (400_000, 128), (100_000, 64), (1_000_000, 64), (400_000, 32), (400_000, 256), (1_000_000, 128)]
SIZES = [(60, 8)] if QUICK else SIZES  # sites and channels
TABLES = (60,) if QUICK else (100_000, 400_000, 1_000_000)
FEW = (60,) if QUICK else (4_000, 16_000, 64_000)
PROVEN_SITES = 50 if QUICK else 3000
TILE = 128  # rows of a tile, to compute the goal
TAPS = 27


@cache
def surface(count: int, in_order: bool = False) -> Tensor:
    """The neighbour table (N, 27) int32 of at least `count` sites, which are in random order or sorted."""
    torch.manual_seed(count)
    side = int((count / 1.9) ** 0.5) + 1
    x, y = torch.meshgrid(*(torch.arange(side, device=DEVICE),) * 2, indexing="ij")
    z = (8 * (torch.sin(x / 9.0) + torch.cos(y / 13.0)) + 20).round().long()
    # A second layer of sites keeps steep parts connected, as in a scanned surface.
    site = torch.stack((x, y, z), -1).reshape(-1, 3)
    above = site[torch.rand(len(site), device=DEVICE) < 0.9] + torch.tensor([0, 0, 1], device=DEVICE)
    site = torch.cat((site, above))
    site = site[torch.randperm(len(site), device=DEVICE)]

    def keys(at: Tensor) -> Tensor:
        return (at[:, 0] + 1) << 40 | (at[:, 1] + 1) << 20 | (at[:, 2] + 1)

    ordered, place = keys(site).sort()
    if in_order:
        site, place = site[place], torch.arange(len(site), device=DEVICE)
    columns = []
    for offset in product((-1, 0, 1), repeat=3):
        wanted = keys(site + torch.tensor(offset, device=DEVICE))
        found = torch.searchsorted(ordered, wanted).clamp_(max=len(site) - 1)
        columns.append(torch.where(ordered[found] == wanted, place[found], -1))
    return torch.stack(columns, 1).int()


@cache
def order_of(count: int, in_order: bool = False) -> Tensor:
    table = surface(count, in_order)
    return sorted_table(table, rows_by_mask(neighbour_masks(table)))


@cache
def lists_of(count: int) -> tuple[Tensor, Tensor]:
    return pairs_of(surface(count), len(surface(count)))


Work = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (sites of the surface, features, gradient, weight)


def forward(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(features, weight, None, surface(count), order_of(count), mirrored=False)


def for_features(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(gradient, weight.permute(2, 1, 0), None, surface(count), order_of(count), mirrored=True)


def for_weight(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    table = surface(count)
    return weight_gradient(gradient, features, table.shape[1], table, None, lists_of(count))


def sorting(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(features, weight, None, surface(count), None, mirrored=False)


def listing(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    table = surface(count)
    return weight_gradient(gradient, features, table.shape[1], table, None, None)


# ---- other orders of rows ----------------------------------------------------------------------------------------


@cache
def order_alone(count: int) -> Tensor:
    return order_of(count)[0].clone()


@cache
def masks_as_numbers(count: int) -> Tensor:
    table = surface(count)
    return sorted_table(table, neighbour_masks(table)[:, 0].sort(stable=True).indices.int())


@cache
def as_they_came(count: int) -> Tensor:
    table = surface(count)
    return sorted_table(table, torch.arange(len(table), dtype=torch.int32, device=DEVICE))


def ordered_by(order: Callable[[int], Tensor]) -> Work:
    def work(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        return convolved(features, weight, None, surface(count), order(count), mirrored=False)

    return work


def on_sorted_sites(count: int, features: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return convolved(features, weight, None, surface(count, True), order_of(count, True), mirrored=False)


ORDERS: dict[str, Work] = {
    "as they came": ordered_by(as_they_came),
    "masks as numbers": ordered_by(masks_as_numbers),
    "order alone": ordered_by(order_alone),
    "sorted sites": on_sorted_sites,
}


# ---- correctness -------------------------------------------------------------------------------------------------

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
EXACT |= {sorting: EXACT[forward], listing: EXACT[for_weight]}


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
    work(count, *sets[0])  # computes the tables that a rulebook keeps
    return lambda: [work(count, *each) for each in sets]


def proven(work: Work, channels: int) -> None:
    given = operands(PROVEN_SITES, channels)
    exact = EXACT[work](surface(PROVEN_SITES), *(t.double() for t in given))
    torch.testing.assert_close(work(PROVEN_SITES, *given).double(), exact, rtol=1e-2, atol=1e-2 * float(exact.std()))


def tables_checked() -> None:
    """Check masks, the sorted table and pair lists against the neighbour table."""
    table = surface(PROVEN_SITES)
    masks = neighbour_masks(table)
    assert all(torch.equal((masks[:, 0] >> tap) & 1, (table[:, tap] >= 0).int()) for tap in range(TAPS)), "wrong masks"
    order = rows_by_mask(masks)
    at = order.long()
    assert torch.equal(at.sort().values, torch.arange(len(table), device=DEVICE)), "no order"
    expected = torch.cat((order[None], masks[at].t(), table[at].t()))
    assert torch.equal(sorted_table(table, order), expected), "wrong table"
    pairs, counts = pairs_of(table, len(table))
    for tap, many in enumerate(counts.tolist()):
        row = (table[:, tap] >= 0).nonzero().squeeze(1)
        assert torch.equal(pairs[:, tap, :many], torch.stack((table[row, tap], row.int()))), "wrong pairs"


# ---- candidates --------------------------------------------------------------------------------------------------


def rows(channels: int) -> dict[str, Settings]:
    """Candidates: rows, columns, channels at a time, warps, stages. Here 3 and 4 stages are the same."""
    found = [(64, 64, 64, 4, 5), (128, 64, 64, 4, 5), (128, 64, 64, 4, 7), (256, 64, 64, 8, 5)]
    found += [(256, 64, 32, 8, 5), (256, 64, 32, 4, 5)]
    if channels <= 32:
        found = [(128, 32, 32, 4, 3), (128, 32, 32, 4, 5), (128, 32, 32, 4, 7)]
        found += [(256, 32, 32, 4, 5), (256, 32, 32, 8, 5)]
    if channels > 64:
        found = [(128, 128, 64, 8, 5), (128, 128, 64, 8, 7), (128, 128, 64, 4, 3), (256, 128, 64, 8, 5)]
        found += [(256, 128, 64, 8, 3), (256, 128, 32, 8, 5), (256, 128, 32, 8, 7)]
    if channels > 128:
        found += [(128, 256, 64, 8, 3), (128, 256, 64, 8, 5), (128, 256, 32, 8, 5)]
    return {
        f"{rows}x{columns}x{depth} {warps}w {stages}s": {
            (tables, "HALF"): (RowsConfig(ANY, rows, columns, depth, warps, stages),)
        }
        for rows, columns, depth, warps, stages in found
    }


def weights(channels: int) -> dict[str, Settings]:
    """Candidates: channels of the result, channels of the features, pairs at a time, warps, stages, programs per
    multiprocessor."""
    found = [(64, 64, 32, 4, 5, 7), (64, 64, 32, 4, 5, 14), (64, 64, 32, 4, 7, 7), (64, 64, 64, 4, 5, 4)]
    found += [(64, 64, 64, 4, 3, 7)]
    if channels <= 32:
        found = [(32, 32, 64, 4, 3, 8), (32, 32, 64, 4, 5, 8), (32, 32, 32, 4, 5, 8), (32, 32, 64, 4, 5, 16)]
    if channels > 64:
        found = [(128, 128, 32, 8, 5, 2), (128, 128, 32, 8, 5, 4), (128, 128, 32, 8, 7, 2), (128, 128, 64, 8, 5, 2)]
        found += [(128, 128, 64, 8, 3, 2)]
    if channels > 128:
        found += [(256, 128, 32, 8, 5, 1), (256, 128, 32, 8, 5, 2)]
    return {
        f"{outs}x{ins}x{depth} {warps}w {stages}s x{programs}": {
            (tables, "WEIGHT_HALF"): (WeightConfig(ANY, outs, ins, depth, warps, stages, programs),)
        }
        for outs, ins, depth, warps, stages, programs in found
    }


def table_rows(name: str) -> dict[str, Settings]:
    return {f"{rows} rows": {(tables, name): rows} for rows in (64, 128, 256)}


def thresholds(name: str, never: str, always: str) -> dict[str, Settings]:
    module = tables
    return {never: {(module, name): ANY}, always: {(module, name): 0}}


def of_table(make: Callable[[Tensor], object], count: int) -> Call:
    table = surface(count)
    return lambda: make(table)


# ---- tasks -------------------------------------------------------------------------------------------------------


def moved_bytes(count: int, channels: int) -> int:
    return 2 * (2 * count * channels + TAPS * channels * channels) + 4 * TAPS * count


def measured_by(work: Work, count: int, channels: int) -> str:
    """The goal's text: the work of the convolution on this surface."""
    table, masks = surface(count), order_of(count)[1]
    pairs = int((table >= 0).sum())
    tiles = torch.nn.functional.pad(masks, (0, -len(masks) % TILE)).view(-1, TILE)
    # number of taps that tiles multiply, summed over all tiles
    taps = sum(int(((tiles >> tap) & 1).any(1).sum()) for tap in range(TAPS))
    product_flops, gathered = 2 * channels**2, 2 * channels * pairs
    if work is for_weight:
        return f"{product_flops * pairs / 1e9:.1f} GFLOP, {2 * gathered / 1e6:.0f} MB of features and gradient"
    multiplied, weight = taps * TILE * product_flops, taps * product_flops
    return (
        f"{product_flops * pairs / 1e9:.1f} GFLOP, {multiplied / 1e9:.1f} multiplied, "
        f"{gathered / 1e6:.0f} MB of features, {weight / 1e6:.0f} of weight"
    )


def with_goal(task: Task, work: Work, count: int, channels: int) -> Task:
    """A task that computes its goal once its surface exists."""
    make = task.call

    def call() -> Call:
        made = make()
        task.goal = measured_by(work, count, channels)
        return made

    task.call = call
    return task


def tasks() -> Iterator[Task]:
    for count, channels in SIZES:
        for work, candidates in ((forward, rows), (for_features, rows), (for_weight, weights)):
            if work is for_features and (count, channels) not in SIZES[:2]:
                continue
            others = ORDERS if work is forward and channels in (8, 64, 128) else {}
            task = Task(
                f"{work.__name__} {count} sites {channels} channels",
                moved_bytes(count, channels),
                candidates(channels),
                partial(timed, work, count, channels),
                partial(proven, work, channels),
                {name: partial(timed, other, count, channels) for name, other in others.items()},
                repeats=repeats(count, channels),
            )
            yield with_goal(task, work, count, channels)
    for count in TABLES:
        read = 4 * TAPS * count
        for name, make, size in (("row order", row_order, "SORT_ROWS"), ("list pairs", listed, "PAIR_ROWS")):
            yield Task(f"{name} {count} sites", read, table_rows(size), partial(of_table, make, count), tables_checked)
    channels = SIZES[0][1]
    for count in FEW:
        for name, work, given, settings in (
            ("sorting at", sorting, forward, thresholds("SORTED_FROM", "as they are", "sorted")),
            ("lists at", listing, for_weight, thresholds("LISTED_FROM", "by rows", "listed")),
        ):
            yield Task(
                f"{name} {count} sites {channels} channels",
                moved_bytes(count, channels),
                settings,
                partial(timed, work, count, channels),
                partial(proven, work, channels),
                {"made before": partial(timed, given, count, channels)},
                repeats=repeats(count, channels),
            )


def listed(table: Tensor) -> object:
    return pairs_of(table, len(table))


TASKS = list(tasks())

if __name__ == "__main__":
    main(TASKS, __doc__)
