"""The modules return the same results as those of torch.nn, with the same state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop.nn
from rooftop.cost import CountingMode
from rooftop.nn.norms import norm_of_sum

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


def sum_and_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[tuple[Tensor, Tensor], list[str]]:
    """The results, and the names of the elementwise operators."""
    with CountingMode() as counted:
        found = norm_of_sum(norm, x, residual)
    return found, [r.name for r in counted.records if "norm" in r.name or "add" in r.name]


@pytest.mark.parametrize(("kind", "operator"), [("LayerNorm", "add_layer_norm"), ("RMSNorm", "add_rms_norm")])
def test_the_norm_of_a_sum_is_one_operator(kind: str, operator: str) -> None:
    torch.manual_seed(0)
    norm = getattr(rooftop.nn, kind)(7)
    nn.init.normal_(norm.weight)
    residual = torch.randn_like(X)
    (y, total), names = sum_and_norm(norm, X, residual)
    assert names == [f"rooftop::{operator}"]
    torch.testing.assert_close((y, total), (norm(X + residual), X + residual))
    (_, wide), _ = sum_and_norm(norm, X.bfloat16(), residual)
    assert wide.dtype == torch.float32  # like PyTorch's sum


@pytest.mark.parametrize("kind", ["torch", "hooked", "watched", "forward replaced", "subclass"])
def test_norms_that_must_see_the_sum_do(kind: str) -> None:
    class Doubled(rooftop.nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * torch.nn.functional.layer_norm(input, self.normalized_shape)

    seen: list[Tensor] = []
    norm: nn.Module = rooftop.nn.LayerNorm(7)
    if kind == "torch":
        norm = nn.LayerNorm(7)
    elif kind == "subclass":
        norm = Doubled(7)
    elif kind == "hooked":
        norm.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    elif kind == "watched":
        norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        norm.forward = lambda input: input + 1  # type: ignore[method-assign]
    residual = torch.randn_like(X)
    (y, total), names = sum_and_norm(norm, X, residual)
    assert "rooftop::add_layer_norm" not in names
    assert torch.equal(total, X + residual)
    assert all(torch.equal(each, expected) for each, expected in zip(seen, (total, y), strict=False))
    assert len(seen) == {"hooked": 2, "watched": 1}.get(kind, 0)
    torch.testing.assert_close(y, norm(total))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_refuses_options_when_it_is_built(option: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"{next(iter(option))} is not supported"):
        rooftop.nn.Embedding(5, 3, **option)
