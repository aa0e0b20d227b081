"""Sparse convolution equals conv3d on the dense grid, both ways: the CPU implementation, and (in a separate process)
the Triton kernels interpreted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import sparse_conv
from rooftop.kernels.sites import launches as sparse_conv_launches
from rooftop.kernels.sites import tables
from rooftop.kernels.sites.launches import (
    blocks_of,
    convolved,
    neighbour_masks,
    pairs_of,
    row_order,
    row_order_shape,
    rows_by_mask,
    sorted_table,
    unsorted_table,
    weight_gradient,
)
from rooftop.kernels.sites.sparse_convs import weight_gradient_reference
from rooftop.kernels.sites.tables import WeightConfig
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

if INTERPRETED:  # so that a tap's pairs are split into several parts, and a table is read by several programs
    tables.WEIGHT_HALF = (WeightConfig(1 << 31, 32, 32, 16, 4, 2, 8),)
    tables.WEIGHT_SINGLE = (WeightConfig(1 << 31, 32, 16, 16, 4, 2, 8),)
    tables.MASK_ROWS = tables.PAIR_ROWS = tables.LEAST_ROWS = 16
    tables.SORT_ROWS, tables.SCANNED, tables.PIECES = 16, 2, 16
    tables.KEY_ROWS, tables.ELEMENTS, tables.LISTED_FROM = 64, 512, 0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Leaves = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A convolution of sites of a grid, with the same kernel, stride, padding and dilation in each dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    channels: int
    out_channels: int
    batch: int
    submanifold: bool = False
    density: float = 0.3
    more: tuple[int, int, int] = (3, 2, 1)  # further places of the window along each dimension of the grid

    @property
    def grid(self) -> tuple[int, int, int]:
        span = self.dilation * (self.kernel - 1) + 1
        z, y, x = (max(1, span + each - 2 * self.padding) for each in self.more)
        return z, y, x


@dataclass(frozen=True)
class Book:
    """Sites (N, 4) and results (M, 4) as batch, z, y, x; neighbours (M, T) and reverse (N, T)."""

    sites: Tensor
    results: Tensor
    neighbours: Tensor
    reverse: Tensor


def book_of(case: Case) -> Book:
    """The book, computed by a dense grid of row numbers."""
    generator = torch.Generator().manual_seed(hash(case) % 2**31)
    active = torch.rand(case.batch, *case.grid, generator=generator) < case.density
    active[0, 0, 0, 0] = True
    sites = active.nonzero()
    number = torch.full(active.shape, -1)
    number[tuple(sites.t())] = torch.arange(len(sites))
    window = (case.kernel, case.stride, case.padding, case.dilation)
    if case.submanifold:
        results = sites
    else:
        reached = F.conv3d(active[:, None].double(), torch.ones(1, 1, *[case.kernel] * 3).double(), None, *window[1:])
        results = (reached[:, 0] > 0).nonzero()
    padded = F.pad(number, (case.padding, case.padding + 64) * 3, value=-1)
    batch, *corner = results.t()
    corner = [case.stride * each for each in corner]
    columns = []
    for tap in itertools.product(range(case.kernel), repeat=3):
        places = [at + case.dilation * each for at, each in zip(corner, tap, strict=True)]
        columns.append(padded[batch, *places])
    neighbours = torch.stack(columns, 1)
    reverse = torch.full((len(sites), case.kernel**3), -1)
    row, tap = (neighbours >= 0).nonzero(as_tuple=True)
    reverse[neighbours[row, tap], tap] = row
    return Book(sites, results, neighbours.int(), reverse.int())


def leaves_of(case: Case, book: Book, dtype: torch.dtype, device: str = "cpu") -> tuple[Leaves, Tensor]:
    """(features, weight, bias), and a gradient of the result."""
    torch.manual_seed(case.channels + case.out_channels)
    scale = (case.channels * case.kernel**3) ** -0.5
    shapes = (
        (len(book.sites), case.channels),
        (case.out_channels, *[case.kernel] * 3, case.channels),
        (case.out_channels,),
        (len(book.results), case.out_channels),
    )
    features, weight, bias, dy = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return (features, weight * scale, bias), dy


def dense(case: Case, book: Book) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """conv3d on the grid, read at the places of the results."""

    def function(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        grid = features.new_zeros(case.batch, *case.grid, case.channels)
        grid = grid.index_put(tuple(book.sites.to(features.device).t()), features)
        kernel = weight.permute(0, 4, 1, 2, 3)
        y = F.conv3d(grid.permute(0, 4, 1, 2, 3), kernel, bias, case.stride, case.padding, case.dilation)
        return y.permute(0, 2, 3, 4, 1)[tuple(book.results.to(features.device).t())]

    return function


def outcome(function: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def convolution(book: Book, device: str = "cpu", **options: Any) -> Callable[..., Tensor]:
    tables = book.neighbours.to(device), book.reverse.to(device)
    return lambda *leaves: sparse_conv(*leaves, *tables, **options)


def assert_gate(case: Case, dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
    book = book_of(case)
    leaves, dy = leaves_of(case, book, dtype, device)
    with count_launches() as launches:
        found = outcome(convolution(book, device, **options), leaves, dy)
    if INTERPRETED or device == "cuda":
        assert launches["sparse_conv_rows"] == 2
        assert launches["sparse_conv_weight_gradient"] == 1
        many = len(book.results) >= tables.LISTED_FROM
        assert launches["list_blocks"] == (options.get("order") is not None and options["order"].dim() == 2)
        assert launches["list_pairs"] == (many and not launches["list_blocks"])
    else:
        assert not launches
    eager = outcome(dense(case, book), leaves, dy)
    exact = outcome(dense(case, book), [t.double() for t in leaves], dy.double())
    for name, each in zip(("y", "dfeatures", "dweight", "dbias"), zip(found, eager, exact, strict=True), strict=True):
        assert_as_accurate(*each, what=f"{name} of {case} {dtype}")


def assert_law(case: Case) -> None:
    """Check that results agree in float64 except for the last digits."""
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float64)
    found, expected = (outcome(function, leaves, dy) for function in (convolution(book), dense(case, book)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{case}: {text}")


# ---- the dense grid --------------------------------------------------------------------------------------------

CHANNELS = (1, 3, 16, 18, 32, 48, 64, 130)
SWEEP = ((1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2), (1, 2, 3), CHANNELS, CHANNELS, (1, 2, 3, 4))


def pairwise() -> Iterator[tuple[int, ...]]:
    """A minimal subset of the sweep's product in which any two values of two parameters occur together."""
    generator = random.Random(0)
    sides = list(itertools.combinations(range(len(SWEEP)), 2))
    missing = {(i, j, a, b) for i, j in sides for a in SWEEP[i] for b in SWEEP[j]}
    while missing:
        i, j, a, b = min(missing)
        tried = []
        for _ in range(20):
            row = [generator.choice(values) for values in SWEEP]
            row[i], row[j] = a, b
            tried.append(tuple(row))
        best = max(tried, key=lambda row: sum((i, j, row[i], row[j]) in missing for i, j in sides))
        missing -= {(i, j, best[i], best[j]) for i, j in sides}
        yield best


def test_as_conv3d_over_the_sweep() -> None:
    for values in pairwise():
        assert_law(Case(*values))


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2])
def test_submanifold_over_the_sweep(kernel: int, dilation: int) -> None:
    for channels, out_channels in ((1, 18), (16, 64), (130, 3)):
        padding = dilation * (kernel // 2)
        more = (2 * padding + 3,) * 3
        assert_law(Case(kernel, 1, padding, dilation, channels, out_channels, 2, True, 0.2, more))


SMALL = {
    "strided": Case(2, 2, 1, 1, 18, 20, 2, more=(4, 3, 2)),
    "dilated": Case(2, 1, 1, 2, 33, 3, 1, more=(3, 3, 2)),
    "submanifold": Case(3, 1, 1, 1, 3, 18, 1, True, 0.5, (2, 2, 2)),
    "point": Case(1, 1, 0, 1, 130, 1, 2, more=(2, 2, 2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_gate(name: str, dtype: torch.dtype) -> None:
    assert_gate(SMALL[name], dtype)


def test_gate_with_more_than_32_taps() -> None:
    """More than 32 taps need two words of bits."""
    assert_gate(Case(4, 1, 2, 1, 3, 5, 1, density=0.05, more=(3, 2, 2)), torch.float32)


def test_gate_with_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_conv_launches, "is_wide", lambda *tensors: True)
    for sorted_from in (1, 1 << 30):
        monkeypatch.setattr(tables, "SORTED_FROM", sorted_from)
        assert_gate(SMALL["strided"], torch.float16)


def test_gate_where_orders_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SORTED_FROM", 1)
    for with_tables in (True, False):
        monkeypatch.setattr(tables, "TABLES_SORTED", with_tables)
        with count_launches() as launches:
            assert_gate(SMALL["strided"], torch.float32)
        assert launches["neighbour_bits"] == 2 * INTERPRETED
        assert launches["sort_table"] == 2 * (INTERPRETED and with_tables)


@pytest.mark.parametrize("programs", [64, 0])
def test_gate_without_lists_of_pairs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight gradient is summed in several parts, and in one part."""
    monkeypatch.setattr(tables, "LISTED_FROM", 1 << 30)
    monkeypatch.setattr(tables, "WEIGHT_SINGLE", (WeightConfig(1 << 31, 32, 16, 16, 4, 2, programs),))
    with count_launches() as launches:
        assert_gate(replace(SMALL["strided"], more=(6, 5, 4)), torch.float32)
    assert launches["sum_pieces"] == (INTERPRETED and programs > 0)


# ---- tables ----------------------------------------------------------------------------------------------------


def test_tables_of_the_cpu_while_another_device_is_the_default() -> None:
    table = torch.randint(-1, 5, (5, 9), dtype=torch.int32)
    expected = (rows_by_mask(neighbour_masks(table)), *pairs_of(table, 5))
    with torch.device("meta"):
        found = (rows_by_mask(neighbour_masks(table)), *pairs_of(table, 5))
    order, pairs, counts = found
    assert torch.equal(order, expected[0])
    assert torch.equal(counts, expected[2])
    for tap, count in enumerate(counts.tolist()):
        assert torch.equal(pairs[:, tap, :count], expected[1][:, tap, :count])


def test_no_reverse_is_that_of_a_submanifold_convolution() -> None:
    case = SMALL["submanifold"]
    book = book_of(case)
    (features, weight, bias), dy = leaves_of(case, book, torch.float32)
    order = rows_by_mask(neighbour_masks(book.neighbours))

    def found(reverse: Tensor | None, rows: Tensor | None) -> list[Tensor]:
        convolve = partial(sparse_conv, weight=weight, bias=bias, neighbours=book.neighbours)
        return outcome(lambda x: convolve(x, reverse=reverse, order=rows), [features], dy)

    for rows in (order, sorted_table(book.neighbours, order)):
        torch.testing.assert_close(found(None, rows), found(book.reverse, None))


def test_an_order_changes_no_bit() -> None:
    case = SMALL["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float32)
    if INTERPRETED:  # numbers whose products are exact, because NumPy's products of a row depend on the row's place
        features, weight, bias = ((each * 8).round() / 8 for each in leaves)
        leaves, dy = (features, weight, bias), (dy * 8).round() / 8
    plain = outcome(convolution(book), leaves, dy)
    order, reverse_order = torch.arange(len(book.results)).flip(0), torch.randperm(len(book.sites)).int()
    found = outcome(convolution(book, order=order, reverse_order=reverse_order), leaves, dy)
    assert all(map(torch.equal, found, plain))
    # With sorted tables, only the gradient of the weight is summed in the sorted order.
    tables = {"order": sorted_table(book.neighbours, order), "reverse_order": sorted_table(book.reverse, reverse_order)}
    beside = outcome(convolution(book, **tables), leaves, dy)
    instead = outcome(lambda *leaves: sparse_conv(*leaves, None, **tables), leaves, dy)
    assert all(map(torch.equal, instead, beside))
    y, dfeatures, dweight, dbias = beside
    assert all(map(torch.equal, (y, dfeatures, dbias), (plain[0], plain[1], plain[3])))
    torch.testing.assert_close(dweight, plain[2])


def test_gate_with_tables_in_order_alone() -> None:
    """Each dtype passes, with a stride, and for a submanifold convolution without a reverse table."""
    for name in ("strided", "submanifold"):
        for dtype in DTYPES:
            case = SMALL[name]
            book = book_of(case)
            leaves, dy = leaves_of(case, book, dtype)
            rows = {"order": row_order(book.neighbours)}
            if not case.submanifold:
                rows["reverse_order"] = row_order(book.reverse)
            with count_launches() as launches:
                found = outcome(lambda *leaves, rows=rows: sparse_conv(*leaves, None, **rows), leaves, dy)
            assert launches["list_blocks"] == launches["sparse_conv_weight_gradient"] == int(INTERPRETED)
            eager = outcome(dense(case, book), leaves, dy)
            exact = outcome(dense(case, book), [t.double() for t in leaves], dy.double())
            for each in zip(found, eager, exact, strict=True):
                assert_as_accurate(*each, what=f"{name} {dtype}")


@pytest.mark.parametrize("taps", [1, 27, 32, 33, 64])
def test_masks_have_a_bit_for_each_neighbour(taps: int) -> None:
    table = torch.randint(-3, 3, (50, taps), dtype=torch.int32)
    masks = neighbour_masks(table)
    assert masks.shape == (50, -(-taps // 32))
    for tap in range(taps):
        assert torch.equal((masks[:, tap // 32] >> tap % 32) & 1, (table[:, tap] >= 0).int())


def test_rows_with_the_same_mask_stand_together_in_their_order() -> None:
    masks = torch.randint(-2, 2, (200, 2), dtype=torch.int32)
    order = rows_by_mask(masks)
    assert sorted(order.tolist()) == list(range(200))
    groups = [list(rows) for _, rows in itertools.groupby(order.tolist(), key=lambda row: tuple(masks[row].tolist()))]
    assert len(groups) == len({tuple(mask) for mask in masks.tolist()})
    assert all(rows == sorted(rows) for rows in groups)


@pytest.mark.parametrize("bits", [(0, 5, 12, 30, 31), (3, 31, 32, 40, 63)])
def test_masks_that_follow_each_other_differ_in_one_tap(bits: tuple[int, ...]) -> None:
    """If each mask occurs once, consecutive masks differ like numbers of a Gray code."""
    words = 1 + max(bits) // 32
    chosen = torch.tensor(list(itertools.product((0, 1), repeat=len(bits))))[torch.randperm(32)]
    table = torch.full((32, 32 * words), -1, dtype=torch.int32)
    table[:, list(bits)] = chosen.int() - 1
    ordered = chosen[rows_by_mask(neighbour_masks(table)).long()]
    assert (ordered[1:] - ordered[:-1]).abs().sum(1).tolist() == [1] * 31


def test_rows_that_have_a_rare_tap_stand_together() -> None:
    table = torch.where(torch.rand(300, 27) < 0.6, 0, -1).int()
    table[:, 7] = -1
    table[::20, 7] = 0
    rare = table[rows_by_mask(neighbour_masks(table)).long(), 7] == 0
    assert int(rare.int().diff().abs().sum()) == 1


@pytest.mark.parametrize("taps", [1, 27, 35])
def test_a_table_in_order(taps: int) -> None:
    neighbours = torch.randint(-20, 40, (50, taps)).clamp(min=-1).int()
    order, words = torch.randperm(50).int(), -(-taps // 32)
    table, at = sorted_table(neighbours, order), order.long()
    assert table.shape == row_order_shape(50, taps) == row_order(neighbours).shape
    assert torch.equal(table[0], order)
    assert torch.equal(table[1 : 1 + words], neighbour_masks(neighbours)[at].t())
    assert torch.equal(table[1 + words :], neighbours[at].t())
    assert torch.equal(unsorted_table(table, taps), neighbours)


@pytest.mark.parametrize("taps", [1, 27, 35])
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_blocks_of_a_table_in_order(rows: int, taps: int) -> None:
    neighbours = torch.full((rows, taps), -1, dtype=torch.int32)
    neighbours[torch.rand(rows, taps) < 0.02] = 5
    neighbours[:, taps // 2] = 7
    table, size = sorted_table(neighbours, torch.randperm(rows)), tables.BLOCK_ROWS
    lists, counts = blocks_of(table, taps)
    assert lists.shape == (taps, -(-rows // size))
    for tap in range(taps):
        has = [bool((part >= 0).any()) for part in table[-taps:][tap].split(size)]
        assert lists[tap, : counts[tap]].tolist() == [block for block, one in enumerate(has) if one]


def test_pairs_of_a_table() -> None:
    table = torch.stack([torch.randperm(60) - 20 for _ in range(35)], 1)[:50].clamp(min=-1).int()
    pairs, counts = pairs_of(table, 40)
    assert pairs.shape == (2, 35, 40)
    for tap in range(35):
        rows = (table[:, tap] >= 0).nonzero().squeeze(1)
        assert pairs[1, tap, : counts[tap]].tolist() == rows.tolist()
        assert pairs[0, tap, : counts[tap]].tolist() == table[rows, tap].tolist()


def test_lists_of_pairs_may_be_given() -> None:
    """The pairs may be in any order, and padded with -1."""
    case = SMALL["submanifold"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float32)
    counts = (book.neighbours >= 0).sum(0).int()
    pairs = torch.full((2, 27, len(book.sites)), -1, dtype=torch.int32)
    for tap, count in enumerate(counts.tolist()):
        rows = (book.neighbours[:, tap] >= 0).nonzero().squeeze(1).flip(0)
        pairs[:, tap, :count] = torch.stack((book.neighbours[rows, tap], rows.int()))
    with count_launches() as launches:
        found = outcome(convolution(book, pairs=(pairs, counts)), leaves, dy)
    assert launches["list_pairs"] == 0
    torch.testing.assert_close(found, outcome(convolution(book), leaves, dy))


@pytest.mark.skipif(not INTERPRETED, reason="only the kernel reads lists")
@pytest.mark.parametrize("more", [1, 40, 1 << 30, (1 << 31) - 51])
def test_pieces_of_lists_end_where_their_memory_does(more: int) -> None:
    """The counts are larger than the lists. The memory behind the lists looks like pairs, but does not belong to
    them."""
    features, dy = torch.randn(50, 4), torch.randn(50, 6)
    neighbours = torch.stack([torch.randperm(50, dtype=torch.int32) for _ in range(2)], 1)
    listed, counts = pairs_of(neighbours, 50)
    memory = torch.zeros(listed.numel() + 4096, dtype=torch.int32)
    memory[: listed.numel()] = listed.reshape(-1)
    lists = memory[: listed.numel()].view(listed.shape)
    expected = weight_gradient(dy, features, 2, neighbours, None, (listed, counts))
    torch.testing.assert_close(weight_gradient(dy, features, 2, neighbours, None, (lists, counts + more)), expected)


@pytest.mark.skipif(not INTERPRETED, reason="only the kernel cuts lists into pieces")
@pytest.mark.parametrize("taps", [3, 19])
def test_pieces_of_taps_that_have_all_few_or_no_pairs(taps: int) -> None:
    neighbours = torch.full((150, taps), -1, dtype=torch.int32)
    neighbours[:, 0], neighbours[77, taps - 1] = torch.arange(150), 3
    dy, features = torch.randn(150, 4), torch.randn(150, 5)
    expected = weight_gradient_reference(dy, features, neighbours)
    for order, lists in ((None, pairs_of(neighbours, 150)), (row_order(neighbours), None)):
        found = weight_gradient(dy, features, taps, neighbours, order, lists)
        torch.testing.assert_close(found, expected)
        assert not found[:, 1 : taps - 1].any()


# ---- edges -----------------------------------------------------------------------------------------------------


def test_nothing_at_all() -> None:
    """Without sites, results or neighbours, results are the bias and gradients are zero."""
    for sites, rows in ((0, 0), (0, 3), (3, 0), (1, 1), (4, 3)):
        neighbours, reverse = (torch.full((count, 8), -1, dtype=torch.int32) for count in (rows, sites))
        book = Book(torch.empty(sites, 4), torch.empty(rows, 4), neighbours, reverse)
        leaves, dy = (torch.randn(sites, 5), torch.randn(4, 2, 2, 2, 5), torch.randn(4)), torch.randn(rows, 4)
        y, dfeatures, dweight, dbias = outcome(convolution(book), leaves, dy)
        assert torch.equal(y, leaves[2].expand(rows, 4))
        assert not dfeatures.any()
        assert dfeatures.shape == (sites, 5)
        assert not dweight.any()
        torch.testing.assert_close(dbias, dy.sum(0))


def test_one_point_is_a_linear_layer() -> None:
    neighbours = torch.full((1, 27), -1, dtype=torch.int32)
    neighbours[0, 13] = 0
    leaves, dy = (torch.randn(1, 5), torch.randn(4, 3, 3, 3, 5), torch.randn(4)), torch.randn(1, 4)
    found = outcome(lambda *each: sparse_conv(*each, neighbours), leaves, dy)
    expected = outcome(lambda x, w, b: F.linear(x, w[:, 1, 1, 1], b), leaves, dy)
    torch.testing.assert_close(found, expected)


def test_nan_stays_with_its_neighbours() -> None:
    case = SMALL["strided"]
    book = book_of(case)
    (features, weight, bias), _ = leaves_of(case, book, torch.float32)
    features[3] = torch.nan
    y = convolution(book)(features, weight, bias)
    assert torch.equal(y.isnan().all(1), (book.neighbours == 3).any(1))
    assert torch.equal(y.isnan().any(1), (book.neighbours == 3).any(1))


def test_four_runs_give_the_same_bits() -> None:
    case = SMALL["strided"]
    book = book_of(case)
    first, *others = [outcome(convolution(book), *leaves_of(case, book, torch.float16)) for _ in range(4)]
    assert all(torch.equal(*each) for other in others for each in zip(first, other, strict=True))


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    case = SMALL["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float32)
    expected = outcome(convolution(book), leaves, dy)[1:]
    for alone in range(3):
        given = [t.detach().requires_grad_(i == alone) for i, t in enumerate(leaves)]
        y = convolution(book)(*given)
        with count_launches() as launches:
            (found,) = torch.autograd.grad(y, given[alone], dy)
        torch.testing.assert_close(found, expected[alone])
        kernels = ("sparse_conv_rows", "sparse_conv_weight_gradient")
        assert [launches[name] for name in kernels] == [INTERPRETED and alone == i for i in range(2)]


def test_autocast_computes_in_its_dtype() -> None:
    case = SMALL["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float32)
    narrow = [t.bfloat16() for t in leaves]
    expected = outcome(convolution(book), narrow, dy.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(convolution(book), leaves, dy.bfloat16())
    assert found[0].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


# ---- laws of every operator ------------------------------------------------------------------------------------


def test_gradients_against_finite_differences() -> None:
    case = Case(2, 2, 1, 1, 2, 3, 1, more=(2, 2, 1))
    book = book_of(case)
    leaves, _ = leaves_of(case, book, torch.float64)
    assert torch.autograd.gradcheck(convolution(book), [t.requires_grad_() for t in leaves])


def test_derivatives_that_it_has_not_are_refused() -> None:
    book = book_of(SMALL["strided"])
    (features, weight, bias), _ = leaves_of(SMALL["strided"], book, torch.float32)
    y = convolution(book)(features.requires_grad_(), weight, bias)
    (gradient,) = torch.autograd.grad(y.square().sum(), features, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), features)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda w: convolution(book)(features.detach(), w, bias), (weight,), (weight,))


@pytest.mark.parametrize("kernel", ["(O, T, C)", "(O, *kernel, C)", "strided"])
def test_operator_checks_of_torch_library(kernel: str) -> None:
    book = book_of(SMALL["strided"])
    (features, weight, bias), _ = leaves_of(SMALL["strided"], book, torch.float32)
    if kernel == "(O, T, C)":
        weight = weight.flatten(1, 3)
    elif kernel == "strided":
        weight = weight.transpose(0, -1).contiguous().transpose(0, -1)
    tables = (book.neighbours, book.reverse, None, None, None, None, -1)
    operator = torch.ops.rooftop.sparse_conv.default
    tensors = (features.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(operator, (*tensors, *tables))


def test_autograd_records_nothing_between_the_weight_and_the_operator() -> None:
    """A view of the weight would add a node to record and to run in each layer."""
    book = book_of(SMALL["strided"])
    (features, weight, bias), _ = leaves_of(SMALL["strided"], book, torch.float32)
    y = convolution(book)(features, weight.requires_grad_(), bias)
    recorded = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert [node.variable is weight for node in recorded] == [True]


def test_compiled_whole() -> None:
    book = book_of(SMALL["strided"])
    leaves, dy = leaves_of(SMALL["strided"], book, torch.float32)
    compiled = torch.compile(lambda *each: 2 * convolution(book)(*each), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, leaves, dy), outcome(lambda *e: 2 * convolution(book)(*e), leaves, dy))


def test_cost_is_of_the_pairs_that_are_said_to_be_there() -> None:
    """If no number is given, the cost assumes one pair for each result."""
    book = book_of(SMALL["strided"])
    (features, weight, bias), _ = leaves_of(SMALL["strided"], book, torch.float32)
    rows, pairs = len(book.results), int((book.neighbours >= 0).sum())
    assert pairs > rows
    for given, counted in ((pairs, pairs), (None, rows)):
        with CountingMode() as found:
            convolution(book, pair_count=given)(features, weight, bias)
        (cost,) = (r.cost for r in found.records if r.name == "rooftop::sparse_conv")
        assert cost is not None
        assert cost.total_flops == 2 * counted * 18 * 20 + 20 * rows
        assert cost.read_bytes == 4 * (features.numel() + weight.numel() + 20 + book.neighbours.numel())
        assert cost.write_bytes == 4 * 20 * rows


# ---- wrong arguments -------------------------------------------------------------------------------------------

LINE = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, -1]], dtype=torch.int32)
LISTS = (torch.zeros(2, 3, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": [1.0]}, TypeError, "features must be a tensor, got list"),
        ({"neighbours": None}, TypeError, "neighbours must be a tensor, got NoneType"),
        ({"neighbours": LINE.long()}, TypeError, "neighbours must be int32, got torch.int64"),
        ({"neighbours": LINE.to_sparse()}, TypeError, "neighbours must be dense"),
        ({"reverse": LINE.float()}, TypeError, "reverse must be int32, got torch.float32"),
        ({"order": torch.zeros(3)}, TypeError, "order must be int32 or int64, got torch.float32"),
        ({"pairs": LINE}, TypeError, "pairs must be a tuple of two tensors"),
        ({"pairs": (LISTS[0], None)}, TypeError, r"pairs\[1\] must be a tensor, got NoneType"),
        ({"weight": torch.zeros(2, 3, 4).half()}, TypeError, "features is torch.float32, weight torch.float16"),
        ({"features": torch.zeros(3, 4).int()}, TypeError, "features must be bfloat16"),
        ({"neighbours": LINE.to("meta")}, ValueError, "features is on cpu, neighbours on meta"),
        ({"weight": torch.zeros(2, 4)}, ValueError, r"expected features \(N, C\) and weight \(O, \*kernel, C\)"),
        ({"weight": torch.zeros(2, 3, 5)}, ValueError, r"got \(3, 4\) and \(2, 3, 5\)"),
        ({"weight": torch.zeros(2, 0, 4)}, ValueError, "expected at least one tap"),
        ({"neighbours": LINE[:, :2]}, ValueError, r"expected neighbours \(M, 3\), a column for each tap"),
        ({"bias": torch.zeros(3)}, ValueError, r"expected bias of shape \(2,\), got \(3,\)"),
        ({"reverse": LINE[:2]}, ValueError, r"expected reverse of shape \(3, 3\), got \(2, 3\)"),
        ({"order": torch.arange(4)}, ValueError, r"expected order of shape \(3,\), got \(4,\)"),
        ({"reverse_order": torch.arange(2)}, ValueError, r"expected reverse_order of shape \(3,\), got \(2,\)"),
        ({"pairs": (LINE, LISTS[1])}, ValueError, r"expected pairs\[0\] of shape \(2, 3, P\) for any P, got \(3, 3\)"),
        ({"pairs": (LISTS[0], LISTS[1][:2])}, ValueError, r"expected pairs\[1\] of shape \(3,\), got \(2,\)"),
        ({"pair_count": -2}, ValueError, "pair_count must be None or a number of pairs, got -2"),
        ({"pair_count": 1.5}, ValueError, "pair_count must be None or a number of pairs, got 1.5"),
        ({"neighbours": LINE[:2], "features": torch.zeros(3, 4, requires_grad=True)}, ValueError, "give reverse"),
        ({"neighbours": LINE + 1}, ValueError, "neighbours must be from 0 to 2, .* got 0 to 3"),
        ({"neighbours": LINE - 1}, ValueError, "neighbours must be from 0 to 2, .* got -2 to 1"),
        ({"order": torch.tensor([0, 2, 2])}, ValueError, "order must contain each row from 0 to 2 once"),
        ({"order": torch.zeros(5, 3)}, TypeError, "order must be int32, got torch.float32"),
        ({"order": torch.zeros(4, 3).int()}, ValueError, r"expected order of shape \(5, 3\), got \(4, 3\)"),
        ({"order": torch.zeros(5, 3).int()}, ValueError, "order must contain each row from 0 to 2 once"),
        ({"order": sorted_table(LINE.flip(0), torch.arange(3))}, ValueError, "order .* from another neighbour table"),
        ({"neighbours": None, "order": torch.arange(3)}, TypeError, "neighbours must be a tensor, got NoneType"),
        ({"neighbours": None, "order": torch.zeros(5, 3).int()}, ValueError, "order must contain each row from 0 to 2"),
        (
            {"neighbours": None, "order": sorted_table(LINE + 1, torch.arange(3))},
            ValueError,
            "neighbours must be from 0 to 2, .* got 0 to 3",
        ),
        (
            {"order": sorted_table(LINE, torch.arange(3)), "pairs": (LINE, LISTS[1])},
            ValueError,
            r"expected pairs\[0\] of shape \(3, 1\), got \(3, 3\)",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    usual = {"features": torch.zeros(3, 4), "weight": torch.zeros(2, 3, 4), "bias": None, "neighbours": LINE}
    with pytest.raises(error, match=f"^sparse_conv: .*{message}"):
        sparse_conv(**{**usual, **arguments})


@pytest.mark.parametrize("wrong", [LINE, torch.full_like(LINE, -1), LINE.flip(1) + 5, LINE.flip(1).roll(1, 0)])
def test_a_reverse_table_of_another_rulebook(wrong: Tensor) -> None:
    features = torch.zeros(3, 4, requires_grad=True)
    y = sparse_conv(features, torch.ones(2, 3, 4), None, LINE, wrong)
    with pytest.raises(ValueError, match="reverse must have row m at"):
        y.sum().backward()


@pytest.mark.parametrize("reverse", [LINE.flip(1), None])
def test_an_order_of_the_other_direction_that_does_not_fit(reverse: Tensor | None) -> None:
    good = sorted_table(LINE.flip(1), torch.arange(3))
    without_masks = torch.cat((good[:1], torch.zeros_like(good[:1]), good[2:]))
    twice = torch.cat((torch.zeros_like(good[:1]), good[1:]))
    each_once = "reverse_order must contain each row from 0 to 2 once"
    for wrong, message in (
        (torch.tensor([0, 2, 2]), each_once),
        (twice, each_once),
        (without_masks, "reverse_order contains a sorted table that was made from another .*, or was changed"),
    ):
        features = torch.zeros(3, 4, requires_grad=True)
        y = sparse_conv(features, torch.ones(2, 3, 4), None, LINE, reverse, reverse_order=wrong)
        with pytest.raises(ValueError, match=f"^sparse_conv: {message}"):
            y.sum().backward()


def test_a_table_that_is_no_submanifold_convolution() -> None:
    features = torch.zeros(3, 4, requires_grad=True)
    y = sparse_conv(features, torch.ones(2, 3, 4), None, LINE.roll(1, 0))
    with pytest.raises(ValueError, match="neighbours, mirrored"):
        y.sum().backward()


# ---- the kernels -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    chosen = "gate or no_reverse or order or mask or rare or lists_of or _of_a_table or pieces or nothing or nobody"
    assert interpreted(str(Path(__file__)), "-k", f"interpreter or (({chosen}) and not dtype1)") > 20


HALVES = torch.empty(1 << 17, 128, dtype=torch.float16)


def product_of_rows(channels: int, with_table: bool) -> None:
    table = torch.empty(len(HALVES), 27, dtype=torch.int32)
    order = torch.empty(row_order_shape(len(table), 27) if with_table else (len(table),), dtype=torch.int32)
    weight = torch.empty(channels, 27, channels, dtype=torch.float16)
    convolved(HALVES[:, :channels].contiguous(), weight, None, table, order, mirrored=not with_table)


def product_of_pairs(channels: int, listed: bool) -> None:
    table = torch.empty(len(HALVES), 27, dtype=torch.int32)
    pairs = torch.empty(2, 27, len(HALVES), dtype=torch.int32), torch.empty(27, dtype=torch.int32)
    rows = HALVES[:, :channels].contiguous()
    weight_gradient(rows, rows, 27, table, None, pairs if listed else None)


def product_of_blocks(channels: int, wide: bool) -> None:
    order = torch.empty(row_order_shape(len(HALVES), 27), dtype=torch.int32)
    blocks = torch.empty(27, len(HALVES) // tables.BLOCK_ROWS, dtype=torch.int32)
    rows = HALVES[:, :channels].contiguous()
    weight_gradient(rows, rows, 27, None, order, (blocks, torch.empty(27, dtype=torch.int32)))


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize(
    ("make", "channels", "regular"),
    [
        (product_of_rows, 64, True),
        (product_of_rows, 128, True),
        (product_of_rows, 64, False),
        (product_of_pairs, 64, True),
        (product_of_pairs, 128, True),
        (product_of_pairs, 64, False),
        (product_of_blocks, 64, True),
        (product_of_blocks, 128, True),
    ],
)
def test_half_precision_compiles_for_sm_90(
    make: Callable[[int, bool], None],
    channels: int,
    regular: bool,
    monkeypatch: pytest.MonkeyPatch,
    spilled_bytes: Callable[[str], int],
) -> None:
    """The tensor cores' operands are copied asynchronously, without spills."""
    monkeypatch.setattr(tables, "LISTED_FROM", 1 << 30)
    ptx = compiled_by(lambda: make(channels, regular), monkeypatch)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg" in ptx
    assert spilled_bytes(ptx) == 0


def compiled_by(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """PTX of the first kernel that `work` launches, for a GPU that this machine need not have."""
    triton = pytest.importorskip("triton")
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        sparse_conv_launches, "launch", lambda kernel, grid, device, *args, **given: found.append((kernel, args, given))
    )
    work()
    kernel, arguments, given = found[0]
    names = {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    types, constants = dict.fromkeys(given, "constexpr"), dict(given)
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if value is None:
            types[name], constants[name] = "constexpr", None
            continue
        types[name] = names[value.dtype] if isinstance(value, Tensor) else "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, types, constants, divisible)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


LARGE = {
    "strided": Case(3, 2, 1, 1, 64, 128, 2, density=0.05, more=(60, 60, 60)),
    "submanifold": Case(3, 1, 1, 1, 64, 64, 2, True, 0.05, (60, 60, 60)),
    "odd": Case(3, 1, 1, 1, 18, 130, 2, True, 0.05, (40, 40, 40)),
    "few": Case(2, 2, 0, 1, 3, 16, 4, density=0.05, more=(30, 30, 30)),
    "125 taps": Case(5, 1, 2, 1, 16, 32, 1, True, 0.05, (30, 30, 30)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_gate_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    for least in (1, 1 << 30):
        monkeypatch.setattr(tables, "SORTED_FROM", least)
        monkeypatch.setattr(tables, "LISTED_FROM", least)
        assert_gate(LARGE[name], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "taps"), [(300_000, 27), (70_000, 125), (1, 1), (5, 64)])
def test_tables_on_a_gpu_are_those_of_the_cpu(rows: int, taps: int) -> None:
    """Entries beyond the numbers of pairs are ignored."""
    neighbours = torch.stack([torch.randperm(rows) for _ in range(taps)], 1).int()
    neighbours[torch.rand(neighbours.shape) < torch.rand(taps)] = -1
    masks, order = neighbour_masks(neighbours), rows_by_mask(neighbour_masks(neighbours))
    on_gpu = neighbours.cuda()
    assert torch.equal(neighbour_masks(on_gpu).cpu(), masks)
    assert torch.equal(rows_by_mask(masks.cuda()).cpu(), order)
    assert torch.equal(sorted_table(on_gpu, order.cuda()).cpu(), sorted_table(neighbours, order))
    table = sorted_table(neighbours, order)
    assert torch.equal(unsorted_table(table.cuda(), taps).cpu(), neighbours)
    of_pairs = pairs_of(neighbours, rows), pairs_of(on_gpu, rows)
    of_blocks = blocks_of(table, taps), blocks_of(table.cuda(), taps)
    for (lists, counts), (found, found_counts) in (of_pairs, of_blocks):
        assert torch.equal(found_counts.cpu(), counts)
        beyond = torch.arange(lists.shape[-1]) >= counts[:, None]
        assert torch.equal(found.cpu().masked_fill_(beyond, -1), lists.masked_fill_(beyond, -1))


@pytest.mark.gpu
def test_tf32_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LARGE["submanifold"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float32, "cuda")
    exact = outcome(convolution(book, "cuda"), [t.double() for t in leaves], dy.double())
    errors = []
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        found = outcome(convolution(book, "cuda"), leaves, dy)
        errors.append([float((a - b).abs().max()) for a, b in zip(found[:3], exact, strict=False)])
    assert all(plain * 20 < rounded for plain, rounded in zip(*errors, strict=True)), errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ten_runs_give_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    case = LARGE["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, dtype, "cuda")
    first, *others = [outcome(convolution(book, "cuda"), leaves, dy) for _ in range(10)]
    assert all(torch.equal(*each) for other in others for each in zip(first, other, strict=True))


@pytest.mark.gpu
def test_rows_that_there_are_not_are_read_as_none_on_a_gpu() -> None:
    case = LARGE["few"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float16, "cuda")
    holes = torch.rand(book.neighbours.shape) < 0.2
    results = []
    for hole in (-1, -(10**9), len(book.sites), 2**31 - 1):
        neighbours = torch.where(holes, hole, book.neighbours).int().cuda()
        results.append(outcome(lambda *each, n=neighbours: sparse_conv(*each, n, book.reverse.cuda()), leaves, dy))
    assert all(torch.equal(*each) for other in results[1:] for each in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    """Each of the 64 results has two neighbours: the first row of features, and one of the last 64 rows."""
    count = (1 << 24) + 40
    features = torch.zeros(count, 128, device="cuda", dtype=torch.float16)  # 2^31 + 5120 elements
    features[0], features[-64:] = 1, torch.randn(64, 128, device="cuda").half()
    neighbours = torch.full((64, 3), -1, dtype=torch.int32, device="cuda")
    neighbours[:, 0], neighbours[:, 2] = 0, torch.arange(count - 64, count, device="cuda")
    weight = torch.randn(16, 3, 128, device="cuda").half()
    y = sparse_conv(features, weight, None, neighbours)
    near = torch.stack((features[:1].expand(64, -1), torch.zeros_like(features[:64]), features[-64:]), 1)
    torch.testing.assert_close(y, torch.einsum("mtc,otc->mo", near.float(), weight.float()).half(), rtol=2e-3, atol=0.1)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    case = LARGE["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float16, "cuda")
    function = convolution(book, "cuda")
    expected = outcome(function, leaves, dy)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        outcome(function, leaves, dy)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = outcome(function, leaves, dy)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    case = LARGE["strided"]
    book = book_of(case)
    leaves, dy = leaves_of(case, book, torch.float16, "cuda")
    compiled = torch.compile(convolution(book, "cuda"), fullgraph=True)
    assert all(map(torch.equal, outcome(compiled, leaves, dy), outcome(convolution(book, "cuda"), leaves, dy)))
