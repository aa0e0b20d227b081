"""Rules about the compiler: what they compile, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rooftop.rewrites import AttentionBackend, Autocast, Candidate, ChannelsLast, Compile, CompileBlocks
from rooftop.rewrites.compiler_rules import InOneForm, compile_in_place


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that the compiler gets, which run as they are."""
    torch.compiler.reset()
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, dynamic=False, backend=backend))
    return found


def images() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers).eval()


def test_the_code_around_a_model_does_not_break_its_graph(graphs: list[fx.GraphModule]) -> None:
    model, x = images(), torch.randn(2, 4, 5, 5)
    candidate = Candidate.of(model, None, training=False)
    ChannelsLast().apply(candidate)
    Autocast().apply(candidate)
    assert Compile().apply(candidate) == "the whole model"
    with torch.no_grad():
        torch.testing.assert_close(candidate.call(x), model(x), rtol=0.02, atol=0.02, check_dtype=False)
    assert len(graphs) == 1
    assert sum("conv" in str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function") == 3


def test_a_replaced_call_is_compiled_instead_of_the_model(graphs: list[fx.GraphModule]) -> None:
    candidate = Candidate.of(images(), None, training=False)
    candidate.call = lambda x: x.sin() + 1
    Compile().apply(candidate)
    x = torch.randn(3)
    assert torch.equal(candidate.call(x), x.sin() + 1)
    assert len(graphs) == 1


def test_strides_and_inference_mode_compile_nothing_again(graphs: list[fx.GraphModule]) -> None:
    run = InOneForm(torch.compile(lambda x: x.sin() + 1))
    x = torch.randn(4, 6)
    forms = [x, x.t().contiguous().t(), torch.randn(4, 12)[:, ::2], torch.randn(1, 6).expand(4, 6)]
    with torch.no_grad():
        for form in forms:
            assert torch.equal(run(form), form.sin() + 1)
    with torch.inference_mode():
        for form in (x, x.clone()):
            assert torch.equal(run(form), form.sin() + 1)
    assert len(graphs) == 1


def test_blocks_of_more_than_eight_forms_are_all_compiled(graphs: list[fx.GraphModule]) -> None:
    class Block(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(size, size + 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).relu()

    model = nn.Sequential(*(Block(size) for size in range(2, 13))).eval()
    candidate = Candidate.of(model, None, training=False)
    assert CompileBlocks().apply(candidate) == "11 Block"
    x = torch.randn(3, 2)
    with torch.no_grad():
        assert torch.equal(candidate.call(x), model(x))
    assert len(graphs) == 11


def test_blocks_of_pytorchs_own_classes_are_compiled(graphs: list[fx.GraphModule]) -> None:
    model, x = images(), torch.randn(2, 4, 5, 5)
    candidate = Candidate.of(model, None, training=False)
    assert CompileBlocks().apply(candidate) == "3 Sequential"
    with torch.no_grad():
        assert torch.equal(candidate.call(x), model(x))
    assert graphs
    assert all(any("conv" in str(node.target) for node in graph.graph.nodes) for graph in graphs)


def test_equal_blocks_are_compiled_once(graphs: list[fx.GraphModule]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).relu()

    model = nn.Sequential(*(Block() for _ in range(5))).eval()
    candidate, x = Candidate.of(model, None, training=False), torch.randn(2, 3)
    CompileBlocks().apply(candidate)
    with torch.no_grad():
        assert torch.equal(candidate.call(x), model(x))
    assert len(graphs) == 1


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("make", [Doubling, lambda: nn.Sequential(Doubling())], ids=["forward", "Sequential"])
def test_versions_of_a_search_do_not_count_for_other_models(
    graphs: list[fx.GraphModule], make: Callable[[], nn.Module]
) -> None:
    """PyTorch stops compiling a function after eight versions, and then silently runs it uncompiled."""
    for size in range(2, 12):
        candidate = Candidate.of(make(), None, training=False)
        Compile().apply(candidate)
        candidate.call(torch.ones(size))
    assert len(graphs) == 10
    other = torch.compile(make())
    assert torch.equal(other(torch.ones(12)), torch.full((12,), 2.0))
    assert len(graphs) == 11


def test_each_kind_of_block_has_its_own_versions(graphs: list[fx.GraphModule]) -> None:
    class Kind(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.layer = factor, nn.Sequential(nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * self.layer(x)

    model = nn.Sequential(*(Kind(factor) for factor in (1.0, 2.0, 3.0, 4.0) for _ in range(3)))
    candidate = Candidate.of(model.eval(), None, training=False)
    CompileBlocks().apply(candidate)
    for size in range(2, 8):
        before = len(graphs)
        candidate.call(torch.ones(size))
        assert len(graphs) == before + 4


@pytest.mark.parametrize("rule", [Compile(), CompileBlocks()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("replaced", [False, True])
def test_arguments_may_have_any_name(graphs: list[fx.GraphModule], rule: Any, replaced: bool) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.ReLU())

        def forward(self, x: Tensor, *, module: float = 1.0, call: float = 1.0, self_: float = 1.0) -> Tensor:
            return self.layer(x) * module * call * self_

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Named() for _ in range(3))

        def forward(self, x: Tensor, *, module: float = 1.0, call: float = 1.0) -> Tensor:
            for block in self.blocks:
                x = block(x, module=module, call=call)
            return x

    candidate = Candidate.of(Model().eval(), None, training=False)
    if replaced:
        model = candidate.model
        candidate.call = lambda x, **named: model(x, **named)
    rule.apply(candidate)
    assert torch.equal(candidate.call(torch.ones(2), module=2.0, call=0.25), torch.full((2,), 0.125))
    assert graphs


def test_a_cache_of_compiled_code_does_not_mix_back_ends_of_attention() -> None:
    first, other = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 6, 16)

    def operators(backend: SDPBackend) -> list[set[str]]:
        """The operators of calls of both shapes, without and with gradients, and in a structure."""
        module = _Attention()
        compile_in_place([module], dynamic=False)
        run, found = InOneForm(module), []
        with sdpa_kernel(backend):
            for gradients, q in ((False, first), (False, other), (False, [other]), (True, first)):
                with torch.set_grad_enabled(gradients):
                    run(q)
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                        run(q)
                found.append({event.name for event in profile.events()})
        return found

    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert all(fused in names for names in operators(SDPBackend.FLASH_ATTENTION))
    assert not any(fused in names for names in operators(SDPBackend.MATH)), "code for the other back end was cached"


def test_compiled_code_of_each_rule_for_attention_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def backend(graph: fx.GraphModule, _: object) -> fx.GraphModule:
        keys.append(compiler_config.cache_key_tag)
        return graph

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiled(fn, backend=backend))
    q = torch.randn(2, 4, 8, 16)
    with compiler_config.patch(cache_key_tag="the user's"), torch.no_grad():
        for attention in (None, AttentionBackend("flash"), AttentionBackend("efficient")):
            candidate = Candidate.of(_Attention(), None, training=False)
            if attention is not None:
                attention.apply(candidate)
            Compile().apply(candidate)
            torch.testing.assert_close(candidate.call(q), _Attention()(q))
        assert compiler_config.cache_key_tag == "the user's"
    assert len(set(keys)) == 3
    assert all(key.startswith("the user's") for key in keys)


class _Attention(nn.Module):
    def forward(self, q: Tensor | list[Tensor]) -> Tensor:
        q = q[0] if isinstance(q, list) else q
        return scaled_dot_product_attention(q, q, q)
