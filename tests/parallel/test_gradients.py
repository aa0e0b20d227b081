"""Sums of gradients in buckets equal single sums, and their norm is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rooftop.models import GptConfig, parallel_gpt
from rooftop.parallel import Layout, ModelGradients, sums, targets_of_all_ranks
from rooftop.parallel.sharded_data import fully_sharded, local_of
from rooftop.train import MainWeights

Run = Callable[..., list[Any]]
SIZES = (3, 40, 1, 7, 64, 5)


def model_with_gradients(rank: int) -> nn.Module:
    """Parameters of several dtypes, one of them without a gradient; the gradients differ between ranks."""
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


def summed(bucket_bytes: int, large_bytes: int) -> tuple[list[Tensor | None], list[int]]:
    """The summed gradients, and the sizes of the exchanges."""
    model, sizes, start = model_with_gradients(dist.get_rank()), [], sums.start_sum

    def watched(x: Tensor, group: Any) -> Callable[[], Tensor]:
        sizes.append(x.nbytes)
        return start(x, group)

    with (
        patch.object(sums, "BUCKET_BYTES", bucket_bytes),
        patch.object(sums, "LARGE_BYTES", large_bytes),
        patch.object(sums, "start_sum", watched),
    ):
        ModelGradients(model, {"dp-cp": dist.group.WORLD}).sum_()
    return [parameter.grad for parameter in model.parameters()], sizes


@pytest.mark.parametrize(
    ("bucket_bytes", "large_bytes", "exchanged"),
    [
        # 40, 56 and 320 bytes in float32; 1024, 16 (zeros) and 48 in float64; 24 bytes count the users in float32
        (1 << 20, 1 << 20, [440, 1088]),
        (400, 1 << 20, [96, 1024, 344, 64]),
        (1 << 20, 300, [1024, 320, 120, 64]),
    ],
)
def test_sums_in_buckets(bucket_bytes: int, large_bytes: int, exchanged: list[int], on_ranks: Run) -> None:
    models = [model_with_gradients(rank) for rank in range(2)]
    for found, sizes in on_ranks(2, summed, bucket_bytes, large_bytes):
        for ours, *theirs in zip(found, *(model.parameters() for model in models), strict=True):
            assert (ours is None) == (theirs[0].grad is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs[0].grad + theirs[1].grad)
        assert sorted(sizes) == sorted(exchanged)


# ---- during backward ---------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Consecutive layers. One layer is used only in the second half of the steps, and another never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.sometimes(x) if all_of_it else x).square().sum()


def of_a_chain(meanwhile: bool, dtype: torch.dtype, all_of_it: bool) -> tuple[dict[str, Tensor], list[int], int]:
    """Gradients of two micro-batches, the number of sums that had begun by the end of each backward, and their total
    number."""
    model, begun = Chain().double(), list[int]()
    weights = MainWeights(model.float(), dtype, keep_narrow=True)
    mine = ModelGradients(model, {"dp-cp": dist.group.WORLD})
    weights.answer_for(mine)
    with patch.object(sums, "LARGE_BYTES", 100), patch.object(sums, "start_sum", wraps=sums.start_sum) as starts:
        for part in range(2):
            x = torch.arange(24.0).view(3, 8).sub(2 * part + 5 * dist.get_rank()).div(9).to(dtype)
            with mine.summing() if part and meanwhile else nullcontext():
                model(x, all_of_it).backward()
            begun.append(starts.call_count)
        mine.sum_()
    found = {name: weights.gradient_of(weight) for name, weight in weights.named.items()}
    return {name: each for name, each in found.items() if each is not None}, begun, starts.call_count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("all_of_it", [True, False])
def test_during_backward_the_same_is_summed(all_of_it: bool, dtype: torch.dtype, on_ranks: Run) -> None:
    after = on_ranks(2, of_a_chain, False, dtype, all_of_it)
    during = on_ranks(2, of_a_chain, True, dtype, all_of_it)
    for rank in range(2):
        expected, began, count = after[rank]
        found, began_earlier, same = during[rank]
        assert list(found) == list(expected)
        assert len(found) == (12 if all_of_it else 10)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert torch.equal(found["layers.0.weight"], after[1 - rank][0]["layers.0.weight"])
        assert (began, count) == ([0, 0], 8)  # matrices, and all biases together
        assert same == count
        # `never`, the last one, has no gradient, so the sum of the bucket that holds it begins only in `sum_`.
        assert began_earlier == [0, 0]


def of_used_layers(fail: bool) -> tuple[list[int], int]:
    """Without the unused layer, the number of sums that had begun by the end of backward, and the number of remaining
    hooks."""
    model = Chain().layers
    mine = ModelGradients(model, {"dp-cp": dist.group.WORLD})
    with patch.object(sums, "LARGE_BYTES", 100), patch.object(sums, "start_sum", wraps=sums.start_sum) as starts:
        x = torch.ones(2, 8)
        for layer in model:
            x = layer(x)
        if fail:
            with pytest.raises(ZeroDivisionError), mine.summing():
                1 / 0  # noqa: B018
        with mine.summing():
            x.sum().backward(retain_graph=True)
            begun = [starts.call_count]
            with pytest.raises(RuntimeError, match="call sum_ before the next one"), mine.summing():
                pass
        mine.sum_()
        begun.append(starts.call_count)
        with mine.summing():
            x.sum().backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="a second backward within summing"):
                x.sum().backward()
        mine.sum_()
    return begun, sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


@pytest.mark.parametrize("fail", [False, True])
def test_sums_begin_during_backward_and_what_goes_wrong_leaves_nothing(fail: bool, on_ranks: Run) -> None:
    assert on_ranks(2, of_used_layers, fail) == [([5, 6], 0)] * 2


def of_frozen_layers() -> list[bool]:
    """The parameters whose gradients are summed if one parameter was frozen after the sums were set up."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mine = ModelGradients(model, {"dp-cp": dist.group.WORLD})
    model[0].requires_grad_(False)
    found = []
    for frozen in (True, False):
        model.zero_grad()
        with mine.summing():
            (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
        mine.sum_()
        found += [model[1].bias.grad.tolist() == [3.0, 3.0], (model[0].bias.grad is None) == frozen]
        model[0].requires_grad_(True)
    return found


def test_frozen_parameters_are_left_out(on_ranks: Run) -> None:
    assert on_ranks(2, of_frozen_layers) == [[True] * 4] * 2


class Experts(nn.Module):
    """Three layers, of which each call uses one. The other parameters come before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        self.experts = nn.ParameterList(nn.Parameter(torch.ones(2, 2)) for _ in range(3))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return x @ self.first @ self.experts[expert] @ self.last


def of_experts(summing: bool, sharded: bool) -> list[float | None]:
    """An element of each parameter's gradient, if each of two ranks uses another expert."""
    rank, model = dist.get_rank(), Experts()
    group = Layout(2).process_groups()["dp-cp"]
    if sharded:
        fully_sharded(model, [], group, device_type="cpu")
    mine = ModelGradients(model, {"dp-cp": group})
    with mine.summing() if summing else nullcontext():
        model(torch.full((1, 2), 1.0 + rank), rank).sum().backward()
    mine.sum_()
    return [None if each.grad is None else float(local_of(each.grad)[0, 0]) for each in model.parameters()]


@pytest.mark.parametrize("summing", [False, True])
def test_ranks_may_use_different_parameters(summing: bool, on_ranks: Run) -> None:
    assert on_ranks(2, of_experts, summing, False) == [[12.0, 12.0, 4.0, 8.0, None]] * 2


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch before 2.13")
def test_ranks_that_share_a_model_may_use_different_parameters(on_ranks: Run) -> None:
    assert on_ranks(2, of_experts, False, True) == [[12.0, 12.0, 4.0, 8.0, 0.0]] * 2


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of weight has the layout torch.sparse_coo"):
        ModelGradients(model).clip_(1.0)


def norm_of_norms() -> tuple[float, torch.dtype]:
    """The norm if only replicated parameters are trained. One rank counts them, the others count nothing."""
    config = GptConfig(vocabulary=16, layers=1, width=8, heads=2, kv_heads=2, hidden=16, positions=4)
    layout = Layout(1, 2)
    groups = layout.process_groups()
    model = parallel_gpt(config, layout, groups, seed=1, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    tokens = torch.arange(4)[None]
    model(tokens, tokens).backward()
    norm = ModelGradients(model, groups).norm()
    return float(norm), norm.dtype


def test_ranks_that_count_nothing_sum_in_the_same_dtype(on_ranks: Run) -> None:
    first, second = on_ranks(2, norm_of_norms)
    assert first == second
    assert first[0] > 0
    assert first[1] == torch.float64


def test_of_nothing_the_norm_is_none_and_any_norm_is_left_alone() -> None:
    assert float(ModelGradients(nn.ReLU()).norm()) == 0
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), torch.inf)
    norm, scale = ModelGradients(model).scale_for(float("inf"))
    assert (float(norm), float(scale)) == (float("inf"), 1.0)


def test_alone_nothing_is_begun() -> None:
    model = nn.Linear(2, 2)
    mine = ModelGradients(model)
    with mine.summing(), mine.summing():
        model(torch.ones(1, 2)).sum().backward()
    mine.sum_()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


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
    assert float(ModelGradients(nn.Linear(2, 2)).norm()) == 0  # before any gradients exist


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_norm_that_would_turn_gradients_around_is_refused(most: float) -> None:
    model = model_with_gradients(0)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="maximum norm must be above 0"):
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


def test_a_step_without_a_target_changes_nothing() -> None:
    """The recipe of docs/parallel.md, as it is and with one micro-batch outside of it."""
    config = GptConfig(vocabulary=11, layers=1, width=16, heads=2, kv_heads=2, hidden=32, positions=8)
    model = parallel_gpt(config, seed=1, dtype=torch.float64)
    gradients, tokens = ModelGradients(model), torch.arange(16).view(2, 8) % 11

    def step(targets: torch.Tensor) -> float:
        model.zero_grad()
        count = targets_of_all_ranks(targets, None)
        losses = [model(*pair, reduction="sum") / count for pair in zip(tokens.split(1), targets.split(1), strict=True)]
        sum(losses).backward()
        gradients.sum_()
        gradients.clip_(1.0)
        return float(sum(losses).detach())

    nothing = torch.full_like(tokens, -100)
    assert step(nothing) == 0
    assert all((each.grad == 0).all() for each in model.parameters())
    some = nothing.clone()
    some[1, 3] = 5
    assert step(some) == pytest.approx(float(model(tokens[1:], some[1:]).detach()))
    assert model(tokens, nothing) == 0
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
