"""Dropout and stochastic depth in models that were built without them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.models import detr_resnet50, resnet18, swin_t
from rooftop.models.vision.swin import StochasticDepth
from rooftop.train.recipes.recipe import Model
from rooftop.train.recipes.regularizing import regularize


def test_off_leaves_a_model_as_it_was_built() -> None:
    with torch.device("meta"):
        model = swin_t(stochastic_depth_prob=0.3)
    assert regularize(model, Model()) == []
    assert max(each.p for each in model.modules() if isinstance(each, StochasticDepth)) == 0.3
    assert regularize(nn.Linear(2, 2), Model()) == []


def test_swin_has_what_its_builder_would_give() -> None:
    with torch.device("meta"):
        model, built = swin_t(stochastic_depth_prob=0.0), swin_t(stochastic_depth_prob=0.4, dropout=0.1)
    said = regularize(model, Model(stochastic_depth=0.4, dropout=0.1))
    assert said == ["dropout 0.1 in 36 layers", "stochastic depth up to 0.4 in 12 blocks"]
    for one, two in zip(model.modules(), built.modules(), strict=True):
        if isinstance(one, StochasticDepth | nn.Dropout):
            assert one.p == pytest.approx(two.p)
        assert getattr(one, "dropout", None) == getattr(two, "dropout", None)


def outputs_of(module: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: found.append(output.clone()))
    model(x)
    handle.remove()
    return found[0]


def test_a_resnet_leaves_out_branches_of_samples() -> None:
    model = resnet18(num_classes=4)
    same = copy.deepcopy(model)
    for _ in range(2):  # applied twice, the result is the same as once
        assert regularize(model, Model(stochastic_depth=0.5)) == ["stochastic depth up to 0.5 in 8 blocks"]
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16, 16)
    branch = outputs_of(model.layer4[1].bn2, model, x).detach()
    gone = branch.flatten(1).abs().amax(1) == 0
    assert 20 <= gone.sum() <= 44
    whole = outputs_of(model.layer1[0].bn2, model, x).flatten(1).abs().amax(1)
    assert (whole > 0).all()  # the first block is never dropped
    model.load_state_dict(same.state_dict())  # the keys are the same
    assert torch.equal(model.eval()(x), same.eval()(x))


def test_a_resnet_drops_what_its_head_takes() -> None:
    model = resnet18(num_classes=4)
    keys = set(model.state_dict())
    assert regularize(model, Model(dropout=0.5)) == ["dropout 0.5 in the input of fc"]
    regularize(model, Model(dropout=0.25))
    assert set(model.state_dict()) == keys
    x = torch.ones(1, 512)
    torch.manual_seed(0)
    nn.init.eye_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    kept = [model.fc(x).detach() for _ in range(200)]
    assert torch.cat(kept).unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert 0.15 < (torch.cat(kept) == 0).float().mean() < 0.35
    assert torch.equal(model.eval().fc(x), torch.ones(1, 4))


def test_attention_drops_too() -> None:
    small = {"num_classes": 2, "width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 16}
    with torch.device("meta"):
        model = detr_resnet50(**small)
    regularize(model, Model(dropout=0.3))
    found = [each.dropout for each in model.modules() if isinstance(getattr(each, "dropout", None), float)]
    found += [each.p for each in model.modules() if isinstance(each, nn.Dropout)]
    assert found
    assert set(found) == {0.3}


def test_models_without_a_place_for_it() -> None:
    with pytest.raises(InputError, match=r"model\.stochastic_depth=0"):
        regularize(nn.Linear(2, 2), Model(stochastic_depth=0.1))
    with pytest.raises(InputError, match=r"model\.dropout=0"):
        regularize(nn.Conv2d(2, 2, 3), Model(dropout=0.1))
