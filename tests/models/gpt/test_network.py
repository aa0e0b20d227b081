"""Gpt compared with transformers' GPT-2 and Llama: logits, loss, gradients, greedy text; stages, cache, dropout,
errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rooftop.models.gpt.blocks import plain_dropouts
from rooftop.models.gpt.configs import GptConfig, config_of
from rooftop.models.gpt.network import Cache, Gpt, continue_greedily, parts_of
from rooftop.models.gpt.weights import gpt_state_dict, hugging_face_state_dict
from rooftop.testing import assert_as_accurate

THEIRS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 97},
    "gpt2 untied": {"vocab_size": 17, "n_inner": 50, "activation_function": "gelu", "tie_word_embeddings": False},
    "llama in groups": {"vocab_size": 127, "num_key_value_heads": 2},
    "llama tied": {"vocab_size": 31, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"max_position_embeddings": 40, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
              "intermediate_size": 70},
}  # fmt: skip
GPT = GptConfig(vocabulary=97, layers=3, width=48, heads=6, kv_heads=6, hidden=96, positions=40)
LLAMA = GptConfig(vocabulary=127, layers=3, width=48, heads=6, kv_heads=2, hidden=70, positions=40, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
both = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
all_of_theirs = pytest.mark.parametrize("kind", THEIRS)

Pair = tuple[nn.Module, Gpt]


def randomize(model: nn.Module) -> None:
    """Randomize parameters so that activations stay near one and every parameter has an effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                deviation = 0.5 if "wte" in name or "wpe" in name or "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            elif name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)


@pytest.fixture(scope="session")
def hugging_face(torchvision_models: ModuleType) -> Callable[[str], Pair]:
    """(theirs, ours) with the same weights, in eval mode."""
    transformers = pytest.importorskip("transformers")

    @cache
    def build(kind: str) -> Pair:
        family = kind.split()[0]
        names = {"gpt2": ("GPT2Config", "GPT2LMHeadModel"), "llama": ("LlamaConfig", "LlamaForCausalLM")}[family]
        given = getattr(transformers, names[0])(**SIZES[family] | THEIRS[kind], attn_implementation="eager")
        theirs = getattr(transformers, names[1])(given).eval()
        randomize(theirs)
        config = config_of(given.to_dict())
        ours = Gpt(config).eval()
        ours.load_state_dict(gpt_state_dict(theirs.state_dict(), config))
        return theirs, ours

    return build


def small(config: GptConfig, **options: Any) -> Gpt:
    model = Gpt(config, **options)
    randomize(model)
    return model


def text(config: GptConfig, batch: int = 2, length: int = 21, seed: int = 1) -> Tensor:
    return torch.randint(config.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


# ---- compared with transformers ------------------------------------------------------------------------------------


@all_of_theirs
@torch.no_grad()
def test_logits(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens = text(ours.config)
    expected = theirs(tokens).logits
    assert expected.std() > 0.3  # weights that have an effect
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)


@all_of_theirs
@torch.no_grad()
def test_weights_go_back(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens, model = text(ours.config), small(ours.config).eval()
    other = type(theirs)(theirs.config).eval()
    found = other.load_state_dict(hugging_face_state_dict(model.state_dict(), model.config), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= ({"lm_head.weight"} if model.config.tied else set())
    torch.testing.assert_close(other(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    assert (model(tokens) - ours(tokens)).abs().max() > 0.1  # `ours` had other weights


@all_of_theirs
def test_loss_and_gradients(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens = text(ours.config)
    expected = theirs(tokens, labels=tokens).loss
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    wanted = gpt_state_dict(gradients(theirs, expected), ours.config)
    found = gradients(ours, loss)
    assert set(wanted) - set(found) == ({"head.output.weight"} if ours.config.tied else set())
    for name, gradient in found.items():
        assert wanted[name].abs().max() > 1e-4, name
        torch.testing.assert_close(
            gradient, wanted[name], atol=1e-5, rtol=1e-5, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("kind", ["gpt2 untied", "llama in groups"])
def test_greedy_text_is_theirs_token_for_token(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens = text(ours.config, batch=3, length=7)
    expected = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=25,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert len(expected[0, 7:].unique()) > 2
    assert torch.equal(continue_greedily(ours, tokens, 25), expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama in groups"])
@torch.no_grad()
def test_bfloat16_is_as_accurate_as_theirs(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens = text(ours.config)
    weights = {key: value.bfloat16() for key, value in theirs.state_dict().items()}
    eager = type(theirs)(theirs.config).to(torch.bfloat16).eval()
    eager.load_state_dict(weights)
    models = {dtype: Gpt(ours.config, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float64)}
    for model in models.values():
        model.load_state_dict(gpt_state_dict(weights, ours.config))
    logits = {dtype: model(tokens) for dtype, model in models.items()}
    assert_as_accurate(logits[torch.bfloat16], eager(tokens).logits, logits[torch.float64], what="logits")


@pytest.mark.parametrize("kind", ["gpt2", "llama in groups"])
@torch.no_grad()
def test_flops_are_those_of_their_products(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    """transformers' products compute all pairs of positions; ours count only those that a causal mask lets through."""
    theirs, ours = hugging_face(kind)
    config, tokens = ours.config, text(ours.config, batch=1)
    with FlopCounterMode(display=False) as counter:
        theirs(tokens)
    length = tokens.shape[1]
    unseen = config.layers * 4 * config.width * length * (length - 1) // 2
    assert counter.get_total_flops() == length * config.flops_per_token(length, training=False) + unseen
    assert config.flops_per_token(length) == 3 * config.flops_per_token(length, training=False)


# ---- the loss ------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_the_logits_are_never_stored() -> None:
    config = replace(LLAMA, vocabulary=1009, positions=64)
    model, tokens = small(config), text(config, batch=4, length=65)
    logits = 4 * 64 * config.vocabulary
    with Largest() as whole:
        model(tokens[:, :-1])
    assert whole.elements == logits
    with Largest() as fused:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert fused.elements <= logits / 2


@both
def test_targets_of_minus_100_and_the_options_of_the_loss(config: GptConfig) -> None:
    model, tokens = small(config), text(config)
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(21) % 3 == 0, -100)
    flat = model(tokens).flatten(0, 1)
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
        expected = nn.functional.cross_entropy(flat, targets.flatten(), **options)
        torch.testing.assert_close(model(tokens, targets, **options), expected, atol=1e-5, rtol=1e-5)
    kept = flat[targets.flatten() != -100]
    expected = model(tokens, targets) + 0.1 * kept.logsumexp(-1).square().mean()
    torch.testing.assert_close(model(tokens, targets, z_loss=0.1), expected, atol=1e-5, rtol=1e-5)


# ---- positions, stages, cache --------------------------------------------------------------------------------------


@both
@torch.no_grad()
def test_no_position_sees_a_later_one(config: GptConfig) -> None:
    model, tokens = small(config).eval(), text(config)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % config.vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert ((before - after)[:, 12:].abs().amax(-1) > 1e-3).all()


@torch.no_grad()
def test_turned_positions_count_by_their_distance() -> None:
    model, tokens = small(LLAMA).eval(), text(LLAMA)
    places = torch.arange(21)
    torch.testing.assert_close(model(tokens, positions=places + 17), model(tokens), atol=1e-4, rtol=1e-4)
    assert (model(tokens, positions=places * 2) - model(tokens)).abs().max() > 1e-2
    of_each = torch.stack((places, places * 2))
    together = model(tokens, positions=of_each)
    apart = torch.cat([model(tokens[i : i + 1], positions=of_each[i]) for i in range(2)])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_learned_positions_are_looked_up() -> None:
    model, tokens = small(GPT).eval(), text(GPT)
    moved = small(GPT).eval()
    moved.embedding.positions.weight.copy_(model.embedding.positions.weight.roll(-5, 0))
    assert torch.equal(model(tokens, positions=torch.arange(5, 26)), moved(tokens))


STAGES = [
    {"layers": range(1), "pre_process": True, "post_process": False},
    {"layers": range(1, 3), "pre_process": False, "post_process": False},
    {"layers": range(0), "pre_process": False, "post_process": True},
]


@both
def test_stages_are_the_model(config: GptConfig) -> None:
    model, tokens = small(config), text(config)
    stages = [Gpt(config, **stage) for stage in STAGES]
    state = model.state_dict()
    for stage in stages:
        stage.load_state_dict({key: state[key] for key in stage.state_dict()})
    assert sorted(key for stage in stages for key in stage.state_dict()) == sorted(state)
    x = tokens[:, :-1]
    for stage in stages[:-1]:
        x = stage(x)
    loss, expected = stages[-1](x, tokens[:, 1:]), model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    loss.backward()
    found = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    if config.tied:  # tied weights on two stages, whose gradients a pipeline sums
        found["embedding.tokens.weight"] += found.pop("head.output.weight")
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


@both
@torch.no_grad()
def test_with_a_cache_a_text_may_come_in_pieces(config: GptConfig) -> None:
    model, tokens = small(config).eval(), text(config)
    memory = Cache(21)
    pieces = [model(piece, cache=memory) for piece in tokens.split([5, 1, 9, 6], 1)]
    assert memory.length == 21
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), atol=1e-5, rtol=1e-5)


def test_what_a_cache_refuses() -> None:
    model, tokens = small(LLAMA), text(LLAMA)
    with pytest.raises(ValueError, match=r"a cache supports no gradients: call the model under torch\.no_grad"):
        model(tokens, cache=Cache(40))
    with torch.no_grad():
        memory = Cache(20)
        with pytest.raises(ValueError, match="21 positions do not fit into 20"):
            model(tokens, cache=memory)
        model(tokens[:, :4], cache=memory)
        with pytest.raises(ValueError, match=r"batch and heads \(2, 2\), got \(1, 2\)"):
            model(tokens[:1, :4], cache=memory)
    with pytest.raises(ValueError, match="positions must be positive, got 0"):
        Cache(0)


# ---- dropout, initial values, dtypes -------------------------------------------------------------------------------


@both
def test_dropouts_are_made_by_the_factory_by_name(config: GptConfig) -> None:
    places: dict[str, float] = {}

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if self.training else x

    def make(probability: float, name: str) -> nn.Module:
        places[name] = probability
        return Doubled() if name == "layers.2.mlp.dropout" else nn.Identity()

    model = small(replace(config, dropout=0.1, attention_dropout=0.2), dropouts=make)
    expected = {"embedding.dropout": 0.1}
    for layer in range(3):
        expected |= {f"layers.{layer}.attention.weights_dropout": 0.2}
        expected |= {f"layers.{layer}.{sublayer}.dropout": 0.1 for sublayer in ("attention", "mlp")}
    assert places == expected
    assert {name for name, module in model.named_modules() if isinstance(module, Doubled)} == {"layers.2.mlp.dropout"}
    tokens, other = text(config), small(config)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), other(tokens), atol=1e-5, rtol=1e-5)
        other.layers["2"].mlp.down.weight.mul_(2)
        if config.biases:
            other.layers["2"].mlp.down.bias.mul_(2)
        # with attention in plain PyTorch
        torch.testing.assert_close(model.train()(tokens), other(tokens), atol=1e-5, rtol=1e-5)


@both
def test_dropout_drops_while_training(config: GptConfig) -> None:
    config = replace(config, dropout=0.5, attention_dropout=0.5)
    model, tokens = small(config), text(config)
    assert isinstance(plain_dropouts(0.5, "anywhere"), nn.Dropout)
    torch.manual_seed(0)
    first, second = model(tokens), model(tokens)
    assert (first - second).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(model(tokens), first)


@both
def test_initial_values(config: GptConfig) -> None:
    config = replace(config, width=192, hidden=256)
    model = Gpt(config)
    residual = 0.02 / math.sqrt(6)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
            continue
        expected = residual if name.endswith(("out.weight", "down.weight")) else 0.02
        assert abs(parameter.std().item() / expected - 1) < 0.05, name
    twins = [Gpt(config) for _ in range(2)]
    for twin in twins:
        twin.initialize(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(*(twin.parameters() for twin in twins), strict=True))


def test_a_tied_head_is_the_embedding_also_after_the_meta_device() -> None:
    model = Gpt(GPT, device="meta").to_empty(device="cpu")
    model.tie()
    model.initialize()
    assert model.head.output.weight is model.embedding.tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == GPT.parameters
    assert Gpt(LLAMA).head.output.weight is not Gpt(LLAMA).embedding.tokens.weight


def test_parts_of_packed_parameters() -> None:
    parts = parts_of(Gpt(replace(LLAMA, biases=True), device="meta"))
    assert parts["layers.1.attention.qkv.weight"] == {"query": 48, "key": 16, "value": 16}
    assert parts["layers.1.mlp.up.bias"] == {"gate": 70, "up": 70}
    assert len(parts) == 3 * 4
    assert set(parts_of(Gpt(GPT, device="meta"))) == {
        f"layers.{layer}.attention.qkv.{name}" for layer in range(3) for name in ("weight", "bias")
    }


@both
def test_under_autocast_sums_stay_wide(config: GptConfig) -> None:
    model, tokens = small(config), text(config)
    expected = model(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        between = Gpt(config, post_process=False)(tokens)
        loss = model(tokens[:, :-1], tokens[:, 1:])
    assert between.dtype == loss.dtype == torch.float32
    assert 0 < abs(loss - expected) < 0.02 * expected
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model, loss).values())


@both
def test_compiled_whole(config: GptConfig) -> None:
    model, tokens = small(replace(config, layers=1)), text(config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss, expected = (each(tokens[:, :-1], tokens[:, 1:]) for each in (compiled, model))
    torch.testing.assert_close(loss, expected)
    found, wanted = gradients(model, loss), gradients(model, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


@both
@torch.no_grad()
def test_hooks_of_norms_see_their_calls(config: GptConfig) -> None:
    model, seen = small(config).eval(), []
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda module, given, out, name=name: seen.append(name))
    model(text(config))
    assert seen == [f"layers.{i}.{name}" for i in range(3) for name in ("attention_norm", "mlp_norm")] + ["head.norm"]


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(torch.zeros(3, dtype=torch.int64)), ValueError, r"expected tokens \(B, S\), got \(3,\)"),
        (lambda m: m([[1]]), TypeError, "got list"),
        (lambda m: m(torch.zeros(1, 3)), TypeError, "tokens must be int64 or int32, got torch.float32"),
        (lambda m: m(torch.zeros(1, 41, dtype=torch.int64)), ValueError, "41 positions, but the model has 40"),
        (
            lambda m: m(text(GPT), positions=torch.arange(3)),
            ValueError,
            r"expected positions \(21,\) or \(2, 21\), got \(3,\)",
        ),
        (lambda m: m(text(GPT) + 97), IndexError, "index out of range"),
        (lambda m: m(text(GPT), text(GPT)[:, 1:]), ValueError, r"expected target of shape \(2, 21\), got \(2, 20\)"),
        (lambda m: continue_greedily(m.train(), text(GPT), 1), ValueError, r"training mode: call model\.eval"),
        (lambda m: continue_greedily(m, text(GPT), 20), ValueError, "41 positions, but the model has 40"),
        (lambda m: continue_greedily(m, text(GPT)[:, :0], 1), ValueError, r"expected tokens \(B, S\)"),
    ],
)
def test_wrong_calls(call: Callable[[Gpt], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Gpt(GPT).eval())


def test_wrong_stages() -> None:
    for layers in (range(2, 4), range(0, 3, 2), range(-1, 1)):
        with pytest.raises(ValueError, match="consecutive layers"):
            Gpt(GPT, layers=layers)
    last, first = Gpt(GPT, pre_process=False), Gpt(GPT, post_process=False)
    with pytest.raises(ValueError, match=r"the output of the previous stage, \(B, S, 48\), got \(2, 21\)"):
        last(text(GPT))
    with pytest.raises(ValueError, match="give targets to the last stage"):
        first(text(GPT), text(GPT))
    with pytest.raises(ValueError, match="expected a whole model, got a pipeline stage"):
        continue_greedily(first.eval(), text(GPT), 1)


# ---- on the GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@both
def test_on_the_gpu_it_is_the_same_model(config: GptConfig) -> None:
    """float32 compared with the CPU, bfloat16 compared with float64, and a compiled step."""
    config = replace(config, width=192, hidden=256)
    model, tokens = small(config).eval(), text(config, batch=3, length=40)
    there, on_gpu = small(config).cuda().eval(), tokens.cuda()
    torch.testing.assert_close(there(on_gpu).cpu(), model(tokens), atol=1e-4, rtol=1e-4)
    expected, loss = model(tokens[:, :-1], tokens[:, 1:]), there(on_gpu[:, :-1], on_gpu[:, 1:])
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-5, rtol=1e-5)
    wanted = gradients(model, expected)
    for name, gradient in gradients(there, loss).items():
        torch.testing.assert_close(gradient.cpu(), wanted[name], atol=1e-5, rtol=1e-4)
    assert torch.equal(continue_greedily(there, on_gpu[:, :9], 31).cpu(), continue_greedily(model, tokens[:, :9], 31))
    half = there.bfloat16()
    narrow = half(on_gpu[:, :-1], on_gpu[:, 1:])
    assert abs(narrow.item() - expected.item()) < 0.02 * expected.item()
    compiled = torch.compile(half, fullgraph=True)(on_gpu[:, :-1], on_gpu[:, 1:])
    torch.testing.assert_close(compiled, narrow, atol=0.02, rtol=0.02)
