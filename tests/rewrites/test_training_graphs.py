"""Forward and backward from graphs: results, gradients and their memory, by graphs that run the code again on the
CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.rewrites.graphs_again import run_again
from torch import Tensor, nn

from rooftop.rewrites.graphs import UncapturedError
from rooftop.rewrites.training_graphs import Backward, Forward, Recorded, TrainingReplays

CPU = torch.device("cpu")


class Model(nn.Module):
    """A norm with statistics, an unused parameter, a frozen one, and a result without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.unused, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        y = self.layers(x) * self.frozen * scale
        return {"y": y, "best": y.argmax(1), "scale": scale}


def pair() -> tuple[Model, Model, TrainingReplays]:
    torch.manual_seed(0)
    plain = Model().train()
    torch.manual_seed(0)
    model = Model().train()
    return plain, model, TrainingReplays(model, model, CPU, run_again)


def test_training_is_the_same_over_many_steps() -> None:
    plain, model, replayed = pair()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(4):
        x, losses = torch.randn(5, 6), []
        for call, optimizer in zip((plain, replayed), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            given = x.clone().requires_grad_()
            found = call(given, scale=2.0)
            assert found["scale"] == 2.0
            assert not found["best"].requires_grad
            loss = found["y"].square().mean()
            loss.backward()
            optimizer.step()
            losses.append((loss.detach(), given.grad, found["best"]))
        for one, other in zip(*losses, strict=True):
            assert torch.equal(one, other)
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert model.unused.grad is None
    assert model.frozen.grad is None


class Heads(nn.Module):
    """Two results of a shared layer, and one of the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right, self.apart = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.left(hidden), self.right(hidden), self.apart(x.detach())


@pytest.mark.parametrize("first", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_an_unused_result_gives_no_gradients(first: tuple[int, ...]) -> None:
    """Zeros instead would let an optimizer decay the weights of an unused head. What a loss uses may change."""
    torch.manual_seed(0)
    plain, model = Heads(), Heads()
    model.load_state_dict(plain.state_dict())
    replayed = TrainingReplays(model, model, CPU, run_again)
    for used in (first, (0,), (0, 1, 2), first):
        grads = []
        for call, own in ((plain, plain), (replayed, model)):
            own.zero_grad()
            x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
            results = call(x)
            sum((results[i] * (i + 1)).square().sum() for i in used).backward()
            grads.append({"x": x.grad, **{name: p.grad for name, p in own.named_parameters()}})
        assert {name for name, g in grads[0].items() if g is None} == {n for n, g in grads[1].items() if g is None}
        for name, grad in grads[0].items():
            if grad is not None:
                torch.testing.assert_close(grads[1][name], grad, msg=name)


class Once(torch.autograd.Function):
    """A backward that runs once, as that of compiled code which reuses the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.done = False
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert not ctx.done
        ctx.done = True
        return gradient * 2


def test_a_backward_runs_once_for_each_forward() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = Heads()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.heads(Once.apply(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Compiled()
    replayed = TrainingReplays(model, model, CPU, run_again)
    replayed(torch.randn(2, 6, requires_grad=True))[1].sum().backward()
    assert model.heads.left.weight.grad is None
    assert model.heads.right.weight.grad is not None


def test_a_second_derivative_is_refused() -> None:
    """Without an error, the gradient of a penalty would be lost."""
    model = Heads()
    replayed = TrainingReplays(model, model, CPU, run_again)
    x = torch.randn(2, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(replayed(x)[0].sum(), x, create_graph=True)


def test_gradients_add_up_and_belong_to_the_caller() -> None:
    plain, model, replayed = pair()
    weight = model.layers[3].weight
    for seed in range(3):
        for call in (plain, replayed):
            torch.manual_seed(seed)
            call(torch.randn(5, 6))["y"].sum().backward()
        assert torch.equal(weight.grad, plain.layers[3].weight.grad), "gradients accumulate without zero_grad"
    kept = weight.grad
    weight.grad, before = None, kept.clone()
    replayed(torch.randn(5, 6))["y"].sum().backward()
    assert torch.equal(kept, before)


def test_results_belong_to_the_caller() -> None:
    _, _, replayed = pair()
    first = replayed(torch.randn(5, 6))["y"]
    first.sum().backward()
    before = first.detach().clone()
    replayed(torch.randn(5, 6))
    assert torch.equal(first, before)


def test_a_second_call_before_the_backward_runs_without_graphs() -> None:
    plain, model, replayed = pair()
    x, other = torch.randn(5, 6), torch.randn(5, 6)
    for call in (plain, replayed):
        torch.manual_seed(3)
        (call(x)["y"].sum() + call(other)["y"].square().sum()).backward()
    for one, same in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (same.grad is None)
        assert one.grad is None or torch.equal(one.grad, same.grad)
    assert replayed.turns == 1
    replayed(x)["y"].sum().backward()
    assert replayed.turns == 2, "the first call's backward has run, so its graph is free"
    replayed(x)
    replayed(x)
    assert replayed.turns == 4, "nothing holds the result, so its graph is free"


def test_another_backward_raises() -> None:
    """A second backward, or one after the next call, would read overwritten memory."""
    _, _, replayed = pair()
    loss = replayed(torch.randn(5, 6))["y"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward, before the next call"):
        loss.backward()
    loss = replayed(torch.randn(5, 6))["y"].sum()
    loss.backward(retain_graph=True)
    replayed(torch.randn(5, 6))
    with pytest.raises(RuntimeError, match="leave the rule cuda-graphs out"):
        loss.backward()


class Seen(nn.Module):
    """A model that notes its weights, and reads one of them from a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(6, 4), nn.LSTM(4, 3, batch_first=True)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.layer.weight
        self.aside = [self.layer.bias]
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.read.append(self.layer.weight)
        y = self.layer(x) + self.tied(x) + self.aside[0]
        return self.cell(y.unsqueeze(1))[0].square()


def test_parameters_are_aliases_in_a_capture() -> None:
    """Autograd still knows the originals from the caller's last loss, on another stream."""
    torch.manual_seed(0)
    model = Seen()
    plain, x = copy.deepcopy(model), torch.randn(5, 6)
    alive = model(x).sum()
    alive.backward(retain_graph=True)
    model.zero_grad()
    model.read.clear()
    weight = model.layer.weight
    replayed = TrainingReplays(model, model, CPU, run_again)
    replayed(x).sum().backward()
    aliases = model.read[:2]
    assert all(each is not weight and each.data_ptr() == weight.data_ptr() for each in aliases)
    assert model.layer.weight is weight
    assert model.tied.weight is weight
    assert model.cell._flat_weights[0] is model.cell.weight_ih_l0
    plain(x).sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_aliases_keep_attributes_and_need_no_setattr() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))
            self.weight.gain = 2.0
            self.done = True

        def __setattr__(self, name: str, value: Any) -> None:
            if "done" in vars(self):
                raise AttributeError("fixed")
            super().__setattr__(name, value)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * self.weight.gain

    model = Fixed()
    replayed = TrainingReplays(model, model, CPU, run_again)
    replayed(torch.ones(3, 4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 2), 6.0))


def test_a_failed_capture_gives_the_parameters_back() -> None:
    model = nn.Linear(6, 4)
    weight = model.weight

    def fails(forward: Forward, backward: Backward) -> Recorded:
        assert model.weight is not weight
        raise UncapturedError("no", [])

    with pytest.raises(UncapturedError):
        TrainingReplays(model, model, CPU, fails)(torch.randn(2, 6))
    assert model.weight is weight


def test_a_capture_leaves_no_traces() -> None:
    plain, model, replayed = pair()
    torch.manual_seed(5)
    expected, after = plain(x := torch.randn(5, 6))["y"], torch.rand(1)
    torch.manual_seed(5)
    x = torch.randn(5, 6)
    assert torch.equal(replayed(x)["y"], expected), "dropout has the same masks"
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(model.layers[1].running_mean, plain.layers[1].running_mean)
    assert model.layers[1].num_batches_tracked == 1


def test_each_signature_has_its_graphs() -> None:
    _, model, replayed = pair()
    for rows in (5, 4, 5):
        replayed(torch.randn(rows, 6))["y"].sum().backward()
    assert len(replayed._pairs) == 2
    before = model.calls
    for rows in range(2, 10):
        replayed(torch.randn(rows, 6))["y"].sum().backward()
    assert len(replayed._pairs) == 4, "the least recently used graphs are dropped"
    assert model.calls > before


def test_what_has_no_gradient_is_not_captured() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UncapturedError, match="no result has a gradient"):
        TrainingReplays(model, model, CPU, run_again)(torch.ones(1, 2))


def test_calls_that_cannot_be_captured_later_run_the_model() -> None:
    plain, model, replayed = pair()
    x = torch.randn(5, 6)
    replayed(x)["y"].sum().backward()
    plain.load_state_dict(model.state_dict())
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain.requires_grad_(False)
    model.requires_grad_(False)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = plain(x)["y"]
        torch.manual_seed(seed)
        assert torch.equal(replayed(x)["y"], expected)
    assert replayed.turns == len(replayed._pairs) == 1
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for parameter in learned:
        parameter.requires_grad_()
    replayed(x)["y"].sum().backward()
    assert replayed.turns == 2, "the graphs are still there"


@pytest.mark.gpu
def test_training_on_a_gpu_is_the_same_over_many_steps() -> None:
    device = torch.device("cuda")
    plain, model, _ = pair()
    plain, model = plain.to(device), model.to(device)
    replayed = TrainingReplays(model, model, device)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(5):
        x = torch.randn(5, 6, device=device)
        for call, optimizer in zip((plain, replayed), optimizers, strict=True):
            torch.manual_seed(step)
            if step != 2:
                optimizer.zero_grad()
            call(x)["y"].square().mean().backward()
            optimizer.step()
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    assert replayed.turns == 5


def test_parameters_that_are_frozen_and_thawed_between_steps() -> None:
    plain, model, replayed = pair()
    x = torch.randn(5, 6)
    for frozen in ((), (0,), (0, 1, 5), (3,), (2, 4), ()):  # the same number of parameters, but not the same ones
        found = []
        for call, own in ((plain, plain), (replayed, model)):
            parameters = list(own.layers.parameters())
            for place, parameter in enumerate(parameters):
                parameter.requires_grad_(place not in frozen)
                parameter.grad = None
            torch.manual_seed(1)
            call(x)["y"].square().mean().backward()
            found.append([parameter.grad for parameter in parameters])
        for place, (one, other) in enumerate(zip(*found, strict=True)):
            assert (one is None) == (other is None) == (place in frozen)
            assert one is None or torch.equal(one, other)
