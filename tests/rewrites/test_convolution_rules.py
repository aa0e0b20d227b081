"""Gains of rules for convolutions, predicted from the operators of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rooftop.rewrites import FoldNorms, FuseConvolutions, Pools, Times, convolution_rules, module_rules
from rooftop.rewrites.candidates import Call, Candidate
from rooftop.rewrites.convolution_rules import shape_of_result

aten = torch.ops.aten
CPU = torch.device("cpu")
HALF = torch.bfloat16


def call(operator: Any, *arguments: Any, ms: float = 1.0, count: int = 1) -> Call:
    return Call(operator, arguments, CPU, count, ms)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def convolution(
    bias: bool = False, channels_last: bool = True, groups: int = 1, ms: float = 1.0, dtype: torch.dtype = HALF
) -> Call:
    kind = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.empty(2, 4, 10, 10, device="meta", memory_format=kind, dtype=dtype)
    weights = (torch.empty(8, 4 // groups, 3, 3, device="meta", dtype=dtype), empty(8).to(dtype) if bias else None)
    return call(aten.convolution.default, images, *weights, [2, 2], [1, 1], [1, 1], False, [0, 0], groups, ms=ms)


def test_only_what_takes_a_result_of_a_convolution_is_fused_with_it() -> None:
    assert shape_of_result(convolution()) == (2, 8, 5, 5)
    after = call(aten.relu.default, empty(2, 8, 5, 5), ms=2.0), call(aten.add.Tensor, empty(2, 8, 5, 5), ms=3.0)
    elsewhere = call(aten.gelu.default, empty(2, 25, 8), ms=50.0), call(aten.add.Tensor, empty(2, 5, 5, 8), ms=50.0)
    rule = FuseConvolutions()
    assert rule.predicted_ms(Times(120.0, (convolution(), *after, *elsewhere))) == pytest.approx(5.0)
    assert rule.predicted_ms(Times(120.0, elsewhere)) == 0.0


def test_the_bias_of_a_convolution_is_also_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((4.0, 3.0))  # with the bias, and without it
    monkeypatch.setattr(convolution_rules, "alone_ms", lambda run, device: (run(), next(times))[1])
    assert FuseConvolutions().predicted_ms(Times(9.0, (convolution(bias=True, ms=8.0),))) == pytest.approx(2.0)


def test_norms_are_fused_where_the_kernel_takes_them() -> None:
    norm = call(aten._native_batch_norm_legit_no_training.default, empty(2, 8, 5, 5), ms=2.0)
    relu = call(aten.relu.default, empty(2, 8, 5, 5), ms=1.0)
    predicted = FuseConvolutions().predicted_ms
    assert predicted(Times(9.0, (convolution(), norm, relu))) == pytest.approx(3.0)
    for other in (convolution(channels_last=False), convolution(groups=2), convolution(dtype=torch.float32)):
        assert predicted(Times(9.0, (other, norm, relu))) == pytest.approx(1.0), "one pass is left"
        assert predicted(Times(9.0, (other, relu))) == 0.0
    images = torch.empty(2, 112, 10, 10, device="meta", memory_format=torch.channels_last, dtype=HALF)
    for groups in (2, 112):
        weight = torch.empty(112, 112 // groups, 3, 3, device="meta", dtype=HALF)
        options = [1, 1], [1, 1], [1, 1], False, [0, 0], groups
        assert convolution_rules.share_inside([call(aten.convolution.default, images, weight, None, *options)]) == 1.0
    half = convolution(), convolution(groups=2)  # the kernel takes only the first
    assert predicted(Times(9.0, (*half, norm, relu))) == pytest.approx(2.0)


def test_a_norm_may_take_longer_than_the_pass_that_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = call(aten._native_batch_norm_legit_no_training.default, empty(2, 8, 5, 5), ms=2.0)
    relu = call(aten.relu.default, empty(2, 8, 5, 5), ms=1.0)
    replaced = {"times": iter((4.0, 1.0)), "runs": 0}  # the norm, and a pass

    def alone_ms(run: Any, device: torch.device) -> float:
        replaced["runs"] += 1
        return next(replaced["times"])

    monkeypatch.setattr(module_rules, "alone_ms", alone_ms)
    on_gpu = Times(9.0, (convolution(channels_last=False), norm, relu), device_ms=9.0, host_ms=1.0)
    assert FuseConvolutions().predicted_ms(on_gpu) == pytest.approx(1.0 + 2.0 * 0.75)
    inside = replace(on_gpu, calls=(convolution(), norm, relu))
    assert FuseConvolutions().predicted_ms(inside) == pytest.approx(3.0)
    assert replaced["runs"] == 2


def test_convolutions_of_sequences_and_volumes_are_not_fused() -> None:
    for sizes in ((9,), (9, 9, 9)):
        dims = len(sizes)
        other = call(
            aten.convolution.default, empty(2, 4, *sizes), empty(8, 4, *[3] * dims), None, [1] * dims, [1] * dims,
            [1] * dims, False, [0] * dims, 1,
        )  # fmt: skip
        relu = call(aten.relu.default, empty(2, 8, *sizes))
        assert shape_of_result(other) == (2, 8, *sizes)
        assert FuseConvolutions().predicted_ms(Times(9.0, (other, relu))) == 0.0
    transposed = call(
        aten.convolution.default, empty(2, 4, 5, 5), empty(4, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1
    )
    assert convolution_rules.share_inside([transposed, convolution()]) == 0.5
    assert convolution_rules.share_inside([]) == 0.0


def test_one_number_may_stand_for_both_sides() -> None:
    options = [2], [1], [1], False, [0], 1
    images, weight = convolution().arguments[:2]
    assert convolution_rules.share_inside([call(aten.convolution.default, images, weight, None, *options)]) == 1.0


def test_operators_that_only_sound_like_convolutions_are_none() -> None:
    with torch.library._scoped_library("rooftop_test", "DEF") as library:
        library.define("convolution_stats(Tensor x) -> (Tensor, Tensor)")
        stats = call(torch.ops.rooftop_test.convolution_stats.default, empty(2, 8, 5, 5))
        relu = call(aten.relu.default, empty(2, 8, 5, 5), ms=1.0)
        bias = call(aten.add.Tensor, empty(2, 8, 5, 5), ms=1.0)
        assert FuseConvolutions().predicted_ms(Times(9.0, (stats, convolution(), relu, bias))) == pytest.approx(2.0)


def folding_only(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> tuple[Candidate, str]:
    monkeypatch.setattr(convolution_rules, "only_on_gpu", lambda candidate: None)
    candidate = Candidate.of(model.eval(), None, False)
    return candidate, FuseConvolutions().apply(candidate)


def test_a_norm_that_was_folded_without_a_fusion_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that there was nothing to change, and later changes of the weights were not noticed."""
    padded = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.ReLU())
    candidate, said = folding_only(monkeypatch, padded)
    assert (said, candidate.frozen) == ("1 norm folded", True)
    other = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    candidate, said = folding_only(monkeypatch, other)
    assert (said, candidate.frozen) == ("", False)


def test_a_folded_norm_leaves_a_bias_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = [empty(8)] * 4
    norm = call(aten._native_batch_norm_legit_no_training.default, empty(2, 8, 5, 5), *scales, 0.1, 1e-5, ms=2.0)
    assert FoldNorms().predicted_ms(Times(9.0, (norm,))) == 2.0, "on a CPU the convolution adds the bias itself"
    times = iter((4.0, 3.0))  # the norm, and the bias
    monkeypatch.setattr(module_rules, "alone_ms", lambda run, device: (run(), next(times))[1])
    on_gpu = Times(9.0, (norm,), device_ms=9.0, host_ms=1.0)
    assert FoldNorms().predicted_ms(on_gpu) == pytest.approx(0.5)


def test_a_pool_gains_what_the_kernel_gains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[Any, ...]] = [([3, 3], [2, 2], [1, 1], [1, 1], True), ([2], [], [0], [1]), ([2],)]
    for arguments in options:
        pool = call(aten.max_pool2d_with_indices.default, empty(2, 8, 10, 10), *arguments, ms=2.0)
        assert Pools().predicted_ms(Times(9.0, (pool,))) == pytest.approx(1.0)
        times = iter((4.0, 1.0))  # PyTorch's, and the kernel's
        monkeypatch.setattr(module_rules, "alone_ms", lambda run, device, times=times: (run(), next(times))[1])
        on_gpu = Times(9.0, (pool,), device_ms=9.0, host_ms=1.0)
        assert Pools().predicted_ms(on_gpu) == pytest.approx(1.5)
    unbatched = call(aten.max_pool2d_with_indices.default, empty(8, 10, 10), [2], ms=2.0)
    monkeypatch.setattr(module_rules, "alone_ms", lambda run, device: run() is None or 1.0)
    assert Pools().predicted_ms(Times(9.0, (unbatched,), device_ms=9.0, host_ms=1.0)) == 0.0
