"""The mean of the weights: its formula, its precision, its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.train.recipes.mean_weights import MeanWeights


def changed(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for each in model.state_dict().values():
            if each.is_floating_point():
                each.add_(torch.rand(each.shape, generator=generator))
            else:
                each.add_(1)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_the_mean_is_its_formula_for_weights_and_buffers() -> None:
    model = network()
    mean = MeanWeights(model, 0.4)
    expected = {name: each.double() for name, each in contents(model).items()}
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (4, 5 / 14), (5, 6 / 15), (6, 0.4)):
        changed(model, step)
        mean.update(step)
        expected = {name: decay * each + (1 - decay) * model.state_dict()[name] for name, each in expected.items()}
    expected["1.num_batches_tracked"] = torch.tensor(6.0)
    own = contents(model)
    with mean.swapped():
        found = contents(model)
        for name, each in found.items():
            torch.testing.assert_close(each.double(), expected[name].double(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(found["1.running_mean"], own["1.running_mean"])
    assert all(torch.equal(each, own[name]) for name, each in contents(model).items())


def test_the_model_has_its_own_weights_again_after_an_error() -> None:
    model = network()
    mean = MeanWeights(model, 0.9)
    changed(model, 1)
    own = contents(model)
    with pytest.raises(KeyError), mean.swapped():
        raise KeyError
    assert all(torch.equal(each, own[name]) for name, each in contents(model).items())


def test_small_changes_of_bfloat16_weights_are_not_rounded_away() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    mean = MeanWeights(model, 0.999)
    nn.init.constant_(model.weight, 1.0078125)  # the next number
    for step in range(10_000, 10_700):
        mean.update(step)
    found = mean.state_dict()["weight"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((4, 4), 1 + 0.0078125 * (1 - 0.999**700)), rtol=0, atol=1e-5)
    with mean.swapped():
        assert model.weight.dtype == torch.bfloat16


def test_tied_and_float64_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[1].weight = model[0].weight
    mean = MeanWeights(model, 0.5)
    assert {each.dtype for each in mean.state_dict().values()} == {torch.float64}
    changed_to = torch.full((3, 3), 2.0, dtype=torch.float64)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.copy_(changed_to)
    mean.update(100)  # at step 100 the decay is 0.5
    with mean.swapped():
        torch.testing.assert_close(model[1].weight.detach(), (before + changed_to) / 2)
        assert model[1].weight is model[0].weight


def test_every_few_steps() -> None:
    model = network()
    mean = MeanWeights(model, 0.9, every=3)
    before = {name: each.clone() for name, each in mean.state_dict().items()}
    for step in (1, 2):
        changed(model, step)
        mean.update(step)
    assert all(torch.equal(each, before[name]) for name, each in mean.state_dict().items())
    mean.update(3)
    torch.testing.assert_close(
        mean.state_dict()["0.weight"], (2 / 11) * before["0.weight"] + (9 / 11) * model.state_dict()["0.weight"]
    )


def test_it_resumes_bit_for_bit() -> None:
    model = network()
    mean = MeanWeights(model, 0.9)
    for step in range(1, 9):
        if step == 5:
            saved = copy.deepcopy((model.state_dict(), mean.state_dict()))
        changed(model, step)
        mean.update(step)
    again = network()
    again.load_state_dict(saved[0])
    other = MeanWeights(again, 0.9)
    other.load_state_dict(saved[1])
    for step in range(5, 9):
        changed(again, step)
        other.update(step)
    assert all(torch.equal(each, other.state_dict()[name]) for name, each in mean.state_dict().items())


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"ema\.decay is 1"):
        MeanWeights(network(), 1.0)
    with pytest.raises(InputError, match=r"does not fit the model: 0\.bias, 0\.weight"):
        MeanWeights(network(), 0.9).load_state_dict(MeanWeights(nn.Linear(3, 4), 0.9).state_dict())
