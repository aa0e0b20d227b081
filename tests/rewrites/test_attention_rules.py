"""The rule about attention's back ends: the named back end comes first. The other back ends remain for calls that the
named one cannot compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.functional import scaled_dot_product_attention

import rooftop
from rooftop.optimization.timing import OperatorTimes
from rooftop.rewrites import AttentionBackend, Candidate, Times, attention_rules
from rooftop.rewrites.attention_rules import BACKENDS
from rooftop.rewrites.candidates import Call


class Attends(nn.Module):
    """Self-attention that records which back ends were allowed, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.allowed = _cur_sdpa_kernel_backends(with_priority=True)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def times_with(*operators: str) -> Times:
    calls = [Call(getattr(torch.ops.aten, name).default, (), torch.device("cpu"), 2, 1.0) for name in operators]
    return Times(4.0, tuple(calls))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_named_back_end_comes_first_and_all_others_stay(backend: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Attends().eval(), torch.randn(2, 5, 16)
    before = _cur_sdpa_kernel_backends(with_priority=True)
    candidate = Candidate.of(model, None, training=False)
    assert AttentionBackend(backend).apply(candidate) == "the whole model"
    call: Callable[..., Any] = candidate.call
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
        if not compiled:
            call(x)
            assert candidate.model.allowed[0] == BACKENDS[backend]
            assert set(candidate.model.allowed) == {*BACKENDS.values(), SDPBackend.MATH}
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_a_model_that_raises_leaves_the_order_as_it_was() -> None:
    model = Attends().eval()
    before = _cur_sdpa_kernel_backends(with_priority=True)
    candidate = Candidate.of(model, None, training=False)
    AttentionBackend("cudnn").apply(candidate)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        candidate.call(torch.randn(2, 5, 17))
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_it_says_when_there_is_nothing_to_gain() -> None:
    rule = AttentionBackend("flash")
    assert rule.absent(times_with("mm")) == "the model does not call scaled_dot_product_attention"
    assert rule.absent(times_with("mm", "_scaled_dot_product_flash_attention")) == "it is already used"
    assert rule.absent(times_with("_scaled_dot_product_efficient_attention")) is None
    both = times_with("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
    assert rule.absent(both) is None
    assert rule.predicted_ms(times_with("mm")) == 0


def test_its_gain_is_that_of_attention_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with OperatorTimes(torch.device("cpu")) as watched, torch.no_grad():
        Attends()(torch.randn(2, 5, 16))
    times = Times(4.0, watched.calls())
    assert times.of("scaled_dot_product") > 0
    seen: list[tuple[int, ...]] = []

    def alone_ms(run: Callable[[], Any], device: torch.device) -> float:
        result = run()
        seen.append((result if isinstance(result, Tensor) else result[0]).shape)
        return 4.0 if len(seen) == 1 else 3.0

    monkeypatch.setattr(attention_rules, "alone_ms", alone_ms)
    predicted = AttentionBackend("flash").predicted_ms(times)
    assert predicted == pytest.approx(times.of("scaled_dot_product") / 4)
    assert seen == [(2, 2, 5, 8)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True])
def test_on_a_gpu_it_is_proven(dtype: torch.dtype, train: bool) -> None:
    torch.manual_seed(0)
    model = Attends().to("cuda", dtype).train(train)
    x = torch.randn(2, 512, 16, device="cuda", dtype=dtype)
    names = [f"attention-{backend}" for backend in BACKENDS]
    found = rooftop.optimize(model, x, train=train, rules=names)
    assert [change.rule for change in found.changes if change.verdict == "failed"] == []
    assert {change.rule for change in found.changes} == set(names)
