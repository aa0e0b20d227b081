"""The modules give what those of torch.nn give, with the same state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftop.nn
from rooftop.cost import CountingMode

X = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0))
LOGITS, TARGET = X[:, :, 0], torch.tensor([0, 1, -100, 3, 4, 0])
CASES: list[tuple[str, dict[str, Any], tuple[Tensor, ...], str]] = [
    ("LayerNorm", {"normalized_shape": 7}, (X,), "layer_norm"),
    ("LayerNorm", {"normalized_shape": (5, 7), "elementwise_affine": False}, (X,), "layer_norm"),
    ("LayerNorm", {"normalized_shape": 7, "bias": False, "eps": 0.1}, (X,), "layer_norm"),
    ("RMSNorm", {"normalized_shape": 7}, (X,), "rms_norm"),
    ("RMSNorm", {"normalized_shape": (5, 7), "eps": 0.1, "elementwise_affine": False}, (X,), "rms_norm"),
    ("Softmax", {"dim": 1}, (X,), "softmax"),
    ("LogSoftmax", {"dim": -1}, (X,), "softmax"),
    ("CrossEntropyLoss", {}, (LOGITS, TARGET), "cross_entropy_with_gradient"),
    ("CrossEntropyLoss", {"reduction": "none", "ignore_index": 3}, (LOGITS, TARGET.abs() % 5), "cross_entropy"),
    (
        "CrossEntropyLoss",
        {"weight": torch.rand(5), "label_smoothing": 0.1, "reduction": "sum"},
        (LOGITS, TARGET),
        "cross_entropy_with_gradient",
    ),
]


@pytest.mark.parametrize(("name", "options", "inputs", "operator"), CASES)
def test_as_torch_nn(name: str, options: dict[str, Any], inputs: tuple[Tensor, ...], operator: str) -> None:
    theirs = getattr(torch.nn, name)(**options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = getattr(rooftop.nn, name)(**options)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs))
    results = []
    for module in (ours, theirs):
        x = inputs[0].clone().requires_grad_()
        with CountingMode() as counted:
            y = module(x, *inputs[1:])
        assert (f"rooftop::{operator}" in {r.name for r in counted.records}) == (module is ours)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*results)
    assert str(copy.deepcopy(ours)) == str(theirs)


def test_softmax_is_along_the_last_dimension_unless_told_otherwise() -> None:
    torch.testing.assert_close(rooftop.nn.Softmax()(X), torch.softmax(X, -1))
    torch.testing.assert_close(rooftop.nn.LogSoftmax()(X), torch.log_softmax(X, -1))


def test_z_loss_adds_the_square_of_the_log_sum_exp() -> None:
    target = TARGET.abs() % 5
    added = rooftop.nn.CrossEntropyLoss(z_loss=0.1)(LOGITS, target) - rooftop.nn.CrossEntropyLoss()(LOGITS, target)
    torch.testing.assert_close(added, 0.1 * LOGITS.logsumexp(1).square().mean())
