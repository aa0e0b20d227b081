"""Both assignment functions find the lowest total cost, with a separate query for each target."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.models.detr import assignment
from rooftop.models.detr.assignment import WORST, assign_batched, assign_on_host
from rooftop.testing import no_waiting_for_gpu

Assign = Callable[[Tensor, Tensor], Tensor]
BOTH = pytest.mark.parametrize("assign", [assign_on_host, assign_batched])


def totals(cost: Tensor, queries: Tensor) -> Tensor:
    """The cost of the assignment, (B,)."""
    chosen = cost.double().gather(2, queries.clamp(min=0)[..., None])[..., 0]
    return torch.where(queries >= 0, chosen, 0).sum(1)


def check(cost: Tensor, valid: Tensor, queries: Tensor) -> None:
    """Check that there are as many pairs as possible, only existing targets have queries, and no query has two
    targets."""
    for present, row in zip(valid, queries, strict=True):
        given = row[row >= 0]
        assert not row[~present].ge(0).any()
        assert len(given) == min(int(present.sum()), cost.shape[2])
        assert len(given.unique()) == len(given)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 6),
    targets=st.integers(1, 9),
    queries=st.integers(1, 9),
    levels=st.sampled_from([2, 5, 0]),
    seed=st.integers(0, 2**31),
)
def test_equal_totals(batch: int, targets: int, queries: int, levels: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    cost = torch.randn(batch, targets, queries, generator=random)
    if levels:  # many equal costs
        cost = torch.randint(levels, cost.shape, generator=random).float()
    valid = torch.rand(batch, targets, generator=random) < 0.7
    found, expected = assign_batched(cost, valid), assign_on_host(cost, valid)
    for each in (found, expected):
        check(cost, valid, each)
    torch.testing.assert_close(totals(cost, found), totals(cost, expected), rtol=0, atol=1e-9)


def test_a_thousand_problems_of_the_size_of_coco() -> None:
    random = torch.Generator().manual_seed(0)
    cost = torch.randn(1000, 7, 100, generator=random)
    valid = torch.randint(8, (1000, 1), generator=random) > torch.arange(7)
    found, expected = assign_batched(cost, valid), assign_on_host(cost, valid)
    check(cost, valid, found)
    torch.testing.assert_close(totals(cost, found), totals(cost, expected), rtol=0, atol=1e-9)


@BOTH
def test_the_total_is_the_lowest_of_all(assign: Assign) -> None:
    cost = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(1))
    lowest = torch.stack(
        [cost[:, torch.arange(3), list(each)].sum(1) for each in itertools.permutations(range(4), 3)]
    ).amin(0)
    found = totals(cost, assign(cost, torch.ones(20, 3, dtype=torch.bool)))
    torch.testing.assert_close(found, lowest.double(), rtol=0, atol=1e-5)


@BOTH
@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 5, 0), (0, 3, 4)])
def test_nothing_to_assign(assign: Assign, shape: tuple[int, ...]) -> None:
    found = assign(torch.zeros(shape), torch.ones(shape[:2], dtype=torch.bool))
    assert found.tolist() == torch.full(shape[:2], -1).tolist()


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_costs_that_are_not_finite_are_taken_last(assign: Assign, bad: float) -> None:
    valid = torch.ones(1, 2, dtype=torch.bool)
    cost = torch.tensor([[[bad, 3.0, bad], [1.0, 2.0, bad]]])
    assert assign(cost, valid).tolist() == [[1, 0]]
    assert sorted(assign(torch.full((1, 2, 3), bad), valid)[0].tolist())[0] >= 0
    assert assign(torch.full((1, 2, 2), bad, dtype=torch.float16), valid)[0].sort().values.tolist() == [0, 1]
    assert assign(torch.tensor([[[bad], [WORST / 2]]]), valid).tolist() == [[-1, 0]]


@pytest.mark.parametrize("shape", [(4, 6, 9), (4, 9, 6)])
def test_no_step_asks_what_was_found(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no values, so the assignment reads none. Steps after the last one change nothing."""
    assert assign_batched(torch.empty(shape, device="meta"), torch.empty(shape[:2], device="meta").bool()).is_meta
    cost, valid = torch.randn(shape), torch.rand(shape[:2]) < 0.7
    expected = assign_batched(cost, valid)
    monkeypatch.setattr(assignment, "_over", lambda done: False)
    assert torch.equal(assign_batched(cost, valid), expected)


@pytest.mark.gpu
def test_the_gpu_is_not_waited_for() -> None:
    random = torch.Generator().manual_seed(0)
    cost, valid = torch.randn(50, 8, 20, generator=random), torch.rand(50, 8, generator=random) < 0.7
    on_gpu = cost.cuda(), valid.cuda()
    with no_waiting_for_gpu():
        found = assign_batched(*on_gpu)
    expected = totals(cost, assign_on_host(cost, valid))
    torch.testing.assert_close(totals(cost, found.cpu()), expected, rtol=0, atol=1e-9)
    assert assign_on_host(*on_gpu).is_cuda


@BOTH
def test_wrong_shapes(assign: Assign) -> None:
    for valid in (torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"expected cost \(B, M, Q\), and `valid` torch.bool \(B, M\)"):
            assign(torch.zeros(2, 3, 4), valid)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    cost, valid = torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(MissingExtraError, match=r"rooftop\[detection\]"):
        assign_on_host(cost, valid)
    assert assign_batched(cost, valid).tolist() == [[0]]
