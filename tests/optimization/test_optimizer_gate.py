"""Optimizers that make the same steps pass, also with settings in float32; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.optimization.accuracy import RefusedError
from rooftop.optimization.optimizer_gate import check_steps, parameters_after
from rooftop.rewrites.optimizer_rules import fused, not_fusable

BETAS = 0.9, 0.999


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(dtype)


def original(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=BETAS)


class Steps(torch.optim.Optimizer):
    """AdamW with all numbers in float32, as PyTorch's fused kernel on GPUs computes it, and with one fault.

    Args:
        fault: what is wrong with it.
    """

    def __init__(self, parameters: Any, fault: str = "", betas: tuple[float, float] = BETAS, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.01})
        self.fault = fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if self.fault != "leaves one out" or i != 3:
                    self._one(group, parameter)

    def _one(self, group: dict[str, Any], parameter: Tensor) -> None:
        kind = torch.bfloat16 if self.fault == "state in bfloat16" else torch.float32
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter, dtype=kind)}
            state["square"] = torch.zeros_like(parameter, dtype=kind)
        state["step"] += 1
        one, (first, second) = torch.tensor(1.0), (torch.tensor(beta) for beta in group["betas"])
        rate, decay, gradient = torch.tensor(group["lr"]), group["weight_decay"], parameter.grad.float()
        value = parameter.float() * (one if self.fault == "no decay" else one - rate * torch.tensor(decay))
        mean = first * state["mean"].float() + (one - first) * gradient
        square = second * state["square"].float() + (one - second) * gradient * gradient
        state["mean"], state["square"] = mean.to(kind), square.to(kind)
        corrections = one - first ** state["step"], (one - second ** state["step"]).sqrt()
        if self.fault == "no correction":
            corrections = one, one
        divisor = state["square"].float().sqrt() / corrections[1] + group["eps"]
        parameter.copy_(value - rate / corrections[0] * state["mean"].float() / divisor)


def test_settings_in_float32_are_right() -> None:
    module = model()
    check_steps(Steps(module.parameters()), original(module))


def test_without_the_allowance_for_roundings_it_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.optimization.optimizer_gate.ROUNDED", 0.0)
    module = model()
    with pytest.raises(RefusedError, match="after 3 steps: parameter"):
        check_steps(Steps(module.parameters()), original(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_steps_are_right(dtype: torch.dtype) -> None:
    optimizer = original(model(dtype))
    check_steps(fused(optimizer), optimizer)


WRONG: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    fault: lambda module, fault=fault: Steps(module.parameters(), fault)  # type: ignore[misc]
    for fault in ("no decay", "no correction", "state in bfloat16", "leaves one out")
}
WRONG |= {
    "another rate": lambda module: Steps(module.parameters(), lr=1.001e-3),
    "another first beta": lambda module: Steps(module.parameters(), betas=(0.901, 0.999)),
    "another second beta": lambda module: Steps(module.parameters(), betas=(0.9, 0.99)),
    "Adam": lambda module: torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=0.01),
    "nothing": lambda module: torch.optim.SGD(module.parameters(), lr=0.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_steps_are_refused(name: str) -> None:
    module = model()
    with pytest.raises(RefusedError, match="after 3 steps: parameter"):
        check_steps(WRONG[name](module), original(module))


def test_float64_allows_roundings_in_float64_only() -> None:
    module = model(torch.float64)
    with pytest.raises(RefusedError, match="parameter"):
        check_steps(Steps(module.parameters()), original(module))
    optimizer = original(module)
    check_steps(fused(optimizer), optimizer)


def test_the_float64_reference_has_the_gradients_of_the_others() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))], lr=1.0)
    (exact,) = parameters_after(optimizer, torch.float64)
    (plain,) = parameters_after(optimizer)
    assert torch.equal(exact.to(torch.bfloat16), plain) or (exact - plain).abs().max() < 0.03
    assert exact.dtype == torch.float64
    assert not optimizer.param_groups[0]["params"][0].any(), "the parameters must stay unchanged"


def test_gradients_have_the_strides_of_their_parameters() -> None:
    """A fused step pairs both by their places in memory."""
    model = torch.nn.Conv2d(16, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    check_steps(fused(optimizer), optimizer)


def test_fused_sgd_is_refused_for_narrow_parameters_on_a_cpu() -> None:
    for dtype, refused in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        why = not_fusable(torch.optim.SGD(nn.Linear(2, 2, dtype=dtype).parameters(), 0.1))
        assert (why is not None and "half precision on a CPU" in why) == refused
    assert not_fusable(torch.optim.AdamW(nn.Linear(2, 2, dtype=torch.bfloat16).parameters())) is None
