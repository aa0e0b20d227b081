"""Gradients are summed in buckets as one by one; their norm is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.parallel import ModelGradients, gradients, targets_of_all_ranks

Run = Callable[..., list[Any]]
SIZES = (3, 40, 1, 7, 64, 5)


def model_with_gradients(rank: int) -> nn.Module:
    """Of several dtypes, one parameter without gradient; other gradients on each rank."""
    model = nn.Module()
    generator = torch.Generator().manual_seed(rank)
    for number, size in enumerate(SIZES):
        dtype = (torch.float64, torch.float32)[number % 2]
        parameter = nn.Parameter(torch.zeros(size, 2, dtype=dtype))
        if number != 2:
            parameter.grad = torch.randn(size, 2, generator=generator).to(dtype)
        model.register_parameter(f"p{number}", parameter)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(2), requires_grad=False))
    return model


def summed(bucket_bytes: int) -> tuple[list[Tensor | None], list[int]]:
    """The gradients after they were summed, and the sizes of what was exchanged."""
    model, sizes, start = model_with_gradients(dist.get_rank()), [], gradients.start_sum

    def watched(x: Tensor, group: Any) -> Callable[[], Tensor]:
        sizes.append(x.nbytes)
        return start(x, group)

    with patch.object(gradients, "BUCKET_BYTES", bucket_bytes), patch.object(gradients, "start_sum", watched):
        ModelGradients(model, {"dp-cp": dist.group.WORLD}).sum_()
    return [parameter.grad for parameter in model.parameters()], sizes


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1 << 20, 2), (400, 4)])
def test_sums_in_buckets(bucket_bytes: int, buckets: int, on_ranks: Run) -> None:
    models = [model_with_gradients(rank) for rank in range(2)]
    for found, sizes in on_ranks(2, summed, bucket_bytes):
        for ours, *theirs in zip(found, *(model.parameters() for model in models), strict=True):
            assert (ours is None) == (theirs[0].grad is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs[0].grad + theirs[1].grad)
        assert len(sizes) == buckets
        assert max(sizes) <= max(bucket_bytes, 64 * 2 * 8)


def test_alone_the_norm_is_torch_s() -> None:
    ours, theirs = model_with_gradients(0), model_with_gradients(0)
    mine = ModelGradients(ours)
    mine.sum_()  # with nobody
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)
    norm, expected = mine.clip_(0.5), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(float(norm), float(expected), rtol=1e-6, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(float(mine.norm()), 0.5, rtol=1e-4, atol=0)
    assert float(ModelGradients(nn.Linear(2, 2)).norm()) == 0  # before there are any


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_norm_that_would_turn_gradients_around_is_refused(most: float) -> None:
    model = model_with_gradients(0)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="largest norm must be more than 0"):
        ModelGradients(model).clip_(most)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)
    ModelGradients(model).clip_(float("inf"))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)


def counted() -> int:
    targets = torch.full((5,), 7)
    targets[: dist.get_rank() + 1] = -100
    return int(targets_of_all_ranks(targets, dist.group.WORLD))


def test_targets_that_count_on_all_ranks(on_ranks: Run) -> None:
    assert on_ranks(2, counted) == [4 + 3] * 2
    assert int(targets_of_all_ranks(torch.tensor([3, -1, 0]), None, ignore_index=-1)) == 2
