"""Selective recomputation gives the same gradients bit for bit, and saves as much memory as the docs say."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from rooftop.models.gpt.blocks import Block, rotation_of
from rooftop.models.gpt.configs import GptConfig, gpt_config
from rooftop.models.gpt.layouts import fully_sharded_gpt, parallel_gpt
from rooftop.parallel import Layout, ModelGradients, recomputing
from rooftop.parallel.recomputing import granularity_of, made_again
from rooftop.parallel.sharded_data import local_of

Run = Callable[..., list[Any]]
GPT = GptConfig(vocabulary=17, layers=2, width=16, heads=4, kv_heads=4, hidden=64, positions=8, dropout=0.2)
LLAMA = GptConfig(vocabulary=17, layers=2, width=16, heads=4, kv_heads=2, hidden=40, positions=8, norm="rms",
                  position="rope", activation="swiglu", biases=False, dropout=0.2)  # fmt: skip
CONFIGS = {
    "gpt": GPT,
    "exact gelu": replace(GPT, activation="gelu"),
    "attention dropout": replace(GPT, attention_dropout=0.1),
    "llama": LLAMA,
    "normed heads": replace(LLAMA, head_norms=True),
    "windows": replace(LLAMA, window=3),
}
TEXT = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))


def enlarged(model: nn.Module) -> nn.Module:
    """A model with matrices large enough that no value becomes nearly zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def gradients(config: GptConfig, recompute: bool | str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Gradients of two losses; both forwards run before the backwards."""
    model = enlarged(parallel_gpt(config, seed=1, recompute=recompute, dtype=dtype, **options))
    losses = [model(TEXT[:, :-1], TEXT[:, 1:], step=step) for step in (3, 4)]
    for loss in losses:
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# ---- the same gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_without_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    expected = gradients(CONFIGS[name], False, dtype)
    found = gradients(CONFIGS[name], "selective", dtype)
    assert len(found) == len(expected) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_under_autocast_too(config: GptConfig) -> None:
    """Under autocast, where linear layers cast their inputs; backward runs outside of it."""

    def found(recompute: bool | str) -> list[Tensor]:
        model = parallel_gpt(config, seed=1, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TEXT[:, :-1], TEXT[:, 1:])
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(found("selective"), found(False), strict=True))


def test_backward_may_be_repeated() -> None:
    model = parallel_gpt(LLAMA, seed=1, recompute="selective", dtype=torch.float64)
    loss, weights = model(TEXT[:, :-1], TEXT[:, 1:]), list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, weights), strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's tracer reads it
def test_blocks_are_not_compiled_and_have_the_same_gradients() -> None:
    expected = gradients(GPT, False, torch.float64)
    model = enlarged(parallel_gpt(GPT, seed=1, recompute="selective", dtype=torch.float64))
    for block in model.layers.values():  # type: ignore[union-attr]
        assert isinstance(block, Block)
        block.compile(backend="aot_eager")
    for step in (3, 4):
        model(TEXT[:, :-1], TEXT[:, 1:], step=step).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-14)


def gradients_here(kind: str, layout: Layout, shared: bool) -> list[list[Tensor]]:
    """This rank's part of a step's gradients, without recomputation and with it."""
    groups, found = layout.process_groups(), []
    make = fully_sharded_gpt if shared else parallel_gpt
    for recompute in (False, "selective"):
        model = make(CONFIGS[kind], layout, groups, seed=1, recompute=recompute, dtype=torch.float64)
        enlarged(model)
        all_gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel)
        model(TEXT[:, :-1], TEXT[:, 1:], step=5).backward()
        all_gradients.sum_()
        found.append([local_of(p.grad).clone() for p in model.parameters() if p.grad is not None])
    return found


RANKS = {
    "tp=2": (2, Layout(1, 2), False),
    "tp=2 sequence": (2, Layout(1, 2, sequence_parallel=True), False),
    "dp=2 shared": (2, Layout(2), True),
    "dp=2 tp=2 sequence shared": (4, Layout(2, 2, sequence_parallel=True), True),
}


@pytest.mark.parametrize("name", RANKS)
def test_each_rank_has_the_same_gradients_bit_for_bit(name: str, on_ranks: Run) -> None:
    world, layout, shared = RANKS[name]
    for kind in ("gpt", "llama"):
        for expected, found in on_ranks(world, gradients_here, kind, layout, shared):
            assert len(found) == len(expected) > 10
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- less memory ---------------------------------------------------------------------------------------------------


def kept_by(block: nn.Module, config: GptConfig, length: int = 8) -> int:
    """Bytes that autograd keeps for a block between forward and backward, without parameters and tables of
    positions."""
    dtype = next(block.parameters()).dtype
    x, update = (torch.randn(2, length, config.width, dtype=dtype, requires_grad=True) for _ in range(2))
    rotation = rotation_of(torch.arange(config.positions), config) if config.position == "rope" else None
    others = [*block.parameters(), *(rotation or ())]
    seen: dict[int, int] = {}
    kept: WeakSet[recomputing._Kept] = WeakSet()

    class Watched(recomputing._Kept):
        __slots__ = ("__weakref__",)

        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            kept.add(self)

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    gc.disable()  # new objects stay in the youngest generation
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor)
        with hooks, patch.object(recomputing, "_Kept", Watched):
            result = block(x, update, rotation)
        gc.collect(0)
    finally:
        gc.enable()
    for each in kept:  # counted by hooks of the block's own, including the inputs of the recomputation
        see(each.tensor)
    for each in others:
        seen.pop(each.untyped_storage()._cdata, None)
    del result
    return sum(seen.values())


def per_token(config: GptConfig, recompute: bool | str) -> float:
    model = parallel_gpt(config, seed=1, recompute=recompute)
    return kept_by(model.layers["0"], config) / (2 * 8)


STATISTICS = {"layer": 2 * 2, "rms": 2 * 1}  # statistics that the two norms keep for each token


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_block_keeps_what_the_docs_say(kind: str) -> None:
    """Counts are 4-byte numbers per token. `merged` is a copy of attention's result in the order of positions."""
    config = CONFIGS[kind]
    width, kv_width, hidden = config.width, config.kv_heads * config.head_features, config.hidden
    small = STATISTICS[config.norm] + config.heads  # and the log-sum-exp of each head
    sums, normed, qkv, seen, merged = 2 * width, 2 * width, width + 2 * kv_width, width, width
    rotated = width + kv_width if config.position == "rope" else 0
    before = 2 * hidden if config.activation == "swiglu" else hidden
    selective = sums + qkv + seen + before + small
    assert per_token(config, False) == 4 * (selective + normed + rotated + merged + hidden)
    assert per_token(config, "selective") == 4 * selective


@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_it_is_a_third_less(name: str) -> None:
    """The model has the proportions of a real one, and a sixteenth of its width."""
    config = replace(gpt_config(name), dropout=0.0, attention_dropout=0.0, vocabulary=17, layers=1, positions=8)
    config = replace(config, width=config.width // 16, hidden=config.hidden // 16, heads=4, kv_heads=4)
    assert per_token(config, "selective") < 2 / 3 * per_token(config, False)


def test_weights_of_attention_with_dropout_are_not_kept() -> None:
    config = replace(GPT, attention_dropout=0.1, positions=64)
    kept = []
    for recompute in (False, "selective"):
        model = parallel_gpt(config, seed=1, recompute=recompute)
        few, many = (kept_by(model.layers["0"], config, length) / (2 * length) for length in (32, 64))
        kept.append(many - few)
    assert kept[0] >= 2 * 4 * 32 * config.heads  # attention weights per token grow with the length
    assert kept[1] == 0


def kept_here(layout: Layout) -> list[int]:
    found = []
    for recompute in (False, "selective"):
        model = parallel_gpt(LLAMA, layout, seed=1, recompute=recompute)
        found.append(kept_by(model.layers["0"], LLAMA, LLAMA.positions // layout.tp))
    return found


def test_with_sequence_parallelism_no_rank_keeps_all_positions(on_ranks: Run) -> None:
    rows, width, hidden = 2 * LLAMA.positions, LLAMA.width, LLAMA.hidden
    for plain, selective in on_ranks(2, kept_here, Layout(1, 2, sequence_parallel=True)):
        gathered = 2 * rows * width
        of_features = rows * (width + width // 2 + width + hidden) // 2  # rotated queries and keys, merged, activated
        assert plain - selective == 4 * (gathered + of_features)


def test_nothing_is_made_without_gradients() -> None:
    model = parallel_gpt(GPT, seed=1, recompute="selective")
    with torch.no_grad(), patch.object(recomputing, "_Recipe", side_effect=AssertionError):
        model(TEXT[:, :-1], TEXT[:, 1:])


# ---- single tensors ------------------------------------------------------------------------------------------------


def test_a_tensor_is_made_again_once_for_each_that_needs_it() -> None:
    x, calls = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), []

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        return x.sin(), x.cos()

    made = make(x)
    with made_again(made, make, x):
        y = made[0].T * made[1].T  # both are views of one memory, so both are kept
    assert calls == [True]
    y.sum().backward()
    assert calls == [True, False]
    torch.testing.assert_close(x.grad, (2 * x).cos().detach(), rtol=0, atol=1e-14)


def test_changed_sources_and_kept_tensors_are_refused() -> None:
    for changes_source in (True, False):
        x, other = torch.randn(3, requires_grad=True), torch.randn(3)
        source = x * 2
        made = source.sin()
        with made_again((made,), lambda source: (source.sin(),), source):
            y = made * made + other * made
        with torch.no_grad():
            (source if changes_source else other).add_(1)
        with pytest.raises(RuntimeError, match=r"\(3,\) that backward needs was modified by an inplace operation"):
            y.sum().backward()


def test_another_result_than_in_forward_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    made = x.sin()
    with made_again((made,), lambda x: (x.sin()[:2],), x):
        y = made * made
    with pytest.raises(RuntimeError, match=r"backward recomputed \[\(2,\)\], but forward had computed \[\(3,\)\]"):
        y.sum().backward()


def test_other_words_are_refused() -> None:
    assert [granularity_of(each, "f") for each in (False, True, "full", "selective")] == [
        None, "full", "full", "selective",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Gpt: recompute must be False, True, 'full' or 'selective', got 'selectiv'"):
        parallel_gpt(GPT, seed=1, recompute="selectiv")
    with pytest.raises(ValueError, match="got 1"):
        granularity_of(1, "Gpt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be combined with recompute"):
        parallel_gpt(GPT, seed=1, recompute="selective", halves=True)
