"""A fused optimizer is advised if PyTorch has one, with the time that it takes on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import rooftop
from rooftop.analysis.advice import optimizer_rules
from rooftop.analysis.advice.optimizer_rules import fused_optimizer
from rooftop.analysis.findings import Findings
from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.report_contents import Gaps, Summary
from rooftop.cost import Cost, Record
from rooftop.hardware.ceilings import Ceilings

PLAIN = Plain(10.0, [], [], 0.0, 0.0, compiled=False)


def step_with(optimizer: torch.optim.Optimizer, ceilings: Ceilings, ms: float = 3.0) -> Findings:
    """A step of 10 ms on a GPU, in which the optimizer takes this long."""
    record = Record("aten::_foreach_add_", ((4,),), "float32", "cuda:0", "(optimizer)", "optimizer", Cost(16, 16))
    summary = Summary(10.0, 0.0, 10.0, 1.0, 1.0, 0, 0, 0, 100, 8, 1)
    return Findings(
        operators=[MeasuredOperator(record, ms, ("k",))],
        rows=[],
        summary=summary,
        gaps=Gaps(9.0, 0.0, 0.0),
        ceilings=dataclasses.replace(ceilings, kind="cuda"),
        plain=PLAIN,
        optimizers=[optimizer],
    )


@pytest.fixture
def half_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every fused optimizer take half a millisecond, and treat parameters on the CPU as a GPU's. Adagrad has a
    fused step, as since PyTorch 2.13.
    """
    monkeypatch.setattr("rooftop.nn.fused_steps._adagrad_fuses_on_gpus", lambda: True)
    monkeypatch.setattr(optimizer_rules, "fused_step_ms", lambda optimizer: 0.5)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.usefixtures("half_a_millisecond")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_gain_is_what_the_fused_kernels_save(kind: str, ceilings: Ceilings) -> None:
    optimizer = getattr(torch.optim, kind)(nn.Linear(3, 3).parameters(), lr=0.1)
    (advice,) = fused_optimizer(step_with(optimizer, ceilings))
    assert advice.gain_ms == pytest.approx(2.5)
    assert f"{kind} takes 3.00 ms for 2 parameters" in advice.evidence
    assert advice.command == f"torch.optim.{kind}(..., fused=True)"


class Custom(torch.optim.SGD):
    """A user's own optimizer."""


@pytest.mark.usefixtures("half_a_millisecond")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: Custom(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
    ],
    ids=["no fused kernel", "own step", "differentiable"],
)
def test_what_has_no_fused_twin_is_left_alone(make: Any, ceilings: Ceilings) -> None:
    assert fused_optimizer(step_with(make(nn.Linear(3, 3).parameters()), ceilings)) == []


@pytest.mark.usefixtures("half_a_millisecond")
def test_a_short_step_of_the_optimizer_is_left_alone(ceilings: Ceilings) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    assert fused_optimizer(step_with(optimizer, ceilings, ms=0.05)) == []


def test_on_a_cpu_nothing_is_said(ceilings: Ceilings) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    on_cpu = dataclasses.replace(step_with(optimizer, ceilings), ceilings=ceilings)
    assert fused_optimizer(on_cpu) == []


@pytest.mark.gpu
def test_the_fused_optimizer_is_timed_and_nothing_of_the_model_changes() -> None:
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(60))).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.randn(8, 256, device="cuda")
    report = rooftop.analyze(net, x, train=True, optimizer=optimizer)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    ms = optimizer_rules.fused_step_ms(optimizer)
    now_ms = sum(row.measured_ms for row in report.ops if row.phase == "optimizer")
    assert ms is not None
    assert 0 < ms < now_ms
