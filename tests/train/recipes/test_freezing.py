"""Frozen parts stay as they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.models import resnet18, swin_t
from rooftop.train.recipes.freezing import freeze


def test_frozen_modules_keep_parameters_and_statistics() -> None:
    model = resnet18(num_classes=3)
    assert freeze(model, ["conv1", "bn1", "layer[12]*"]) == ["conv1", "bn1", "layer1", "layer2"]
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.train()
        before = copy.deepcopy(each.state_dict())
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        each(torch.randn(2, 3, 33, 33)).square().sum().backward()
        optimizer.step()
        frozen = ("conv1", "bn1", "layer1", "layer2")
        for name, value in each.state_dict().items():
            assert torch.equal(value, before[name]) == name.startswith(frozen), name
        assert each.layer3.training
        assert each.layer3[0].bn1.training
        assert not each.layer1[0].bn1.training


def test_a_parameter_alone_can_be_frozen() -> None:
    with torch.device("meta"):
        model = swin_t()
    assert freeze(model, ["*relative_position_bias_table"])[0] == "features.1.0.attn.relative_position_bias_table"
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert len(frozen) == 12


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(InputError, match=r"'layr1' matches no module of ResNet \(did you mean layer1\?\).*conv1, bn1"):
        freeze(resnet18(), ["conv1", "layr1"])
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="it has none"):
        freeze(model, ["body"])
