"""Inputs of all kinds are copied, further inputs are drawn from them, and wrong changes are detected with them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.optimization import Optimized
from rooftop.optimization.draws import other_values
from rooftop.rewrites import Candidate, Rule

Proven = Callable[..., Optimized]


class Does(nn.Module):
    """A model of one layer and a function."""

    def __init__(self, layer: nn.Module, does: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.does = layer, does

    def forward(self, *args: Any) -> Any:
        return self.does(self.layer, *args)


KINDS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "expanded": (nn.Linear(6, 3), (torch.randn(1, 6).expand(4, 6),)),
    "windows": (nn.Linear(6, 3), (torch.randn(9).unfold(0, 6, 1),)),
    "channels last": (nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)),
    "sparse": (Does(nn.Linear(4, 4), lambda layer, a, x: a @ layer(x)), (torch.eye(4).to_sparse(), torch.randn(4, 4))),
    "complex": (nn.Linear(4, 4, dtype=torch.cfloat), (torch.randn(2, 4, dtype=torch.cfloat),)),
    "no rows": (nn.Linear(6, 3), (torch.randn(0, 6),)),
    "a scalar": (Does(nn.Linear(1, 1), lambda layer, x: x * layer.weight), (torch.tensor(2.0),)),
    "a dict that is emptied": (Does(nn.Linear(4, 4), lambda layer, x: layer(x.pop("x"))), ({"x": torch.randn(2, 4)},)),
    "a bag with offsets": (nn.EmbeddingBag(10, 4), (torch.randint(10, (8,)), torch.tensor([0, 3, 5]))),
    "bfloat16": (nn.Linear(6, 3).bfloat16(), (torch.randn(4, 6).bfloat16(),)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_proven(proven: Proven, kind: str) -> None:
    model, given = KINDS[kind]
    found = proven(model.eval(), *given)
    assert found.kept == ["nothing"]
    again = tuple(dict(each) if isinstance(each, dict) else each for each in given)
    with torch.no_grad():
        assert torch.equal(found.module(*given), model(*again))
    assert not found.module.unproven


def test_sparse_gradients(proven: Proven) -> None:
    found = proven(nn.Embedding(10, 4, sparse=True), torch.randint(10, (5,)), train=True)
    assert found.kept == ["nothing"]


class Wrong(Rule):
    """Replaces the call by the result of `make`."""

    name = "wrong"

    def __init__(self, make: Callable[[Candidate], Callable[..., Any]]) -> None:
        self.make = make

    def apply(self, candidate: Candidate) -> str:
        candidate.call = self.make(candidate)
        return "the call"


def refusal(proven: Proven, model: nn.Module, x: Tensor, make: Callable[[Candidate], Callable[..., Any]]) -> str:
    with pytest.warns(RuntimeWarning, match="the plan does not work here"):
        found = proven(model.eval(), x, rule=Wrong(make))
    assert found.kept == []
    return found.changes[0].reason


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.ones(2, 4), torch.ones(2, 4, dtype=torch.long)], ids=str)
def test_constant_inputs_are_varied(proven: Proven, x: Tensor) -> None:
    def remembers(candidate: Candidate) -> Callable[..., Any]:
        known: list[Tensor] = []

        def call(given: Tensor) -> Tensor:
            known.extend([] if known else [candidate.model(given)])
            return known[0] + 0 * given.sum()

        return call

    assert "other values: result 0" in refusal(
        proven, Does(nn.Linear(4, 4), lambda layer, x: layer(x.float())), x, remembers
    )


def test_the_largest_integer_is_varied_too() -> None:
    varied = other_values(torch.full((64,), torch.iinfo(torch.int64).max), torch.Generator().manual_seed(0))
    assert len(varied.unique()) == 64


def test_results_that_are_no_tensors_are_compared(proven: Proven) -> None:
    model = Does(nn.Linear(4, 4), lambda layer, x: {"y": layer(x), "count": 3, "mask": None})

    def other(candidate: Candidate) -> Callable[..., Any]:
        return lambda x: {**candidate.model(x), "count": 4}

    assert "differ from the original's in a value that is not a tensor," in refusal(
        proven, model, torch.randn(2, 4), other
    )


@pytest.mark.parametrize(("noise", "words"), [(random.random, "result 0 "), (time.perf_counter, "call to call")])
def test_noise_of_the_original_does_not_allow_errors(proven: Proven, noise: Callable[[], float], words: str) -> None:
    model = Does(nn.Linear(4, 4), lambda layer, x: layer(x) * (1 + noise() % 1))

    def without(candidate: Candidate) -> Callable[..., Any]:
        return lambda x: candidate.model.layer(x) * 1.5  # type: ignore[operator]

    assert words in refusal(proven, model, torch.randn(2, 4), without)


def test_values_that_no_model_takes_are_asked_for(proven: Proven) -> None:
    def only_these(layer: nn.Module, words: Tensor) -> Tensor:
        if not torch.equal(words, words.sort().values):
            raise ValueError("they must be in order")
        return words * 2

    words = torch.tensor([0, 3, 5, 6, 7, 8])
    with pytest.raises(ValueError, match="does not take values drawn from the given ones: pass draw="):
        proven(Does(nn.Identity(), only_these).eval(), words)
    assert proven(Does(nn.Identity(), only_these).eval(), words, draw=lambda: (words + 0,)).kept == ["nothing"]
