"""The contents of a model, registered or not: each is found once, with its place."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.nn.contents import Contents
from rooftop.nn.copies import copy_sharing_tensors


class Holder:
    """An object that contains a tensor and itself."""

    def __init__(self) -> None:
        self.keys, self.me = torch.ones(2), self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.others: Any = [nn.Linear(2, 2, bias=False)]
        self.holder, self.table = Holder(), {"a": torch.zeros(1)}
        self.call = functools.partial(torch.add, alpha=2)
        self.again = {"weight": self.layer.weight}

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_all_of_it_is_found_once() -> None:
    model = Model()
    contents = Contents.of(model)
    assert contents.modules == [model, model.layer, model.others[0]]
    assert set(contents.tensors) == {
        "layer.weight",
        "layer.bias",
        "others[0].weight",
        "holder.keys",
        "table['a']",
    }
    assert contents.plain["layer.in_features"] == (int, "2")


def test_a_copy_shares_what_it_is_asked_to() -> None:
    model = Model()
    same, less = copy_sharing_tensors(model, "test", unregistered=True), copy_sharing_tensors(model, "test")
    assert isinstance(same, Model)
    assert isinstance(less, Model)
    assert same.others[0] is not model.others[0]
    assert same.others[0].weight is model.others[0].weight
    assert same.holder.keys is model.holder.keys
    assert less.holder.keys is not model.holder.keys
    assert less.layer.weight is model.layer.weight


def test_modules_that_copy_as_themselves_are_refused() -> None:
    class Same(nn.Sequential):
        def __deepcopy__(self, memo: dict[int, Any]) -> Same:
            return self

    model = nn.Sequential(Same(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="test: copying Sequential does not copy its module 0: let the __deepcopy__"):
        copy_sharing_tensors(model, "test")
