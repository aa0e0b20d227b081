"""Fused steps raise the version counters of exactly the watched parameters that they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from rooftop.nn.fused_steps import _adagrad_fuses_on_gpus, after_fused_steps, has_fused_step, notice_fused_steps
from rooftop.rewrites.optimizer_rules import not_fusable
from rooftop.torch_versions import torch_at_least
from rooftop.train import AdamW


class Inheriting(torch.optim.SGD):
    """An optimizer that has PyTorch's step."""


class Stepping(torch.optim.SGD):
    """An optimizer with its own step."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].grad.zero_()


@pytest.mark.parametrize("fuses", [False, True])
def test_pytorch_2_11_has_no_fused_adagrad_on_gpus(fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step raised an error, which ended the whole search of `rooftop.optimize`."""
    with FakeTensorMode():
        on_gpu = torch.optim.Adagrad([nn.Parameter(torch.zeros(3, device="cuda"))])
    on_cpu = torch.optim.Adagrad([nn.Parameter(torch.zeros(3))])
    monkeypatch.setattr("rooftop.nn.fused_steps._adagrad_fuses_on_gpus", lambda: fuses)
    assert not_fusable(on_cpu) is None
    assert has_fused_step(torch.optim.Adagrad, on_gpu=True) is fuses
    refused = f"PyTorch {torch.__version__} has no fused Adagrad on GPUs"
    assert not_fusable(on_gpu) == (None if fuses else refused)


def test_whether_adagrad_fuses_on_gpus_follows_from_the_version() -> None:
    assert _adagrad_fuses_on_gpus() or not torch_at_least(2, 13)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda own: torch.optim.AdamW(own, fused=True), 1),
        (lambda own: torch.optim.Adagrad(own, fused=True), 1),
        (lambda own: Inheriting(own, 0.1, fused=True), 1),
        (lambda own: torch.optim.SGD(own, 0.1), 1),
        (lambda own: torch.optim.SGD([{"params": own[:1], "fused": True}, {"params": own[1:]}], 0.1), 1),
        (lambda own: Stepping(own, 0.1, fused=True), 0),
    ],
)
def test_a_step_raises_the_version_of_each_parameter_that_it_changes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], changes: int
) -> None:
    own = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    notice_fused_steps(own)
    optimizer = make(own)
    for parameter in own[:2]:
        parameter.grad = torch.ones(4)
    before = [parameter._version for parameter in own]
    optimizer.step()
    assert [p._version - version for p, version in zip(own, before, strict=True)] == [changes, changes, 0]


def test_the_step_of_our_adamw_is_its_own() -> None:
    assert not AdamW.step.__module__.startswith("torch.")


def test_other_parameters_of_the_process_stay_as_pytorch_leaves_them() -> None:
    notice_fused_steps([nn.Parameter(torch.ones(4))])
    other = nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    torch.optim.AdamW([other], fused=True).step()
    assert other._version == 0


def test_steps_are_told_until_the_handle_is_removed() -> None:
    told: list[Tensor] = []
    handle = after_fused_steps(told.extend)
    own = nn.Parameter(torch.ones(4))
    own.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([own], fused=True)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert [id(each) for each in told] == [id(own)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_on_a_gpu_raises_the_version_once(kind: Callable[..., torch.optim.Optimizer]) -> None:
    own, other = (nn.Parameter(torch.ones(64, device="cuda")) for _ in range(2))
    notice_fused_steps([own])
    for parameter in (own, other):
        parameter.grad = torch.ones_like(parameter)
    kind([own, other], lr=0.1, fused=True).step()
    assert (own._version, other._version) == (1, 0)
    assert bool((own < 1).all())
