"""The user's objects stay unchanged, whatever rules, models and optimizers do."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.optimization import Optimized
from rooftop.rewrites import Candidate, Rule

Proven = Callable[..., Optimized]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(3, 4)).square().sum().backward()
    return model


class Doing(Rule):
    """A rule that calls a function with the candidate."""

    trains = True

    def __init__(self, do: Callable[[Candidate], object]) -> None:
        self.name, self.do = do.__name__, do

    def apply(self, candidate: Candidate) -> str:
        self.do(candidate)
        return "something"


def changes_in_place(candidate: Candidate) -> None:
    with torch.no_grad():
        candidate.model[0].weight.mul_(2)


def changes_data(candidate: Candidate) -> None:
    candidate.model[0].weight.data.zero_()


def casts_the_model(candidate: Candidate) -> None:
    candidate.model.half()


def freezes_the_model(candidate: Candidate) -> None:
    candidate.model.requires_grad_(False)


def drops_gradients(candidate: Candidate) -> None:
    candidate.model.zero_grad()


@pytest.mark.parametrize(
    "do",
    [changes_in_place, changes_data, casts_the_model, freezes_the_model, drops_gradients],
    ids=lambda do: do.__name__,
)
def test_a_rule_that_changes_the_original_is_refused_and_undone(do: Callable[[Candidate], object]) -> None:
    model = two_layers()
    tensors = [*model.parameters(), *model.buffers()]
    before = [(t.detach().clone(), t.grad, t.requires_grad, t.data_ptr()) for t in tensors]
    gradients = [t.grad.clone() for t in model.parameters() if t.grad is not None]
    found = rooftop.optimize(model, torch.randn(3, 4), train=True, rules=[Doing(do)])
    assert found.changes[0].verdict == "refused"
    assert "it changes 0.weight of the original" in found.changes[0].reason
    assert [*map(id, (*model.parameters(), *model.buffers()))] == [*map(id, tensors)]
    for tensor, (values, gradient, requires, address) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor.dtype == values.dtype
        assert (tensor.grad is gradient, tensor.requires_grad, tensor.data_ptr()) == (True, requires, address)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_a_rule_that_fails_in_any_method_is_noted() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a mistake")

    rules = []
    for method in ("refusal", "predicted_ms", "seconds", "apply"):
        rule = Doing(lambda candidate: None)
        rule.name = method
        rule.__dict__[method] = fails
        rules.append(rule)
    silent = Doing(lambda candidate: None)
    silent.name = "silent"
    silent.__dict__["apply"] = lambda candidate: None
    found = rooftop.optimize(two_layers().eval(), torch.randn(3, 4), rules=[*rules, silent])
    reasons = {change.rule: (change.verdict, change.reason) for change in found.changes}
    assert {verdict for verdict, _ in reasons.values()} == {"failed"}
    assert all("a mistake" in reason for name, (_, reason) in reasons.items() if name != "silent")
    assert "apply of silent must return a str that says what it changed, got None" in reasons["silent"][1]


def test_random_states_and_modes_of_autograd_stay(proven: Proven) -> None:
    def seeds(candidate: Candidate) -> None:
        torch.manual_seed(3)
        random.seed(3)
        torch.set_grad_enabled(False)

    model = nn.Linear(4, 4).eval()
    state, python = torch.get_rng_state(), random.getstate()
    proven(model, torch.ones(2, 4), rule=Doing(seeds), draw=lambda: (torch.randn(2, 4),))
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_gradients_of_frozen_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    model[0].requires_grad_(False)
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rooftop.optimize(model, torch.randn(2, 4), train=True, optimizer=optimizer, rules=[Doing(lambda candidate: None)])
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_an_optimizer_with_a_scheduler_and_hooks_is_not_stepped() -> None:
    model = nn.Linear(4, 4)
    optimizer, steps = torch.optim.Adam(model.parameters()), list[int]()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = copy.deepcopy(optimizer.state_dict())
    found = rooftop.optimize(
        model, torch.randn(2, 4), train=True, optimizer=optimizer, rules=[Doing(lambda candidate: None)]
    )
    assert found.optimizer is optimizer
    assert not steps
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())


def test_attributes_of_an_optimizer_of_the_user_stay() -> None:
    class Momentum(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for total, p in zip(self.sums, self.param_groups[0]["params"], strict=True):
                if p.grad is not None:
                    p.sub_(total.add_(p.grad))

    model = nn.Linear(4, 4)
    optimizer = Momentum(model.parameters())
    rooftop.optimize(model, torch.randn(2, 4), train=True, optimizer=optimizer, rules=[Doing(lambda candidate: None)])
    assert not any(total.any() for total in optimizer.sums)


def test_attributes_of_the_model_stay(proven: Proven) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[Any, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.masks.setdefault(x.shape, torch.ones(len(x), 1))

    model, x = Masks().eval(), torch.randn(2, 4)
    found = proven(model, x)
    assert not model.masks
    with torch.no_grad():
        assert torch.equal(found.module(x), x)
    assert not found.module.unproven


class Carrying(nn.Module):
    """A module that stores something at each call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.calls = kind, nn.Linear(4, 4), 0
        self.generator = torch.Generator()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        if self.kind == "calls":
            self.calls += 1
        elif self.kind == "last":
            self.last = result.detach()
        elif self.kind == "mean":
            self.mean = 0.9 * self.mean + x.mean(0)
        elif self.kind == "generator":
            torch.rand(1, generator=self.generator)
        elif self.kind == "parameter layer.weight":
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return result


@pytest.mark.parametrize("kind", ["calls", "last", "mean", "generator", "parameter layer.weight"])
def test_a_model_that_carries_state_outside_of_buffers_is_refused(proven: Proven, kind: str) -> None:
    model = Carrying(kind)
    weight, mean, state = model.layer.weight.detach().clone(), model.mean, model.generator.get_state()
    with pytest.raises(ValueError, match=f"a call changes (the )?{kind}"):
        proven(model, torch.randn(2, 4), train=True)
    assert torch.equal(model.layer.weight, weight)
    assert model.mean is mean
    assert model.calls == 0
    assert not hasattr(model, "last")
    assert torch.equal(model.generator.get_state(), state)


class Slotted:
    """An object whose attributes are in `__slots__`."""

    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 0


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "deque": (deque, lambda held: held.append(1)),
    "slots": (Slotted, lambda held: setattr(held, "count", held.count + 1)),
    "numpy": (lambda: np.zeros(2), lambda held: held.__iadd__(1)),
    "objects": (lambda: np.array([None, "a"], dtype=object), lambda held: held.__setitem__(0, (held[0], 1))),
    "dates": (lambda: np.array(["2020-01-01"], "M8[D]"), lambda held: held.__iadd__(1)),
    "bytes": (lambda: bytearray(1), lambda held: held.append(1)),
    "array": (lambda: array("d", [0.0]), lambda held: held.append(1.0)),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_state_in_containers_and_arrays_is_refused(proven: Proven, kind: str) -> None:
    made, change = HOLDERS[kind]

    class Recording(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            change(self.held)
            return super().forward(x)

    model = Recording(4, 4).eval()
    model.held = made()
    with pytest.raises(ValueError, match="a call changes held"):
        proven(model, torch.randn(2, 4))


def test_arrays_that_calls_only_read_are_no_state(proven: Proven) -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.scale[0]) + len(self.held)

    model = Reading(4, 4).eval()
    model.scale, model.held = np.full(1, 2.0), deque([model.weight])
    assert proven(model, torch.randn(2, 4)).kept


def test_a_model_with_its_own_parameters_method_is_optimized(proven: Proven) -> None:
    class Head(nn.Sequential):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return self[1].parameters(recurse)

    model = Head(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    found = proven(model, torch.randn(2, 4))
    assert found.kept
    assert list(map(id, found.module.parameters())) == list(map(id, model.parameters()))
