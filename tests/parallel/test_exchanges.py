"""Each exchange equals what one rank would compute from all parts, and its gradient is that of the sum of all ranks'
losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.parallel import (
    copy_to_ranks,
    gather_of_ranks,
    join_of_ranks,
    scattered_sum_of_ranks,
    sum_of_ranks,
)
from rooftop.parallel.exchanges import own_part, place_in, start_gather, start_scattered_sum, start_sum

Run = Callable[..., list[Any]]
RANKS = 4
SHAPE = (3, 8, 5)


def parts(dtype: torch.dtype, seed: int, *shape: int) -> list[Tensor]:
    """The parts of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(RANKS)]


Found = tuple[Tensor, Tensor]


def forward_and_back(
    function: Callable[..., Tensor], dtype: torch.dtype, length: int, out: int, *dim: int
) -> list[Found]:
    """A result and the gradient of its argument, whose length along dimension 1 is given. The views may be
    non-contiguous."""
    rank = dist.get_rank()
    found = []
    for turned in (False, True):
        x = parts(dtype, 1, 3, length, 5)[rank]
        x = x.mT.contiguous().mT if turned else x
        leaf = x.detach().requires_grad_()
        kept = leaf * 1
        y = function(kept, *dim, dist.group.WORLD)
        assert torch.equal(kept, x)  # the argument was not overwritten
        y.backward(parts(dtype, 2, 3, out, 5)[rank])
        assert leaf.grad is not None
        found.append((y.detach(), leaf.grad))
    return found


CASES: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "copy": (copy_to_ranks, 8, 8),
    "sum": (sum_of_ranks, 8, 8),
    "gather": (gather_of_ranks, 8, 32),
    "scattered sum": (scattered_sum_of_ranks, 8, 2),
    "join": (join_of_ranks, 8, 32),
}


def expected(name: str, dtype: torch.dtype, out: int) -> list[Found]:
    """The expected result of each rank, in float64."""
    x, dy = torch.stack(parts(dtype, 1, *SHAPE)).double(), torch.stack(parts(dtype, 2, 3, out, 5)).double()
    total, joined = x.sum(0), torch.cat(list(x), 1)
    if name == "copy":
        return [(x[rank], dy.sum(0)) for rank in range(RANKS)]
    if name == "sum":
        return [(total, dy[rank]) for rank in range(RANKS)]
    if name == "gather":
        return [(joined, dy.sum(0).chunk(RANKS, 1)[rank]) for rank in range(RANKS)]
    if name == "scattered sum":
        return [(total.chunk(RANKS, 1)[rank], torch.cat(list(dy), 1)) for rank in range(RANKS)]
    return [(joined, dy[rank].chunk(RANKS, 1)[rank]) for rank in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str, dtype: torch.dtype, on_ranks: Run) -> None:
    function, length, out = CASES[name]
    dims = () if name in ("copy", "sum") else (1,)
    wanted = expected(name, dtype, out)
    few_roundings = 4 * torch.finfo(dtype).eps
    for rank, found in enumerate(on_ranks(RANKS, forward_and_back, function, dtype, length, out, *dims)):
        for each in found:
            for ours, theirs in zip(each, wanted[rank], strict=True):
                assert ours.dtype == dtype
                torch.testing.assert_close(ours.double(), theirs, rtol=few_roundings, atol=few_roundings)


def refused() -> list[str]:
    said = []
    for function in (own_part, scattered_sum_of_ranks, start_scattered_sum):
        with pytest.raises(ValueError, match="cannot be split") as error:
            function(torch.zeros(2, 7, 3), 1, dist.group.WORLD)
        said.append(str(error.value))
    with pytest.raises(ValueError, match=r"shape \(4,\) has no dimension -2 to split among 2 ranks"):
        scattered_sum_of_ranks(torch.zeros(4), -2, dist.group.WORLD)
    return said


def test_what_cannot_be_split_is_refused_on_every_rank(on_ranks: Run) -> None:
    for said in on_ranks(2, refused, limit_s=150.0):
        assert said == 3 * [
            "dimension 1 of (2, 7, 3) cannot be split among 2 ranks: its length must be a multiple of the "
            "number of ranks (with sequence_parallel, pad the sequence or leave out sequence_parallel)"
        ]


def test_without_a_group_nothing_is_exchanged() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert copy_to_ranks(x, None) is sum_of_ranks(x, None) is x
    assert gather_of_ranks(x, 0, None) is scattered_sum_of_ranks(x, 0, None) is join_of_ranks(x, 0, None) is x
    assert start_sum(x, None)() is start_gather(x, 0, None)() is start_scattered_sum(x, 0, None)() is x
    assert own_part(x, 0, None) is x
    assert place_in(None) == (0, 1)
