"""Layouts of images in training: results and gradients are the original's, and so are the weights. Precisions: the
program's own switches come back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.kernels.convolutions.launches import is_fastest
from rooftop.rewrites import Candidate, ChannelsLast, Times, format_rules
from rooftop.rewrites.candidates import Call

CPU = torch.device("cpu")


class Network(nn.Module):
    """Convolutions, one of them a subclass that computes something else."""

    class Doubled(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), self.Doubled(8, 8, 3, groups=2), nn.Conv2d(8, 4, 1))
        )
        self.layouts: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        return x


def test_training_in_channels_last_is_the_same() -> None:
    torch.manual_seed(0)
    plain = Network().train()
    model = copy.deepcopy(plain)
    candidate = Candidate.of(model, None, training=True)
    assert ChannelsLast().apply(candidate) == "2 convolutions"
    assert not candidate.frozen, "weights that an optimizer changes cannot be frozen"
    assert all(own is weight for own, weight in zip(candidate.model.parameters(), model.parameters(), strict=True))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):
        x = torch.randn(2, 3, 9, 9)
        results = []
        for call, optimizer in zip((plain, candidate.call), optimizers, strict=True):
            optimizer.zero_grad()
            y = call(x)
            y.square().mean().backward()
            optimizer.step()
            results.append(y)
        assert results[1].is_contiguous()
        torch.testing.assert_close(*results)
    assert all(candidate.model.layouts)
    assert not any(plain.layouts)
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
        assert other.is_contiguous()


def test_copies_of_weights_count_as_launches() -> None:
    gpu = torch.device("cuda")
    calls = [Call(torch.ops.aten.mm.default, (), gpu, 80, 1.0)]
    backward = Call(torch.ops.aten.convolution_backward.default, (), gpu, 10, 1.0)
    bound_by_host = Times(8.0, (*calls, backward), device_ms=2.0, host_ms=8.0)
    assert ChannelsLast().predicted_ms(bound_by_host) < 0
    assert ChannelsLast().predicted_ms(Times(8.0, tuple(calls), device_ms=2.0, host_ms=8.0)) == 0.0


def test_operators_on_images_count_whatever_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax over the lines of images, as in a U-Net, copies images that are channels last."""
    aten, cpu = torch.ops.aten, torch.device("cpu")
    images, result, sequence = (torch.empty(size, device="meta") for size in ((2, 3, 8, 8), (2, 4, 8, 8), (2, 3, 9)))
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    weight = torch.empty(4, 3, 3, 3, device="meta")
    on_images = [
        Call(aten.convolution.default, (images, weight, None, *options), cpu, 1, 1.0),
        Call(aten._softmax.default, (result, -1, False), cpu, 1, 1.0),
        Call(aten.relu.default, (images,), cpu, 1, 1.0),
    ]
    others = [
        Call(aten.relu.default, (torch.empty(2, 8, 8, 4, device="meta"),), cpu, 1, 1.0),
        Call(aten.relu.default, (sequence,), cpu, 1, 1.0),
        Call(aten.view.default, (result, [2, 256]), cpu, 1, 1.0),
        Call(aten.cat.default, ([result, result],), cpu, 1, 1.0),
    ]
    timed: list[Sequence[Call]] = []
    monkeypatch.setattr(format_rules, "gain_channels_last", lambda calls: timed.append(calls) or 0.0)
    ChannelsLast().predicted_ms(Times(7.0, (*on_images, *others)))
    backward = Call(aten.convolution_backward.default, (result, images, weight), cpu, 1, 1.0)
    ChannelsLast().predicted_ms(Times(7.0, (backward, *on_images[1:], *others)))
    fused_arguments = images, weight, None, None, [1, 1], [1, 1], [1, 1], 1, "relu", False
    fused = Call(torch.ops.rooftop.conv_act.default, fused_arguments, cpu, 1, 1.0)
    ChannelsLast().predicted_ms(Times(7.0, (fused, *on_images[1:], *others)))
    assert timed == [on_images, [backward, *on_images[1:]], [fused, *on_images[1:]]]


def test_fused_depthwise_convolutions_are_timed_with_weights_as_they_will_be_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, weight = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((2, 8, 9, 9), (8, 1, 3, 3)))
    seen: list[Tensor] = []

    def conv_act(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        seen.append(weight)
        return x

    conv_act.name = lambda: "rooftop::conv_act"  # type: ignore[attr-defined]
    call = Call(conv_act, (images, weight, None, None, [1, 1], [1, 1], [1, 1], 8, "relu", False), CPU, 1, 1.0)
    monkeypatch.setattr(format_rules, "alone_ms", lambda run, device: float(run() is not None))
    assert format_rules.gain_channels_last([call]) == 0.0
    assert [each.shape for each in seen] == [weight.shape, weight.shape]
    assert [is_fastest(each) for each in seen] == [False, True]


@pytest.mark.parametrize("slow_ms", [1.0, 20.0])
def test_only_the_slowest_operators_are_timed(monkeypatch: pytest.MonkeyPatch, slow_ms: float) -> None:
    images = torch.empty(2, 3, 8, 8, device="meta")
    times = [slow_ms, *[0.1] * 20]
    calls = [Call(torch.ops.aten.relu.default, (images,), CPU, 1, ms) for ms in times]
    timed: list[object] = []
    monkeypatch.setattr(format_rules, "alone_ms", lambda run, device: timed.append(run) or 1.0)
    assert format_rules.gain_channels_last(calls) == 0.0
    assert len(timed) == 2 * (1 if slow_ms == 20.0 else 18)
    assert format_rules.gain_channels_last(calls) == 0.0
    assert len(timed) == 2 * (1 if slow_ms == 20.0 else 18), "timed again for another rule"


def test_without_convolutions_there_is_nothing_to_change() -> None:
    candidate = Candidate.of(nn.Linear(2, 2), None, training=True)
    assert ChannelsLast().apply(candidate) == ""
    assert candidate.call is candidate.model


@pytest.mark.parametrize("newer", [False, True])
def test_tf32_is_allowed_and_the_programs_switches_come_back(newer: bool) -> None:
    """PyTorch refuses to read its older switches once a program has set only the newer ones."""
    backends: Any = torch.backends
    products, convolutions = backends.cuda.matmul, backends.cudnn.conv

    def switches() -> tuple[str, str]:
        return products.fp32_precision, convolutions.fp32_precision

    unchanged = switches()
    try:
        if newer:
            products.fp32_precision = convolutions.fp32_precision = "ieee"
            with pytest.raises(RuntimeError):
                assert backends.cudnn.allow_tf32
        before = switches()
        with suppress(ZeroDivisionError), format_rules.in_tf32():
            during = switches()
            raise ZeroDivisionError
        assert during == ("tf32", "tf32") != before == switches()
    finally:
        products.fp32_precision, convolutions.fp32_precision = unchanged
