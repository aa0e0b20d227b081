"""The config of a Gpt: published sizes, reading and writing of Hugging Face's config.json, and refused configs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import TargetError, WeightsError
from rooftop.models.gpt.configs import (
    PRESETS,
    config_of,
    gpt_config,
    hugging_face_config,
    hugging_face_kind,
)
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.rope_scaling import RopeScaling
from rooftop.models.gpt.switches import GptConfig

PARAMETERS = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-1b": 1100048384,
    "llama-7b": 6738415616,
    "llama-70b": 68976648192,
}
"""The published numbers of parameters, including embeddings. CodeGeeX's number is not the published one, since its last
layer differs here."""

# The config.json of the first GPT-2, as transformers 4 wrote it, and of Llama 2 70B, without entries that have no
# meaning here.
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


OF_MISTRAL = OF_LLAMA | {"model_type": "mistral", "sliding_window": 4096}
OF_QWEN2 = OF_LLAMA | {"model_type": "qwen2"}
# The config.json of Llama 3.1.
LLAMA_3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LINEAR = RopeScaling(kind="linear", factor=2.0)
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)


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
        {"head_size": 10},
        {"qkv_biases": False},
        {"out_biases": False},
        {"mlp_biases": False},
        {"head_norms": True},
    ],
)
def test_parameters_with_each_switch(changes: dict[str, Any]) -> None:
    small = GptConfig(vocabulary=17, layers=2, width=24, heads=4, kv_heads=4, hidden=40, positions=9)
    config = replace(small, **changes)
    assert sum(parameter.numel() for parameter in Gpt(config, device="meta").parameters()) == config.parameters
    assert config.parameters != small.parameters


def test_flops_of_a_token() -> None:
    """Six flops for each element of a matrix, and in attention six for each feature, visible key and product."""
    config = gpt_config("llama-7b")
    matrices = config.parameters - config.vocabulary * config.width - 65 * config.width  # no embedding, no norms
    assert config.flops_per_token(4096) == 6 * matrices + 32 * 6 * 2 * 4096 * 4097 // 2
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        config.flops_per_token(0)


def test_published_files_of_hugging_face() -> None:
    assert config_of(OF_GPT2) == replace(gpt_config("gpt2"), dropout=0.1, attention_dropout=0.1)
    assert config_of(OF_LLAMA) == gpt_config("llama-70b")
    assert config_of(OF_LLAMA | {"rope_scaling": LLAMA_3}).rope_scaling == LLAMA3
    assert config_of(OF_LLAMA | {"rope_parameters": LLAMA_3 | {"rope_theta": 5e5}}).rope_base == 5e5
    assert config_of(OF_MISTRAL).window == 4096
    assert config_of({k: v for k, v in OF_MISTRAL.items() if k != "sliding_window"}).window == 4096
    assert config_of(OF_MISTRAL | {"sliding_window": None}).window is None
    assert config_of(OF_QWEN2 | {"sliding_window": 32768, "use_sliding_window": False}).window is None
    assert config_of(OF_QWEN2 | {"use_sliding_window": True, "max_window_layers": 70}).window_layers == (
        *range(70, 80),
    )
    scaled = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_of(OF_LLAMA | scaled).rope_base == config_of(OF_LLAMA | {"rope_theta": 5e5}).rope_base == 5e5


@pytest.mark.parametrize(
    "config",
    [
        replace(gpt_config("gpt2"), activation="gelu", tied=False, hidden=100, dropout=0.2, attention_dropout=0.3),
        replace(gpt_config("llama-1b"), rope_base=5e5, biases=True, tied=True, attention_dropout=0.1),
        replace(gpt_config("llama-1b"), qkv_biases=True, out_biases=True, head_size=100, rope_scaling=LINEAR),
        replace(gpt_config("llama-1b"), mlp_biases=True, rope_scaling=LLAMA3),
        replace(gpt_config("llama-1b"), window=100),
        replace(gpt_config("llama-1b"), window=100, window_layers=(3, 21), qkv_biases=True),
        replace(gpt_config("llama-1b"), qkv_biases=True),
        replace(gpt_config("llama-1b"), head_norms=True, qkv_biases=True, out_biases=True, window=7),
    ],
)
def test_there_and_back(config: GptConfig) -> None:
    """A config survives Hugging Face's JSON and back. The config's switches determine the kind of model."""
    assert config_of(json.loads(json.dumps(hugging_face_config(config)))) == config


def test_which_model_has_which_switches() -> None:
    llama = gpt_config("llama-1b")
    kinds = {
        "llama": [llama, replace(llama, biases=True), replace(llama, mlp_biases=True), replace(llama, head_size=70)],
        "mistral": [replace(llama, window=9)],
        "qwen2": [replace(llama, qkv_biases=True), replace(llama, window=9, window_layers=(1,))],
        "qwen3": [replace(llama, head_norms=True), replace(llama, head_norms=True, qkv_biases=True, out_biases=True)],
    }
    kinds["qwen2"][1] = replace(kinds["qwen2"][1], qkv_biases=True)
    for kind, configs in kinds.items():
        assert [hugging_face_kind(config) for config in configs] == [kind] * len(configs)
    for none in ({"head_norms": True, "mlp_biases": True}, {"out_biases": True}, {"window": 9, "out_biases": True}):
        with pytest.raises(ValueError, match="This config is none"):
            hugging_face_kind(replace(llama, **none))


def test_what_says_the_same_is_equal() -> None:
    llama = gpt_config("llama-1b")
    assert replace(llama, head_size=64, qkv_biases=False, out_biases=False, mlp_biases=False) == llama
    assert replace(llama, qkv_biases=True, out_biases=True, mlp_biases=True) == replace(llama, biases=True)
    assert replace(llama, biases=True, mlp_biases=False) == replace(llama, qkv_biases=True, out_biases=True)
    assert replace(llama, window=5, window_layers=()) == llama
    assert replace(llama, window=5, window_layers=tuple(reversed(range(22)))) == replace(llama, window=5)
    gpt = gpt_config("gpt2")
    assert replace(gpt, mlp_biases=False).biases  # GPT-2's norms have biases, too
    assert [replace(llama, window=5, window_layers=(3,)).window_of(layer) for layer in (2, 3)] == [None, 5]


@given(length=st.integers(1, 40), window=st.integers(1, 50), layers=st.integers(0, 22))
def test_flops_of_a_window(length: int, window: int, layers: int) -> None:
    """The flops agree with a count of single pairs."""
    llama = replace(gpt_config("llama-1b"), window=window, window_layers=tuple(range(layers)))
    none = replace(llama, window=None, window_layers=None)
    pairs = [sum(min(place, size) for place in range(1, length + 1)) for size in (window, length)]
    missing = 4 * 2048 * layers * (pairs[1] - pairs[0]) / length
    apart = none.flops_per_token(length, training=False) - llama.flops_per_token(length, training=False)
    assert abs(apart - missing) < 1


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (
            OF_GPT2,
            {"model_type": "bert"},
            "model_type 'bert': expected one of 'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3'",
        ),
        (OF_GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (OF_GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (OF_GPT2, {"activation_function": "relu"}, "activation_function is 'relu': expected gelu_new"),
        (OF_GPT2, {"embd_pdrop": 0.2}, "embd_pdrop is 0.2, resid_pdrop is 0.1"),
        (OF_GPT2, {"n_head": 7}, "7 heads do not divide a width of 768"),
        (OF_GPT2, {"n_embd": "768"}, "config.json of a gpt2"),
        (OF_LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        (OF_LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0"),
        (OF_LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is of rope_type 'yarn'.*scores"),
        (OF_LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters is of rope_type 'dynamic'.*long"),
        (
            OF_LLAMA,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (OF_LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (OF_LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each type of layer"),
        (OF_LLAMA, {"rope_scaling": LLAMA_3 | {"low_freq_factor": 4.0}}, "must be less than high_frequency_factor"),
        (OF_LLAMA, {"head_dim": 63}, "rope rotates pairs of features, but a head has 63 features"),
        (OF_MISTRAL, {"sliding_window": 0}, "window must be a positive int, got 0"),
        (
            OF_MISTRAL,
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types mixes",
        ),
        (OF_QWEN2, {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, r"layer_types is .*each of 2 layers"),
        (OF_QWEN2, {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "set no window"),
        (OF_QWEN2, {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "layer_types is"),
        (OF_LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            OF_LLAMA,
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config has the quant_method 'gptq'",
        ),
        (OF_LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected true or false"),
        (OF_LLAMA, {"rms_norm_eps": "1e-5"}, "epsilon must be a positive number, got '1e-5'"),
        (OF_LLAMA, {"rope_theta": None}, "rope_base must be a positive number, got None"),
        (OF_LLAMA, {"attention_dropout": "0"}, "attention_dropout must be a number of at least 0 .* got '0'"),
    ],
)
def test_variants_that_are_not_modelled(fields: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        config_of(fields | changes)


def test_a_size_that_is_not_there() -> None:
    with pytest.raises(WeightsError, match="has no hidden_size: the model cannot be built"):
        config_of({key: value for key, value in OF_LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a positive int, got 0"),
        ({"width": 768.0}, "width must be a positive int, got 768.0"),
        ({"head_size": 0}, "head_size must be a positive int, got 0"),
        ({"window": -1}, "window must be a positive int, got -1"),
        ({"window_layers": (1,)}, "together with a window, got"),
        ({"window": 3, "window_layers": (12,)}, "window_layers must be distinct indices of the 12 layers"),
        ({"window": 3, "window_layers": (1, 1)}, "must be distinct"),
        ({"rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rope_scaling is only for position='rope'"),
        ({"heads": 11}, "11 heads do not divide a width of 768"),
        ({"kv_heads": 5}, "5 kv_heads do not divide 12 heads"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"dropout": 1.0}, "dropout must be a number of at least 0 and less than 1, got 1.0"),
        ({"dropout": None}, "dropout must be a number of at least 0 and less than 1, got None"),
        ({"epsilon": 0.0}, "epsilon must be a positive number, got 0.0"),
        ({"epsilon": math.inf}, "epsilon must be a positive number, got inf"),
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
    with pytest.raises(ValueError, match="This config is none"):
        hugging_face_config(replace(gpt_config("gpt2"), norm="rms"))
    with pytest.raises(ValueError, match="This config is none"):
        hugging_face_kind(replace(gpt_config("llama-7b"), dropout=0.1))
