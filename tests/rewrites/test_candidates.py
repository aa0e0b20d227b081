"""Copies of models that rules change."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.rewrites import ChannelsLast, FuseConvolutions, Kernels, Liger, Pools, Times
from rooftop.rewrites.candidates import NOTHING, Call, Candidate
from rooftop.rewrites.structures import mapped, signature


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_model_without_tensors_runs_where_its_arguments_are() -> None:
    assert Candidate.of(Doubles(), None, training=False).device == torch.device("cpu")
    here, there = torch.empty(1), torch.empty(2, device="meta")
    assert Candidate.of(Doubles(), None, False, [here, there]).device == torch.device("meta")
    assert Candidate.of(nn.Linear(2, 2), None, False, [there]).device == torch.device("cpu"), (
        "the model's own tensors decide before the inputs"
    )


def test_a_call_runs_the_model_until_a_rule_replaces_it() -> None:
    candidate = Candidate.of(Doubles(), None, training=False)
    assert candidate.runs_model
    run = candidate.call
    candidate.prepare(lambda x: run(x.contiguous()))
    assert candidate.runs_model
    candidate.call = lambda x: x + x
    assert not candidate.runs_model
    candidate.prepare(lambda x: x + x)
    assert not candidate.runs_model


def test_tensors_of_a_structure_are_freed_at_once() -> None:
    gc.collect()
    gc.disable()  # a cycle would keep them
    try:
        given = {"x": [torch.ones(3)]}
        alive = weakref.ref(given["x"][0])
        copies = mapped(given, lambda tensor: tensor.view(3))
        seen = weakref.ref(copies["x"][0])
        signature(given, lambda tensor: tensor.shape)
        del given, copies
        assert alive() is None
        assert seen() is None
    finally:
        gc.enable()


def test_rules_report_that_a_step_has_none_of_their_operators() -> None:
    aten, cpu = torch.ops.aten, torch.device("cpu")

    def absent(*operators: Any) -> list[str]:
        times = Times(1.0, tuple(Call(operator, (), cpu, 1, 1.0) for operator in operators))
        rules = (FuseConvolutions(), ChannelsLast(), Pools(), Kernels(), Liger())
        return [rule.name for rule in rules if rule.absent(times) == NOTHING]

    assert absent() == [], "the operators are not known"
    assert absent(aten.mm.default) == ["fuse-convolutions", "channels-last", "pools", "kernels", "liger-kernel"]
    assert absent(aten.convolution.default, aten.cudnn_batch_norm.default) == ["pools", "kernels", "liger-kernel"]
    assert absent(aten.convolution_backward.default, aten.silu.default) == ["pools", "kernels"]
    assert absent(aten.max_pool2d_with_indices.default, aten.rsqrt.default) == ["fuse-convolutions", "channels-last"]
    assert absent(aten.native_layer_norm.default) == ["fuse-convolutions", "channels-last", "pools"]
    assert absent(aten._log_softmax.default) == ["fuse-convolutions", "channels-last", "pools", "liger-kernel"]


@dataclasses.dataclass(frozen=True)
class Scaled:
    x: Tensor
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        object.__setattr__(self, "factor", scale)


def test_structures_of_dataclasses_that_cannot_be_built_again() -> None:
    found = mapped([Scaled(torch.ones(2), 3)], lambda t: t + 1)[0]
    assert torch.equal(found.x, torch.full((2,), 2.0))
    assert found.factor == 3


def test_structures_of_dataclasses_with_their_own_init() -> None:
    @dataclasses.dataclass(init=False)
    class Halved:
        x: Tensor

        def __init__(self, doubled: Tensor) -> None:
            self.x = doubled / 2

    found = mapped([Halved(torch.ones(2))], lambda t: t + 1)[0]
    assert type(found) is Halved
    assert torch.equal(found.x, torch.full((2,), 1.5))
