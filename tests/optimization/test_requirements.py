"""Models and calls that cannot be optimized raise an error that names a remedy, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.optimization import Optimized
from rooftop.optimization.requirements import check_shapes
from rooftop.rewrites import Candidate, Rule

Proven = Callable[..., Optimized]
X = torch.randn(2, 4)


def linear() -> nn.Linear:
    return nn.Linear(4, 4).eval()


def hiding_children() -> nn.Module:
    model = nn.Sequential(linear(), linear())
    model[1].children = []  # type: ignore[method-assign, assignment]
    return model


def compiled_in_place() -> nn.Module:
    model = linear()
    model.compile()
    return model


def of_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return linear()


def under_autocast() -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return rooftop.optimize(linear(), X)


def under_global_hooks() -> object:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return rooftop.optimize(linear(), X)
    finally:
        handle.remove()


class Hiding(nn.Module):
    """A model that returns its result inside an object."""

    def forward(self, x: Tensor) -> Any:
        return type("Cache", (), {"keys": x})()


def train(model: nn.Module, **options: Any) -> object:
    return rooftop.optimize(model.train(), X, train=True, **options)


def with_lbfgs() -> object:
    model = linear()
    return train(model, optimizer=torch.optim.LBFGS(model.parameters()))


class Nothing(Rule):
    """A rule that reports a change but changes nothing."""

    name = "nothing"
    trains = True

    def apply(self, candidate: Candidate) -> str:
        return "nothing"


class Named(Nothing):
    name = "compile"


class Nesting(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return torch.nested.nested_tensor([y[:1], y])


def hooked_weight() -> nn.Module:
    model = linear()
    model.weight.register_hook(lambda slope: None)
    return model


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "compiled": (lambda: rooftop.optimize(torch.compile(linear()), X), "this model is compiled"),
    "compiled in place": (lambda: rooftop.optimize(compiled_in_place(), X), "this model is compiled"),
    "scripted": (lambda: rooftop.optimize(torch.jit.trace(linear(), X), X), "pass the model that it was made from"),
    "data parallel": (
        lambda: rooftop.optimize(nn.DataParallel(linear()), X),
        "pass the model inside this DataParallel",
    ),
    "lazy": (lambda: rooftop.optimize(nn.LazyLinear(3), X), "call the model once first"),
    "meta": (lambda: rooftop.optimize(linear().to("meta"), X), "meta device"),
    "inference tensors": (lambda: rooftop.optimize(of_inference_mode(), X), "do not record changes"),
    "autocast": (under_autocast, "autocast is on"),
    "a hidden method": (lambda: rooftop.optimize(hiding_children(), X), "attribute 1.children of the model hides the"),
    "global hooks": (under_global_hooks, "global module hooks are registered"),
    "a subclass": (
        lambda: rooftop.optimize(linear(), X.as_subclass(type("Image", (Tensor,), {}))),
        "tensors must be plain tensors, got a .*Image",
    ),
    "nested": (lambda: rooftop.optimize(linear(), torch.nested.nested_tensor([X, X])), "got a nested tensor"),
    "float8": (lambda: rooftop.optimize(linear(), X.to(torch.float8_e4m3fn)), "float8_e4m3fn: pass a wider dtype"),
    "a hidden result": (lambda: rooftop.optimize(Hiding(), X), "the outputs may contain tensors.*use_cache=False"),
    "a shape that the model refuses": (
        lambda: rooftop.optimize(linear(), X, shapes=[(2, 5)]),
        "does not take inputs of 2x5 float32, which shapes= names",
    ),
    "no tuple": (lambda: rooftop.optimize(linear(), X, draw=lambda: X), "draw must return a tuple of arguments"),
    "a closure": (with_lbfgs, "LBFGS needs a closure"),
    "losses": (lambda: train(linear(), loss=lambda y: y.sum(0)), "one element with a gradient, got 4 elements"),
    "a number": (lambda: train(linear(), loss=lambda y: y.sum().item()), "got a float"),
    "detached": (lambda: train(linear(), loss=lambda y: y.detach().sum()), "without a gradient"),
    "frozen": (lambda: train(linear().requires_grad_(False)), "no result has a gradient"),
    "a name twice": (lambda: rooftop.optimize(linear(), X, rules=[Nothing(), Nothing()]), "two rules are named"),
    "a name of ours": (lambda: rooftop.optimize(linear(), X, rules=[Named()]), "two rules are named 'compile'"),
    "a flag as a budget": (
        lambda: rooftop.optimize(linear(), X, budget_s=True),
        "budget_s must be a number of seconds above 0",
    ),
    "a flag as a gain": (lambda: rooftop.optimize(linear(), X, min_gain=False), "min_gain must be at least 0 and"),
    "a huge budget": (lambda: rooftop.optimize(linear(), X, budget_s=10**400), r"pass float\('inf'\)"),
    "a number for train": (lambda: rooftop.optimize(linear(), X, train=1), "train must be True or False, got 1"),
    "a word for exact": (lambda: rooftop.optimize(linear(), X, exact="no"), "exact must be True or False, got 'no'"),
    "no shapes": (lambda: rooftop.optimize(linear(), X, shapes=None), "shapes must be a list of shapes.*got None"),
    "no progress": (lambda: rooftop.optimize(linear(), X, progress=None), "progress must be a function.*got None"),
    "a class": (lambda: rooftop.optimize(linear(), X, rules=[Nothing]), r"got the class Nothing: pass Nothing\(\)"),
    "a nested result": (lambda: rooftop.optimize(Nesting(4, 4).eval(), X), "a result is a nested tensor"),
    "hooks of a parameter": (lambda: train(hooked_weight()), "weight has hooks, which the search would call"),
    "a plan and rules": (
        lambda: rooftop.optimize(linear(), X, plan="plan.json", rules=["compile"]),
        "with plan=, pass only rules that you wrote, got compile",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_the_callers_modes_of_autograd_do_not_matter(proven: Proven, off: Callable[[], Any]) -> None:
    class Detached(Nothing):
        def apply(self, candidate: Any) -> str:
            run = candidate.call
            candidate.call = lambda x: run(x).detach()
            return "no gradients"

    model = linear().train()
    with off(), pytest.warns(RuntimeWarning, match="the plan does not work here: .*no gradient of"):
        found = proven(model, X, train=True, rule=Detached())
    assert found.changes[0].verdict == "refused"
    assert found.kept == []


def test_a_plan_is_not_applied_in_another_mode(proven: Proven) -> None:
    class Infers(Nothing):
        trains = False

    found = proven(linear().train(), X, train=True, rule=Infers())
    assert (found.changes[0].verdict, found.changes[0].reason) == ("refused", "not for training")


def test_sizes_may_be_integers_of_numpy() -> None:
    assert check_shapes([[2, 3], (np.int64(1), np.int32(3))]) == [(2, 3), (1, 3)]
    for wrong in ((True, 3), (np.float64(1), 3), (np.int64(-1), 3)):
        with pytest.raises(ValueError, match="must be a shape such as"):
            check_shapes([wrong])
