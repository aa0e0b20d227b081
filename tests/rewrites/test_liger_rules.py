"""Norms and SwiGLU by Liger's functions: which modules they compute, and with which parameters."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.rewrites import Candidate, Liger, Times, module_rules
from rooftop.rewrites.candidates import Call
from rooftop.rewrites.liger_rules import FUNCTIONS, PACKAGE, is_swiglu

CPU = torch.device("cpu")


class RmsNorm(nn.Module):
    """An RMS norm as libraries write it.

    Args:
        offset: added to the weight.
    """

    def __init__(self, columns: int, offset: int = 0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.rand(columns)), 1e-5, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * (self.offset + self.weight)


class Mlp(nn.Module):
    """A gated network.

    Args:
        act: the gate's activation.
    """

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.down_proj, self.act = nn.Linear(12, 8, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    norms = [RmsNorm(8), RmsNorm(8, offset=1), nn.RMSNorm(8, eps=1e-6), nn.LayerNorm(8)]
    return nn.Sequential(*norms, Mlp(nn.SiLU()), Mlp(nn.GELU()), nn.LayerNorm((2, 8)), nn.LayerNorm(8, bias=False))


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Liger's functions, computed by PyTorch; returns the names of the calls."""
    calls: list[str] = []

    def liger_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
        calls.append(f"rms {eps:g} {offset:g} {casting}")
        assert not in_place, "the gradient of the result may have other users"
        return nn.functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)

    def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        calls.append(f"layer {eps:g}")
        return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
        calls.append("swiglu")
        return nn.functional.silu(a) * b

    functions = SimpleNamespace(
        liger_rms_norm=liger_rms_norm, liger_layer_norm=liger_layer_norm, liger_swiglu=liger_swiglu
    )
    monkeypatch.setitem(sys.modules, FUNCTIONS, functions)
    return calls


def test_modules_are_recognized_by_what_they_compute(liger: list[str]) -> None:
    plain = model()
    candidate = Candidate.of(plain, None, training=True)
    assert Liger().apply(candidate) == "3 RMSNorm, 1 LayerNorm, 1 SwiGLU"
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(candidate.call(x), plain(x))
    assert liger == ["rms 1e-05 0 llama", "rms 1e-05 1 gemma", "rms 1e-06 0 llama", "layer 1e-05", "swiglu"]
    assert not [module for module in plain if "forward" in vars(module)], "the original model must stay unchanged"
    gradients = [
        torch.autograd.grad(call(x).square().sum(), list(plain.parameters())) for call in (plain, candidate.call)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_other_calls_run_as_usual(liger: list[str]) -> None:
    candidate = Candidate.of(nn.Sequential(RmsNorm(8)), None, training=True)
    Liger().apply(candidate)
    assert candidate.call(torch.randn(2, 8).bfloat16()).dtype == torch.float32
    candidate.call(torch.randn(0, 8))
    assert liger == []
    candidate.model[0](x=torch.randn(2, 8))
    assert liger == ["rms 1e-05 0 llama"]


def test_a_model_without_them_has_nothing_to_change(liger: list[str]) -> None:
    assert Liger().apply(Candidate.of(nn.Sequential(nn.Linear(2, 2)), None, True)) == ""


def test_a_swiglu_is_what_computes_one() -> None:
    class Scaled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Biased(Mlp):
        def __init__(self) -> None:
            super().__init__(nn.SiLU())
            self.more = nn.Parameter(torch.zeros(8))

    assert is_swiglu(Mlp(nn.SiLU()))
    assert not any(map(is_swiglu, (Mlp(nn.GELU()), Scaled(nn.SiLU()), Biased(), nn.Linear(2, 2))))
    module = Mlp(nn.SiLU())
    before = torch.get_rng_state()
    is_swiglu(module)
    assert module.gate_proj.out_features == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_those_of_transformers_are_recognized(liger: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    candidate = Candidate.of(transformers.LlamaModel(config).eval(), None, training=False)
    assert Liger().apply(candidate) == "2 SwiGLU, 5 RMSNorm"
    candidate.call(input_ids=torch.randint(50, (1, 4)), use_cache=False)
    assert len(liger) == 7


def test_it_needs_a_gpu_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate.of(model(), None, training=True)
    assert "needs a GPU" in str(Liger().refusal(candidate))
    candidate.device = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Liger().refusal(candidate) == "not installed: pip install liger-kernel"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert Liger().refusal(candidate) is None


def test_gains_are_predicted_from_the_norms_of_the_step(monkeypatch: pytest.MonkeyPatch, liger: list[str]) -> None:
    aten = torch.ops.aten
    assert Liger().predicted_ms(Times(9.0, (Call(aten.relu.default, (), CPU, 3, 1.0),))) == 0.0
    parts = ((aten.pow.Tensor_Scalar, 1.0), (aten.mean.dim, 0.5), (aten.rsqrt.default, 0.1))
    by_hand = Times(9.0, tuple(Call(operator, (), CPU, 4, ms) for operator, ms in parts))
    assert Liger().predicted_ms(by_hand) == pytest.approx(2.5 * 1.6 - 0.5)
    x = torch.empty(64, 32, device="meta")
    scale = torch.empty(32, device="meta")
    norm = Call(aten.native_layer_norm.default, (x, [32], scale, scale, 1e-5), CPU, 4, 2.0)
    times = iter((1.0, 0.25))
    monkeypatch.setattr(module_rules, "alone_ms", lambda run, device: (run(), next(times))[1])
    assert Liger().predicted_ms(Times(9.0, (norm,))) == pytest.approx(0.75 * 2.0)
    assert liger == ["layer 1e-05"], "Liger's own kernel was timed"


def test_in_training_the_backward_is_timed_too(monkeypatch: pytest.MonkeyPatch, liger: list[str]) -> None:
    aten = torch.ops.aten
    x, scale = torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
    norm = Call(aten.native_layer_norm.default, (x, [32], scale, scale, 1e-5), CPU, 4, 2.0)
    backward = Call(aten.native_layer_norm_backward.default, (), CPU, 4, 6.0)
    found, times = list[Any](), iter((1.0, 1.5))
    monkeypatch.setattr(module_rules, "alone_ms", lambda run, device: (found.append(run()), next(times))[1])
    assert Liger().predicted_ms(Times(9.0, (norm, backward))) == pytest.approx(-0.5 * 8.0)
    assert [[tuple(gradient.shape) for gradient in each] for each in found] == [[(64, 32), (32,), (32,)]] * 2
    torch.testing.assert_close(found[1], found[0])


def test_other_powers_and_norms_do_not_fail_the_prediction(monkeypatch: pytest.MonkeyPatch, liger: list[str]) -> None:
    aten, rows = torch.ops.aten, torch.empty(64, 32, device="meta")
    powers = [
        (aten.pow.Tensor_Tensor, (rows, rows)),
        (aten.pow.Scalar, (2, rows)),
        (aten.pow.Tensor_Scalar, (torch.empty((), device="meta"), 2)),
        (aten.pow.Tensor_Scalar, (torch.empty(4, dtype=torch.int64, device="meta"), 2)),
    ]
    calls = [Call(operator, given, CPU, 1, 1.0) for operator, given in powers]
    monkeypatch.setattr(module_rules, "launch_ms", lambda run, device: float(run() is not None))
    assert Liger().predicted_ms(Times(9.0, (*calls, Call(aten.rsqrt.default, (rows,), CPU, 1, 0.1)))) > 0
    assert liger == [], "none of the powers is an RMS norm's"
    scale = torch.empty(8, 32, device="meta")
    of_two = Call(aten.native_layer_norm.default, (rows.view(8, 8, 32), [8, 32], scale, scale, 1e-5), CPU, 4, 2.0)
    Liger().predicted_ms(Times(9.0, (of_two,)))
    assert liger == [], "Liger's norms have one dimension"


def test_the_host_also_takes_time_to_launch_a_kernel(monkeypatch: pytest.MonkeyPatch, liger: list[str]) -> None:
    x, scale = torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
    norm = Call(torch.ops.aten.native_layer_norm.default, (x, [32], scale, scale, 1e-5), CPU, 4, 2.0)
    monkeypatch.setattr(module_rules, "alone_ms", lambda run, device: 1.0)
    launches = iter((0.25, 0.5))
    monkeypatch.setattr(module_rules, "launch_ms", lambda run, device: next(launches))
    bound_by_host = Times(9.0, (norm,), device_ms=2.0, host_ms=9.0)
    assert Liger().predicted_ms(bound_by_host) == pytest.approx(-4 * 0.25)


@pytest.mark.gpu
def test_it_passes_the_gate_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGE)
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(4):
        mlp: Any = nn.Module.__new__(Mlp)
        nn.Module.__init__(mlp)
        mlp.gate_proj, mlp.up_proj = nn.Linear(256, 512), nn.Linear(256, 512)
        mlp.down_proj, mlp.act = nn.Linear(512, 256), nn.SiLU()
        blocks += [RmsNorm(256), mlp, nn.LayerNorm(256)]
    network, x = nn.Sequential(*blocks).cuda().bfloat16().train(), torch.randn(4096, 256).cuda().bfloat16()
    found = rooftop.optimize(network, x, train=True, rules=["liger-kernel"])
    (change,) = found.changes
    assert change.verdict in ("kept", "no gain"), change
    assert change.where == "4 RMSNorm, 4 SwiGLU, 4 LayerNorm"
