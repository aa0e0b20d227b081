"""`rooftop.optimize` on a GPU: kernels and graphs are proven, and streams that nothing waits for are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.models import resnet18
from rooftop.rewrites import Candidate, Rule

pytestmark = pytest.mark.gpu


class Changed(Rule):
    """A rule that replaces the call.

    Args:
        make: called with the original call; returns its replacement.
        path: the path of the submodule that is called instead of the whole model.
    """

    name = "changed"

    def __init__(self, make: Callable[[Callable[..., Any]], Callable[..., Any]], path: str = "") -> None:
        self.make, self.path = make, path

    def apply(self, candidate: Candidate) -> str:
        candidate.call = self.make(candidate.model.get_submodule(self.path) if self.path else candidate.call)
        return "the whole model"


class Slow(nn.Module):
    """Keeps the GPU busy for about 2 ms before its layers, so that a change which omits this is faster."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(4_000_000)
        result: Tensor = self.layers(x)
        return result


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 64), nn.Softmax(-1)).cuda().eval()


@pytest.mark.alone
def test_graphs_are_kept_where_the_host_is_what_takes_time() -> None:
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda().eval(), torch.randn(4, 256, device="cuda")
    found = rooftop.optimize(model, x, rules=["cuda-graphs", "kernels", "constants"])
    assert "cuda-graphs" in found.kept, found.changes
    assert found.after_ms < 0.7 * found.before_ms
    with torch.no_grad():
        first = found.module(x)
        before = first.clone()
        other = found.module(2 * x)
        torch.testing.assert_close(other, model(2 * x), rtol=1e-4, atol=1e-5)
        assert torch.equal(first, before), "later calls must not overwrite results"
    assert not found.module.unproven


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_of_convolutions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = resnet18().to("cuda", dtype).eval()
    x = torch.randn(2, 3, 64, 64, device="cuda", dtype=dtype)
    rules = ["fold-norms", "fuse-convolutions", "pools", "channels-last", "cuda-graphs"]
    found = rooftop.optimize(model, x, rules=rules, budget_s=90)
    wrong = [change for change in found.changes if change.verdict in ("refused", "failed")]
    assert not wrong, wrong
    assert "cuda-graphs" in found.kept
    with torch.no_grad():
        exact = resnet18().cuda().eval()
        exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
        expected, plain, got = exact(x.float()), model(x).float(), found.module(x).float()
    assert (got - expected).square().mean() <= 2 * (plain - expected).square().mean() + 1e-6


def test_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small().train(), torch.randn(64, 256, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    found = rooftop.optimize(model, x, train=True, optimizer=optimizer, rules=["kernels", "fused-optimizer"])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert {change.verdict for change in found.changes} <= {"kept", "no gain"}, found.changes
    found.module(x).square().sum().backward()
    assert found.optimizer is not None
    found.optimizer.step()
    assert not found.module.unproven


def test_a_training_step_is_replayed() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda().train(), torch.randn(4, 256, device="cuda")
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = rooftop.optimize(
        model, x, train=True, loss=lambda y: y.square().mean(), optimizer=optimizer, rules=["cuda-graphs"]
    )
    assert found.kept == ["cuda-graphs"], found.changes
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for _ in range(5):
        given = torch.randn(4, 256, device="cuda")
        for module, steps in ((found.module, optimizer), (other, plain)):
            steps.zero_grad()
            module(given).square().mean().backward()
            steps.step()
    assert not found.module.unproven
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-5)
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.warns(RuntimeWarning, match="its weights are in other memory"):
        found.module(x)


def test_training_is_captured_beside_living_graphs_of_autograd() -> None:
    """The caller's last loss, and the search's own reference, tie parameters to the stream of their forward pass."""
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda().train(), torch.randn(4, 256, device="cuda")
    alive = model(x).square().mean()
    alive.backward(retain_graph=True)
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rules = ["cuda-graphs", "kernels", "fused-optimizer"]
    found = rooftop.optimize(
        model, x, train=True, loss=lambda y: y.square().mean(), optimizer=optimizer, rules=rules, shapes=[(8, 256)]
    )
    assert {change.verdict for change in found.changes} <= {"kept", "no gain"}, found.changes
    assert "cuda-graphs" in found.kept
    losses = []
    for rows in (4, 8, 4):  # the last loss stays alive while the graph for another size is captured
        losses.append(found.module(torch.randn(rows, 256, device="cuda")).square().mean())
        losses[-1].backward(retain_graph=True)
    assert all(loss.isfinite() for loss in losses)


def test_a_network_of_convolutions_is_trained() -> None:
    """Gradients of channels-last weights are channels last; a fused optimizer refuses such gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 64, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda().bfloat16().train()
    x = torch.randn(64, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rules = ["channels-last", "fused-optimizer", "cuda-graphs"]
    found = rooftop.optimize(
        model, x, train=True, loss=lambda y: y.float().square().mean(), optimizer=optimizer, rules=rules
    )
    verdicts = {change.rule: f"{change.verdict}: {change.reason}" for change in found.changes}
    assert not any(verdict.startswith("failed") for verdict in verdicts.values()), verdicts
    assert verdicts["channels-last"].startswith(("kept", "no gain")), verdicts


def on_a_stream_that_waits_for_nothing(call: Callable[..., Any]) -> Callable[..., Any]:
    stream = torch.cuda.Stream()

    def run(x: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            result: Tensor = call(x)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return run


def on_a_stream_that_nobody_waits_for(call: Callable[..., Any]) -> Callable[..., Any]:
    stream = torch.cuda.Stream()

    def run(x: Tensor) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            return call(x)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("cheat", [on_a_stream_that_waits_for_nothing, on_a_stream_that_nobody_waits_for])
def test_streams_without_waits_are_found(cheat: Callable[..., Any]) -> None:
    model, x = Slow(small()).eval(), torch.randn(512, 256, device="cuda")
    found = rooftop.optimize(model, x, rules=[Changed(cheat, "layers")])
    (change,) = found.changes
    assert change.verdict == "refused", change
    assert "result 0" in change.reason


def test_out_of_memory_in_a_candidate_leaves_the_model() -> None:
    def takes_all(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> Tensor:
            torch.empty(1 << 60, device="cuda", dtype=torch.uint8)
            return call(x)  # type: ignore[no-any-return]

        return run

    model, x = small(), torch.randn(4, 256, device="cuda")
    found = rooftop.optimize(model, x, rules=[Changed(takes_all)])
    (change,) = found.changes
    assert change.verdict == "failed"
    assert "OutOfMemoryError" in change.reason
    with torch.no_grad():
        assert torch.equal(found.module(x), model(x))


def test_a_model_that_waits_only_outside_of_captures_is_a_graph() -> None:
    """So do the models of transformers: they leave out a mask if the GPU says that it hides nothing."""

    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.cuda.is_current_stream_capturing() and bool((x < 0.5).all()):
                return self.many_sines(x)
            return torch.where(x < 0.5, self.many_sines(x), x.cos())

        def many_sines(self, x: Tensor) -> Tensor:  # so many launches that a graph is faster even on a busy GPU
            for _ in range(40):
                x = x.sin() * 1.01
            return x

    x = torch.rand(64, 64, device="cuda") / 2
    found = rooftop.optimize(Masks().eval(), x, rules=["cuda-graphs"])
    (change,) = found.changes
    assert change.verdict == "kept", change
    with torch.no_grad():
        assert torch.equal(found.module(2 * x), Masks()(2 * x))


def test_what_the_host_waits_for_is_no_graph() -> None:
    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x * 3

    x = torch.rand(64, device="cuda")
    found = rooftop.optimize(Waits().eval(), x, rules=["cuda-graphs"])
    (change,) = found.changes
    assert change.verdict == "failed", change
    assert "the host waits for the GPU" in change.reason
    with torch.no_grad():
        assert torch.equal(found.module(-x), -x * 3)
