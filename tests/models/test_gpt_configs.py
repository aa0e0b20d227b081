"""The config of a Gpt: published sizes, Hugging Face's config.json in and out, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rooftop.errors import TargetError, WeightsError
from rooftop.models.gpt import Gpt
from rooftop.models.gpt_configs import (
    PRESETS,
    GptConfig,
    config_of,
    gpt_config,
    hugging_face_config,
    hugging_face_kind,
)

PARAMETERS = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-1b": 1100048384,
    "llama-7b": 6738415616,
    "llama-70b": 68976648192,
}
"""As published, with embeddings; CodeGeeX's are not, since its last layer is another one here."""

# The config.json of the first GPT-2, as transformers 4 wrote it, and of Llama 2 70B; what has no meaning here left out.
OF_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
OF_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = gpt_config(name)
    model = Gpt(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters
    assert config.parameters == PARAMETERS.get(name, config.parameters)


@pytest.mark.parametrize(
    "changes",
    [
        {"biases": False},
        {"tied": False},
        {"activation": "swiglu"},
        {"norm": "rms"},
        {"position": "rope"},
        {"kv_heads": 2},
    ],
)
def test_parameters_with_each_switch(changes: dict[str, Any]) -> None:
    small = GptConfig(vocabulary=17, layers=2, width=24, heads=4, kv_heads=4, hidden=40, positions=9)
    config = replace(small, **changes)
    assert sum(parameter.numel() for parameter in Gpt(config, device="meta").parameters()) == config.parameters
    assert config.parameters != small.parameters


def test_flops_of_a_token() -> None:
    """Six for each element of a matrix; of attention, six for each feature, visible key and product."""
    config = gpt_config("llama-7b")
    matrices = config.parameters - config.vocabulary * config.width - 65 * config.width  # no embedding, no norms
    assert config.flops_per_token(4096) == 6 * matrices + 32 * 6 * 2 * 4096 * 4097 // 2
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        config.flops_per_token(0)


def test_published_files_of_hugging_face() -> None:
    assert config_of(OF_GPT2) == replace(gpt_config("gpt2"), dropout=0.1, attention_dropout=0.1)
    assert config_of(OF_LLAMA) == gpt_config("llama-70b")
    scaled = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_of(OF_LLAMA | scaled).rope_base == config_of(OF_LLAMA | {"rope_theta": 5e5}).rope_base == 5e5


@pytest.mark.parametrize(
    "config",
    [
        replace(gpt_config("gpt2"), activation="gelu", tied=False, hidden=100, dropout=0.2, attention_dropout=0.3),
        replace(gpt_config("llama-1b"), rope_base=5e5, biases=True, tied=True, attention_dropout=0.1),
    ],
    ids=["gpt2", "llama"],
)
def test_there_and_back(config: GptConfig) -> None:
    assert config_of(hugging_face_config(config)) == config


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (OF_GPT2, {"model_type": "bert"}, "model_type 'bert': expected 'gpt2' or 'llama'"),
        (OF_GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (OF_GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (OF_GPT2, {"activation_function": "relu"}, "activation_function is 'relu': expected gelu_new"),
        (OF_GPT2, {"embd_pdrop": 0.2}, "embd_pdrop is 0.2, resid_pdrop 0.1"),
        (OF_GPT2, {"n_head": 7}, "7 heads do not divide a width of 768"),
        (OF_GPT2, {"n_embd": "768"}, "config.json of a gpt2"),
        (OF_LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled or partial"),
        (OF_LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled or partial"),
        (OF_LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "scaled or partial"),
        (OF_LLAMA, {"head_dim": 64}, "head_dim is 64, which is not modelled here: expected 128"),
        (OF_LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (OF_LLAMA, {"attention_bias": True, "mlp_bias": False}, "mlp_bias is False"),
    ],
)
def test_variants_that_are_not_modelled(given: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        config_of(given | changes)


def test_a_size_that_is_not_there() -> None:
    with pytest.raises(WeightsError, match="has no hidden_size: the model cannot be built"):
        config_of({key: value for key, value in OF_LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a positive int, got 0"),
        ({"width": 768.0}, "width must be a positive int, got 768.0"),
        ({"heads": 11}, "11 heads do not divide a width of 768"),
        ({"kv_heads": 5}, "5 kv_heads do not divide 12 heads"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"position": "rope", "heads": 256, "kv_heads": 256}, "a head has 3 features"),
    ],
)
def test_wrong_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(gpt_config("gpt2"), **changes)


def test_names() -> None:
    with pytest.raises(TargetError, match="did you mean llama-7b"):
        gpt_config("llama7b")
    assert hugging_face_kind(gpt_config("gpt2-xl")) == "gpt2"
    with pytest.raises(ValueError, match="This is neither"):
        hugging_face_config(replace(gpt_config("gpt2"), norm="rms"))
    with pytest.raises(ValueError, match="This is neither"):
        hugging_face_kind(replace(gpt_config("llama-7b"), dropout=0.1))
