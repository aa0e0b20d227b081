"""Pooling over sites equals pooling over the dense grid, and pooling over a batch equals pooling over each element.
Both laws are tested with the CPU implementation and (in a separate process) with the Triton kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.kernels import sparse_avg_pool, sparse_global_avg_pool, sparse_global_max_pool, sparse_max_pool
from rooftop.kernels.sites import pool_launches, tables
from rooftop.kernels.sites.sparse_pools import SparsePoolBackward
from rooftop.kernels.sites.tables import GlobalConfig
from rooftop.launch import INTERPRETED, count_launches
from rooftop.sparse import Rulebook, geometry
from rooftop.sparse.rulebook import rulebook_reference
from rooftop.testing import assert_as_accurate

if INTERPRETED:  # several programs for the rows of one batch element, several tiles of its columns
    tables.GLOBAL = GlobalConfig(tile_bytes=1024, columns=16, share=24, programs_per_sm=8, warps=4)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOCAL, GLOBAL = [sparse_max_pool, sparse_avg_pool], [sparse_global_max_pool, sparse_global_avg_pool]
Pool = Callable[..., Tensor]


def book_of(grid: tuple[int, int, int], density: float = 0.3, **options: Any) -> Rulebook:
    """The table for a batch of 2, from the definition."""
    active = torch.rand(2, *grid, generator=torch.Generator().manual_seed(1)) < density
    active[0, 0, 0, 0] = True
    return rulebook_reference(active.nonzero(), geometry(2, grid, **options))


BOOKS = {
    "halved": {"ksize": 2, "stride": 2},
    "overlapping": {"ksize": 3, "stride": 2, "padding": 1},
    "every site": {"ksize": (3, 1, 2), "padding": (1, 0, 1)},
    "dilated": {"ksize": (2, 3, 1), "dilation": (2, 1, 1), "stride": (1, 2, 1)},
}


def features_of(book: Rulebook, channels: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that are all different, most of them below 0."""
    count = len(book.in_indices) * channels
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    return (order / count - 0.75).to(dtype).view(-1, channels)


def slopes_of(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)


def outcome(function: Pool, features: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    leaf = features.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, slopes_of(y))[0]


def on(book: Rulebook, pool: Pool, device: str = "cpu") -> Pool:
    return lambda features: pool(features, book.neighbours.to(device), book.reverse.to(device))


def written_out(book: Rulebook, pool: Pool) -> Pool:
    """Pool by gathering all neighbours. All values that equal a maximum get its gradient."""

    def function(features: Tensor) -> Tensor:
        table = book.neighbours.to(features.device).long()
        known, gathered = (table >= 0)[..., None], features[table.clamp(min=0)]  # (M, T, 1), (M, T, C)
        if pool is sparse_avg_pool:
            return gathered.where(known, 0).sum(1) / known.sum(1).clamp(min=1)
        best = gathered.where(known, -torch.inf).amax(1)
        taken = gathered.where(known & (gathered == best[:, None]), 0).sum(1)
        return torch.where(known.any(1), best, 0).detach() + taken - taken.detach()

    return function


# ---- the dense grid --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOOKS)
def test_maximum_as_max_pool3d_where_the_rest_is_minus_infinity(name: str) -> None:
    options: dict[str, Any] = BOOKS[name]
    book = book_of((6, 5, 4), **options)
    shape = geometry(2, (6, 5, 4), **options)

    def dense(features: Tensor) -> Tensor:
        grid = features.new_full((2, *shape.in_shape, features.shape[1]), -torch.inf)
        grid = grid.index_put(tuple(book.in_indices.t()), features)
        padded = F.pad(
            grid.permute(0, 4, 1, 2, 3), [p for p in reversed(shape.padding) for _ in range(2)], "constant", -torch.inf
        )
        y = F.max_pool3d(padded, shape.ksize, shape.stride, 0, shape.dilation)
        return y.permute(0, 2, 3, 4, 1)[tuple(book.out_indices.t())]

    features = features_of(book)
    for found, expected in zip(outcome(on(book, sparse_max_pool), features), outcome(dense, features), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BOOKS)
def test_mean_is_the_sum_on_the_dense_grid_by_how_many_are_there(name: str) -> None:
    options: dict[str, Any] = BOOKS[name]
    book = book_of((6, 5, 4), **options)
    shape = geometry(2, (6, 5, 4), **options)

    def summed(features: Tensor) -> Tensor:
        grid = features.new_zeros((2, *shape.in_shape, features.shape[1]))
        grid = grid.index_put(tuple(book.in_indices.t()), features).movedim(-1, 1).flatten(0, 1)[:, None]
        window = features.new_ones(1, 1, *shape.ksize)
        y = F.conv3d(grid, window, None, shape.stride, shape.padding, shape.dilation)
        return y[:, 0].unflatten(0, (2, -1)).movedim(1, -1)[tuple(book.out_indices.t())]

    features = features_of(book)
    dense = outcome(lambda x: summed(x) / summed(torch.ones_like(x)), features)
    for found, expected in zip(outcome(on(book, sparse_avg_pool), features), dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- accuracy --------------------------------------------------------------------------------------------------


def assert_gate(book: Rulebook, pool: Pool, features: Tensor) -> None:
    device = str(features.device)
    with count_launches() as launches:
        found = outcome(on(book, pool, device), features)
    by_kernel = INTERPRETED or features.is_cuda
    assert launches == ({"sparse_pool_rows": 1, "sparse_pool_gradient": 1} if by_kernel else {})
    eager, exact = outcome(written_out(book, pool), features), outcome(written_out(book, pool), features.double())
    for what, each in zip(("result", "gradient"), zip(found, eager, exact, strict=True), strict=True):
        assert_as_accurate(*each, what=what)
    if pool is sparse_max_pool:
        assert torch.equal(found[0].double(), exact[0])


@pytest.mark.parametrize("pool", LOCAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype, pool: Pool) -> None:
    """In half precision, some of the drawn numbers tie."""
    book = book_of((4, 4, 3), **BOOKS["overlapping"])
    assert_gate(book, pool, features_of(book, 20, dtype))


@pytest.mark.parametrize("pool", LOCAL)
def test_gate_over_several_tiles(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are tested with 64-bit offsets too."""
    monkeypatch.setattr(pool_launches, "is_wide", lambda *tensors: True)
    book = book_of((4, 3, 2), **BOOKS["halved"])
    assert_gate(book, pool, features_of(book, 150, torch.float32))


def test_gate_of_strided_features() -> None:
    book = book_of((4, 3, 2), **BOOKS["halved"])
    assert_gate(book, sparse_max_pool, features_of(book, 6, torch.float32).t().contiguous().t())


# ---- laws ------------------------------------------------------------------------------------------------------

# the maximum of sites 0 and 1, of no site, of site 2
TABLE = torch.tensor([[0, 1], [-1, -1], [2, -1]], dtype=torch.int32)
BACK = torch.tensor([[0, -1], [-1, 0], [2, -1]], dtype=torch.int32)


def test_all_that_equal_the_maximum_get_its_gradient() -> None:
    """spconv does the same; max_pool3d gives the gradient only to the first."""
    table = torch.tensor([[0, 1, 2], [1, -1, -1]], dtype=torch.int32)
    back = torch.tensor([[0, -1, -1], [1, 0, -1], [-1, -1, 0]], dtype=torch.int32)
    x = torch.tensor([[2.0, 1.0], [2.0, 3.0], [1.0, 3.0]], requires_grad=True)
    y = sparse_max_pool(x, table, back)
    assert y.tolist() == [[2, 3], [2, 3]]
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
    assert gradient.tolist() == [[1, 0], [101, 1010], [0, 10]]


def test_a_reverse_table_of_other_results_divides_by_no_zero() -> None:
    """On a GPU the tables are not checked. Results 0 and 1 have no neighbour, but the reverse table assigns a site to
    both."""
    table, back = torch.full((2, 2), -1, dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    dy, counts = torch.tensor([[1.0], [-3.0]]), torch.zeros(2, dtype=torch.int32)
    assert SparsePoolBackward(dy, None, None, counts, table, back, 1).computed().tolist() == [[-2.0]]


def test_nothing_is_zero_and_the_rest_may_be_below() -> None:
    """A maximum of negative numbers is negative, where spconv returns 0."""
    table = torch.tensor([[0, -1], [-1, -1], [-1, 1]], dtype=torch.int32)
    x = torch.tensor([[-3.0, -torch.inf], [-1.0, -2.0], [5.0, 5.0]])
    for pool in LOCAL:
        assert pool(x, table).tolist() == [[-3, -torch.inf], [0, 0], [-1, -2]]


def test_nan_is_a_maximum_and_stays_with_its_neighbours() -> None:
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    back = torch.tensor([[0, -1], [-1, 0], [1, -1]], dtype=torch.int32)
    for order in ([0, 1], [1, 0]):
        x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])[order]
        x = torch.cat([x, torch.tensor([[4.0, 5.0]])]).requires_grad_()
        y = sparse_max_pool(x, table, back)
        torch.testing.assert_close(y, torch.tensor([[torch.nan, 3], [4, 5]]), equal_nan=True)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient[:2], torch.tensor([[1.0, 0.0], [0.0, 1.0]])[order])
        assert sparse_avg_pool(x.detach(), table).isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("pool", LOCAL)
def test_no_reverse_is_that_of_a_submanifold_table(pool: Pool) -> None:
    book = book_of((4, 3, 2), ksize=3, subm=True)
    features = features_of(book, 5, torch.float32)
    given = outcome(on(book, pool), features)
    mirrored = outcome(lambda x: pool(x, book.neighbours), features)
    assert all(map(torch.equal, given, mirrored))


@pytest.mark.parametrize("pool", LOCAL)
def test_nothing_at_all(pool: Pool) -> None:
    """Without sites, results or channels, results and gradients are zeros."""
    for sites, rows, channels in ((0, 0, 3), (0, 2, 3), (2, 0, 3), (2, 3, 0)):
        table, back = (torch.full((count, 4), -1, dtype=torch.int32) for count in (rows, sites))
        y, gradient = outcome(lambda x, t=table, b=back: pool(x, t, b), torch.ones(sites, channels))
        assert torch.equal(y, torch.zeros(rows, channels))
        assert torch.equal(gradient, torch.zeros(sites, channels))


@pytest.mark.parametrize("pool", LOCAL)
def test_autocast_changes_nothing(pool: Pool) -> None:
    book = book_of((4, 3, 2), **BOOKS["halved"])
    features = features_of(book, 5, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = on(book, pool)(features)
    assert torch.equal(found, on(book, pool)(features))


# ---- batch elements --------------------------------------------------------------------------------------------

BATCH = torch.tensor([3, 0, 0, -1, 1, 3, 3, 0] * 8)  # no site in batch element 2


def each_by_itself(pool: Pool) -> Pool:
    """PyTorch's result for the rows of each batch element."""

    def function(features: Tensor) -> Tensor:
        found = []
        for element in range(4):
            rows = features[BATCH.to(features.device) == element]
            whole = rows.amax(0) if pool is sparse_global_max_pool and len(rows) else rows.sum(0) / max(1, len(rows))
            found.append(whole)
        return torch.stack(found)

    return function


def rows_of(dtype: torch.dtype, channels: int = 20) -> Tensor:
    """Rows with ties, most of them in half precision."""
    torch.manual_seed(4)
    return (torch.randint(-200, 50, (len(BATCH), channels)) / 64).to(dtype)


def assert_global_gate(pool: Pool, features: Tensor, batch: Tensor) -> None:
    with count_launches() as launches:
        found = outcome(lambda x: pool(x, batch, 4), features)
    kernels = 1 + (pool is sparse_global_max_pool)  # the gradient's kernel counts ties
    assert launches["sparse_global_pool_parts"] == (kernels if INTERPRETED or features.is_cuda else 0)
    eager, exact = outcome(each_by_itself(pool), features), outcome(each_by_itself(pool), features.double())
    for what, each in zip(("result", "gradient"), zip(found, eager, exact, strict=True), strict=True):
        assert_as_accurate(*each, what=what)
    assert not found[0][2].any()
    assert not found[1][batch == -1].any()


@pytest.mark.parametrize("pool", GLOBAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_gate(dtype: torch.dtype, pool: Pool) -> None:
    assert_global_gate(pool, rows_of(dtype), BATCH.int() if dtype == torch.float16 else BATCH)


@pytest.mark.parametrize("pool", GLOBAL)
def test_global_of_nothing(pool: Pool) -> None:
    for sites, channels in ((0, 3), (3, 3), (3, 0)):
        batch = torch.full((sites,), -1)
        y, gradient = outcome(lambda x, b=batch: pool(x, b, 2), torch.ones(sites, channels))
        assert torch.equal(y, torch.zeros(2, channels))
        assert torch.equal(gradient, torch.zeros(sites, channels))


def test_global_nan_and_infinities_stay_in_their_batch_element() -> None:
    features = torch.tensor([[torch.nan, -torch.inf], [1.0, -torch.inf], [2.0, torch.inf]])
    batch = torch.tensor([1, 1, 0])
    expected = torch.tensor([[2, torch.inf], [torch.nan, -torch.inf]])
    for pool in GLOBAL:
        torch.testing.assert_close(pool(features, batch, 2), expected, equal_nan=True)


# ---- laws of every operator ------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[Pool, Tensor]]:
    """Each call as a function of features."""
    book = book_of((4, 3, 2), **BOOKS["overlapping"])
    local = {pool.__name__: (on(book, pool), features_of(book, 3)) for pool in LOCAL}
    return local | {pool.__name__: (lambda x, p=pool: p(x, BATCH, 4), rows_of(torch.float64, 3)) for pool in GLOBAL}


CALLS = calls()
each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_gradients_against_finite_differences(name: str) -> None:
    function, features = CALLS[name]
    if name == "sparse_global_max_pool":  # not differentiable at ties
        features = features + torch.linspace(0, 1e-2, features.numel()).view(features.shape)
    assert torch.autograd.gradcheck(function, [features.requires_grad_()])


@each_call
def test_rows_in_another_order(name: str) -> None:
    """Another order of the rows changes only the order of the gradient, ties included."""
    order = torch.randperm(len(CALLS[name][1]), generator=torch.Generator().manual_seed(3))
    if "global" in name:
        pool = next(p for p in GLOBAL if p.__name__ == name)
        features = rows_of(torch.float64, 3).round()
        (plain, moved) = (outcome(lambda x, b=b: pool(x, b, 4), f) for f, b in
                          ((features, BATCH), (features[order], BATCH[order])))  # fmt: skip
    else:
        pool = next(p for p in LOCAL if p.__name__ == name)
        book = book_of((4, 3, 2), **BOOKS["overlapping"])
        features = (4 * features_of(book, 3)).round()
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        table = torch.where(book.neighbours >= 0, places[book.neighbours.clamp(min=0)], -1).int()
        plain = outcome(on(book, pool), features)
        moved = outcome(lambda x: pool(x, table, book.reverse[order]), features[order])
    torch.testing.assert_close(moved, (plain[0], plain[1][order]), rtol=1e-12, atol=1e-12)


@each_call
def test_derivatives_that_it_has_not_are_refused(name: str) -> None:
    function, features = CALLS[name]
    leaf = features.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), leaf)
    with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(function, (features.detach(),), (features.detach(),))


@each_call
def test_operator_checks_of_torch_library(name: str) -> None:
    average = "avg" in name
    if "global" in name:
        arguments: tuple[Any, ...] = (rows_of(torch.float32, 3).requires_grad_(), BATCH, 4, average)
        torch.library.opcheck(torch.ops.rooftop.sparse_global_pool.default, arguments)
        return
    book = book_of((4, 3, 2), **BOOKS["overlapping"])
    arguments = (features_of(book, 3, torch.float32).requires_grad_(), book.neighbours, book.reverse, average)
    torch.library.opcheck(torch.ops.rooftop.sparse_pool.default, arguments)


@each_call
def test_compiled_whole(name: str) -> None:
    function, features = CALLS[name]
    compiled = torch.compile(lambda x: 2 * function(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, features), outcome(lambda x: 2 * function(x), features))


# ---- wrong arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": [1.0]}, TypeError, "features must be a tensor, got list"),
        ({"features": torch.zeros(3, 4).int()}, TypeError, "features must be bfloat16"),
        ({"features": torch.zeros(3, 4).to_sparse()}, TypeError, "features must be dense"),
        ({"features": torch.zeros(3)}, ValueError, r"expected features \(N, C\), got \(3,\)"),
        ({"neighbours": None}, TypeError, "neighbours must be a tensor, got NoneType"),
        ({"neighbours": TABLE.long()}, TypeError, "neighbours must be int32, got torch.int64"),
        ({"neighbours": TABLE.to_sparse()}, TypeError, "neighbours must be dense"),
        ({"neighbours": TABLE.to("meta")}, ValueError, "features is on cpu, neighbours on meta"),
        ({"neighbours": TABLE[:, :0]}, ValueError, r"expected neighbours \(M, T\) of at least one tap, got \(3, 0\)"),
        ({"neighbours": TABLE + 1}, ValueError, "neighbours must be from 0 to 2, .* got 0 to 3"),
        ({"neighbours": TABLE - 1}, ValueError, "neighbours must be from 0 to 2, .* got -2 to 1"),
        ({"reverse": BACK.float()}, TypeError, "reverse must be int32, got torch.float32"),
        ({"reverse": BACK[:2]}, ValueError, r"expected reverse of shape \(3, 2\), got \(2, 2\)"),
        ({"neighbours": TABLE[:2], "features": torch.zeros(3, 4, requires_grad=True)}, ValueError, "give reverse"),
    ],
)
@pytest.mark.parametrize("pool", LOCAL)
def test_wrong_arguments(pool: Pool, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{pool.__name__}: .*{message}"):
        pool(**{"features": torch.zeros(3, 4), "neighbours": TABLE, **arguments})


@pytest.mark.parametrize("reverse", [None, torch.full_like(BACK, -1), BACK.flip(0), BACK + 5])
def test_a_reverse_table_of_another_rulebook(reverse: Tensor | None) -> None:
    y = sparse_max_pool(torch.zeros(3, 4, requires_grad=True), TABLE, reverse)
    which = "neighbours, mirrored" if reverse is None else "reverse"
    with pytest.raises(ValueError, match=f"sparse_max_pool: {which}.* must have row m at"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": None}, TypeError, "features must be a tensor, got NoneType"),
        ({"batch": [0, 0, 1]}, TypeError, "batch must be a tensor, got list"),
        ({"batch": torch.zeros(3)}, TypeError, "batch must be int32 or int64, got torch.float32"),
        ({"batch": torch.zeros(3).int().to_sparse()}, TypeError, "batch must be dense"),
        ({"batch": torch.zeros(2).int()}, ValueError, r"expected batch \(3,\), .* got \(2,\)"),
        ({"batch": torch.zeros(3).int().to("meta")}, ValueError, "features is on cpu, batch on meta"),
        ({"batch": torch.tensor([0, 2, 1])}, ValueError, "batch must be from 0 to 1, or -1 .* got 0 to 2"),
        ({"batch": torch.tensor([0, -2, 1])}, ValueError, "got -2 to 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be a number of batch elements, 1 or more, got 0"),
        ({"batch_size": 1.5}, ValueError, "batch_size must be a number of batch elements, 1 or more, got 1.5"),
    ],
)
@pytest.mark.parametrize("pool", GLOBAL)
def test_wrong_global_arguments(pool: Pool, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    usual = {"features": torch.zeros(3, 4), "batch": torch.tensor([0, 0, 1]), "batch_size": 2}
    with pytest.raises(error, match=f"^{pool.__name__}: .*{message}"):
        pool(**{**usual, **arguments})


# ---- the kernels -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    chosen = "interpreter or gate or equal_the_maximum or zero or nan or no_reverse or nothing"
    assert interpreted(str(Path(__file__)), "-k", chosen) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("pool", LOCAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["halved", "overlapping"])
def test_gate_on_a_gpu(name: str, dtype: torch.dtype, pool: Pool) -> None:
    book = book_of((40, 40, 40), 0.1, **BOOKS[name])
    for channels in (64, 130, 3):
        assert_gate(book, pool, features_of(book, channels, dtype).cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("pool", GLOBAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_gate_on_a_gpu(dtype: torch.dtype, pool: Pool) -> None:
    for channels in (64, 130, 3):
        assert_global_gate(pool, rows_of(dtype, channels).cuda(), BATCH.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("pool", GLOBAL)
def test_global_of_many_rows_on_a_gpu(pool: Pool) -> None:
    features = torch.randn(300_000, 40)
    batch = torch.randint(-1, 6, (300_000,))
    batch[batch == 2] = 3
    for order in (batch, batch.sort().values):
        found = outcome(lambda x, b=order: pool(x, b.to(x.device), 6), features.cuda())
        expected = outcome(lambda x, b=order: pool(x, b, 6), features.double())
        torch.testing.assert_close([t.cpu().double() for t in found], list(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities_on_a_gpu_as_on_the_cpu(dtype: torch.dtype) -> None:
    """The interpreter's maximum keeps NaN in any case."""
    book = book_of((20, 20, 20), 0.1, **BOOKS["overlapping"])
    batch = book.in_indices[:, 0]
    features = features_of(book, 16, dtype)
    features[torch.rand(features.shape) < 0.05] = torch.nan
    features[torch.rand(features.shape) < 0.05] = -torch.inf
    features[::9] = -torch.inf
    for pool in (*LOCAL, *GLOBAL):
        found, expected = (
            outcome(
                on(book, pool, d) if pool in LOCAL else lambda x, p=pool: p(x, batch.to(x.device), 2), features.to(d)
            )
            for d in ("cuda", "cpu")
        )
        torch.testing.assert_close([t.cpu() for t in found], list(expected), equal_nan=True)


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu() -> None:
    book = book_of((40, 40, 40), 0.1, **BOOKS["overlapping"])
    features = features_of(book, 64, torch.float16).cuda()
    batch = book.in_indices[:, 0].cuda()
    functions = [on(book, pool, "cuda") for pool in LOCAL] + [lambda x, p=p: p(x, batch, 2) for p in GLOBAL]
    for function in functions:
        first, *others = [outcome(function, features) for _ in range(10)]
        assert all(torch.equal(*each) for other in others for each in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pool", LOCAL)
def test_rows_that_there_are_not_are_read_as_none_on_a_gpu(pool: Pool) -> None:
    book = book_of((20, 20, 20), 0.1, **BOOKS["overlapping"])
    tables = (book.neighbours, book.reverse)
    holes = [torch.rand(table.shape) < 0.2 for table in tables]
    for dtype in (torch.float32, torch.float64):
        features, results = features_of(book, 16, dtype).cuda(), []
        for hole in (-1, -(10**9), max(map(len, tables)), 2**31 - 1):
            given = [torch.where(h, hole, t).int().cuda() for h, t in zip(holes, tables, strict=True)]
            results.append(outcome(lambda x, g=given: pool(x, *g), features))
        assert all(torch.equal(*each) for other in results[1:] for each in zip(results[0], other, strict=True))


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    book = book_of((20, 20, 20), 0.1, **BOOKS["overlapping"])
    features = features_of(book, 16, torch.float16).cuda()
    batch, table, back = book.in_indices[:, 0].cuda(), book.neighbours.cuda(), book.reverse.cuda()
    functions: list[Pool] = [lambda x, p=p: p(x, table, back) for p in LOCAL]
    functions += [lambda x, p=p: p(x, batch, 2) for p in GLOBAL]
    for function in functions:
        expected = outcome(function, features)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outcome(function, features)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = outcome(function, features)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
