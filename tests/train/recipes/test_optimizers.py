"""The optimizer that a recipe means: groups, steps, states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.models import resnet18
from rooftop.train.recipes import Recipe
from rooftop.train.recipes.muon import MuonAndAdamW, hidden_matrices
from rooftop.train.recipes.optimizers import optimizer_of
from rooftop.train.recipes.rates import set_rates


def recipe(**optimizer: Any) -> Recipe:
    return Recipe.of({"optimizer": optimizer})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.Linear(8, 2),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 3, 6, 6)).square().mean().backward()
        set_rates(optimizer, 1 / (step + 1))
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.state_dict().values()]


def test_each_kind_of_parameter_decays_by_its_own() -> None:
    with torch.device("meta"):
        model = resnet18()
    model.layer1.requires_grad_(False)
    made = optimizer_of(model, recipe(weight_decay=0.5, norm_weight_decay=0.25, bias_weight_decay=0.125))
    decays = {id(each): group["weight_decay"] for group in made.param_groups for each in group["params"]}
    assert decays[id(model.conv1.weight)] == decays[id(model.fc.weight)] == 0.5
    assert decays[id(model.bn1.weight)] == decays[id(model.bn1.bias)] == 0.25
    assert decays[id(model.fc.bias)] == 0.125
    assert decays.keys() == {id(each) for each in model.parameters() if each.requires_grad}


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_rates_fall_from_layer_to_layer_before(name: str) -> None:
    model = network()
    made = optimizer_of(model, recipe(name=name, lr=2.0, layer_decay=0.5))
    set_rates(made, 0.1)
    rates = {id(each): group["lr"] for group in made.param_groups for each in group["params"]}
    assert [rates[id(model[place].weight)] for place in (0, 1, 2, 4, 5)] == pytest.approx(
        [0.025, 0.025, 0.05, 0.1, 0.2]
    )


def plain_step(name: str, p: Tensor, grads: list[Tensor], lr: float, decay: float) -> Tensor:
    """SGD with momentum 0.9, and AdamW, from their papers."""
    first, second, beta = torch.zeros_like(p), torch.zeros_like(p), (0.9, 0.99)
    for number, grad in enumerate(grads, 1):
        if name == "sgd":
            first = 0.9 * first + grad + decay * p
            p = p - lr * first
            continue
        p = p * (1 - lr * decay)
        first, second = beta[0] * first + (1 - beta[0]) * grad, beta[1] * second + (1 - beta[1]) * grad**2
        scale = (second / (1 - beta[1] ** number)).sqrt() + 1e-6
        p = p - lr * first / (1 - beta[0] ** number) / scale
    return p


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_the_papers(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    options = {"betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.3, "bias_weight_decay": 0.0}
    made = optimizer_of(model, recipe(name=name, lr=0.1, momentum=0.9, **options))
    assert made.param_groups[0]["fused"]
    before = values(model)
    grads = [[torch.randn_like(each) for each in model.parameters()] for _ in range(3)]
    for step in grads:
        for parameter, grad in zip(model.parameters(), step, strict=True):
            parameter.grad = grad
        made.step()
    for place, parameter in enumerate(model.parameters()):
        decay = 0.3 if parameter.dim() > 1 else 0.0
        expected = plain_step(name, before[place], [step[place] for step in grads], 0.1, decay)
        torch.testing.assert_close(parameter.detach(), expected)


def test_complex_parameters_have_no_fused_step() -> None:
    model = nn.ParameterDict({"a": torch.randn(2, 2, dtype=torch.complex64)})
    made = optimizer_of(model, recipe())
    assert not made.param_groups[0]["fused"]
    assert made.param_groups[0]["foreach"]


def test_what_muon_steps() -> None:
    model = network()
    names = {name for name, each in model.named_parameters() if each in hidden_matrices(model)}
    assert names == {"0.weight", "2.weight", "4.weight"}  # neither the last layer, nor norms, nor biases
    with_embedding = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    assert hidden_matrices(with_embedding) == {with_embedding[1].weight}


def test_muon_is_torchs_on_matrices_and_adamw_on_the_rest() -> None:
    model, grads = network(), {}
    made = optimizer_of(model, recipe(name="muon", lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.2))
    matrix = nn.Parameter(model[2].weight.detach().flatten(1).clone())
    muon = torch.optim.Muon(
        [matrix], lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    head = nn.Parameter(model[5].weight.detach().clone())
    adamw = torch.optim.AdamW([head], lr=0.1, weight_decay=0.2, fused=True)
    for _ in range(3):
        grads = {each: torch.randn_like(each) for each in model.parameters()}
        for parameter, grad in grads.items():
            parameter.grad = grad
        made.step()
        matrix.grad, head.grad = grads[model[2].weight].flatten(1), grads[model[5].weight]
        muon.step()
        adamw.step()
    assert torch.equal(model[2].weight.flatten(1), matrix)
    assert torch.equal(model[5].weight, head)


def test_muon_does_not_depend_on_the_memory_format() -> None:
    """Columns are in another order, which changes only the rounding of products in bfloat16."""
    model = network()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for each in (model, other):
        train(each, optimizer_of(each, recipe(name="muon", lr=0.02)), 0, 3)
    for one, two in zip(values(model), values(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_optimizer_resumes_bit_for_bit(name: str, layout: torch.memory_format) -> None:
    given = recipe(name=name, lr=0.01, layer_decay=0.9)
    whole = network().to(memory_format=layout)
    train(whole, optimizer_of(whole, given), 0, 4)
    half = network().to(memory_format=layout)
    before = optimizer_of(half, given)
    train(half, before, 0, 2)
    saved = copy.deepcopy((half.state_dict(), before.state_dict()))
    shapes = [each.shape for each in half.parameters()]
    for number, state in saved[1]["state"].items():
        assert all(each.shape in (torch.Size(), shapes_of(before)[number]) for each in state.values())
    assert len(shapes) == len(saved[1]["state"])
    again = network().to(memory_format=layout)
    again.load_state_dict(saved[0])
    after = optimizer_of(again, given)
    after.load_state_dict(saved[1])
    train(again, after, 2, 4)
    assert all(map(torch.equal, values(whole), values(again)))


def shapes_of(optimizer: torch.optim.Optimizer) -> list[torch.Size]:
    """The shapes in the order of the state dict's numbers."""
    return [each.shape for group in optimizer.param_groups for each in group["params"]]


def test_muon_follows_parameters_that_move() -> None:
    model, other = network(), network()
    made, unmoved = (optimizer_of(each, recipe(name="muon", lr=0.02)) for each in (model, other))
    train(model, made, 0, 2)
    train(other, unmoved, 0, 2)
    model.to(memory_format=torch.channels_last)
    train(model, made, 2, 4)
    train(other, unmoved, 2, 4)
    assert isinstance(made, MuonAndAdamW)
    for one, two in zip(values(model), values(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


def test_a_group_may_have_its_rate_in_a_tensor() -> None:
    made = optimizer_of(network(), recipe(lr=0.5))
    rate = made.param_groups[0]["lr"] = torch.tensor(0.5)
    set_rates(made, 0.5)
    assert made.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_what_cannot_be_optimized() -> None:
    with pytest.raises(InputError, match=r"left to train.*model\.frozen"):
        optimizer_of(nn.Linear(2, 2).requires_grad_(False), recipe())
    with pytest.raises(InputError, match=r"optimizer\.momentum above 0"):
        optimizer_of(network(), recipe(momentum=0.0, nesterov=True))
    with pytest.raises(InputError, match=r"no trained matrices in hidden layers.*adamw"):
        optimizer_of(nn.Linear(2, 2), recipe(name="muon"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_updates_narrow_parameters_on_a_cpu(dtype: torch.dtype) -> None:
    """PyTorch's fused SGD does not."""
    model = nn.Linear(8, 8).to(dtype)
    before = model.weight.detach().clone()
    made = optimizer_of(model, recipe(name="sgd", lr=0.5, weight_decay=0.0))
    model.weight.grad = torch.ones_like(model.weight)
    made.step()
    assert torch.equal(model.weight, before - 0.5)
