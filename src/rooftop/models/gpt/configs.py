"""Text decoders by name, and from Hugging Face's `config.json`.

    config = gpt_config("llama-7b")
    config.parameters                    # 6738415616
    config_of(json.loads(Path("Llama-2-7b-hf/config.json").read_text()))

`config_of` reads the `config.json` of GPT-2, Llama, Mistral, Qwen2 and Qwen3; `hugging_face_config` creates such a
`config.json`.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2); Touvron et al. 2023, "Llama 2: Open
Foundation and Fine-Tuned Chat Models"; Zhang et al. 2024, "TinyLlama: An Open-Source Small Language Model"; Zheng et
al. 2023, "CodeGeeX: A Pre-Trained Model for Code Generation with Multilingual Benchmarking on HumanEval-X".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.errors import TargetError, WeightsError
from rooftop.models.gpt.rope_scaling import hugging_face_rope, scaling_of
from rooftop.models.gpt.switches import GptConfig
from rooftop.words import did_you_mean


def _gpt2(layers: int, width: int, heads: int) -> GptConfig:
    return GptConfig(
        vocabulary=50257,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=4 * width,
        positions=1024,
    )


def _llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, positions: int) -> GptConfig:
    return GptConfig(
        vocabulary=32000,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        positions=positions,
        norm="rms",
        position="rope",
        activation="swiglu",
        biases=False,
        tied=False,
    )


PRESETS: dict[str, GptConfig] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-1b": _llama(22, 2048, 32, 4, 5632, 2048),  # TinyLlama
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 4096),  # Llama 2
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 4096),  # Llama 2
    # CodeGeeX's last layer, the "top query layer", computes its queries from a learned vector of the next position. The
    # table of these vectors is (2048, 5120). In this config the last layer is like the other 39 layers, without this
    # table. CodeGeeX's GELU, x sigmoid(1.702 x), is replaced by the tanh form. So this model has CodeGeeX's sizes and
    # speed, but cannot load CodeGeeX's weights.
    "codegeex-13b": GptConfig(
        vocabulary=52224,
        layers=40,
        width=5120,
        heads=40,
        kv_heads=40,
        hidden=20480,
        positions=2048,
    ),
}
"""Published models by name, without dropout."""


def gpt_config(name: str) -> GptConfig:
    """The config of a published model.

    Raises:
        TargetError: the name is unknown; the message suggests similar names.
    """
    if name not in PRESETS:
        there_are = f"there are {', '.join(PRESETS)}"
        raise TargetError(f"{name!r} is not a language model{did_you_mean(name, PRESETS)}: {there_are}")
    return PRESETS[name]


# ---- Hugging Face --------------------------------------------------------------------------------------------------

GELUS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
"""Hugging Face's names of activations, with ours. `hugging_face_config` writes the first name of an activation."""


def config_of(given: Mapping[str, Any]) -> GptConfig:
    """Read Hugging Face's `config.json` of a GPT-2, Llama, Mistral, Qwen2 or Qwen3.

    Args:
        given: the contents of the file, written by transformers 4 or 5.

    Raises:
        WeightsError: the model is of another kind or an unsupported variant, or the config lacks a required size. The
            message names the field and the reason.
    """
    kind = given.get("model_type")
    if kind not in ("gpt2", *LIKE_LLAMA):
        known = ", ".join(map(repr, ("gpt2", *LIKE_LLAMA)))
        raise WeightsError(f"config.json is of model_type {kind!r}: expected one of {known}")
    try:
        _refuse_quantized(given)
        _check_switches(given)
        return _config_of_gpt2(given) if kind == "gpt2" else _config_like_llama(given, LIKE_LLAMA[kind])
    except KeyError as error:
        raise WeightsError(
            f"config.json of a {kind} has no {error.args[0]}: the model cannot be built without it"
        ) from error
    except (TypeError, ValueError) as error:
        raise WeightsError(f"config.json of a {kind}: {error}") from error


def _config_of_gpt2(given: Mapping[str, Any]) -> GptConfig:
    _refuse(given, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = given.get("activation_function", "gelu_new")
    if activation not in GELUS:
        raise ValueError(f"activation_function is {activation!r}: expected {', '.join(GELUS)}")
    dropout, embedding_dropout = given.get("resid_pdrop", 0.1), given.get("embd_pdrop", 0.1)
    if dropout != embedding_dropout:
        raise ValueError(f"embd_pdrop is {embedding_dropout}, resid_pdrop is {dropout}: expected equal probabilities")
    return GptConfig(
        vocabulary=given["vocab_size"],
        layers=given["n_layer"],
        width=given["n_embd"],
        heads=given["n_head"],
        kv_heads=given["n_head"],
        hidden=given.get("n_inner") or 4 * given["n_embd"],
        positions=given["n_positions"],
        activation=GELUS[activation],
        tied=given.get("tie_word_embeddings", True),
        dropout=dropout,
        attention_dropout=given.get("attn_pdrop", 0.1),
        epsilon=given.get("layer_norm_epsilon", 1e-5),
    )


@dataclass(frozen=True)
class LikeLlama:
    """Properties of a Llama-like architecture, and its defaults for fields of config.json.

    Attributes:
        architecture: the class in transformers.
        kv_heads: number of key-value heads; None: the number of query heads.
        head_size: features of a head; None: the width divided by the number of heads.
        window: default attention window of the layers that have a window.
        biases: the linear layers that may have biases: "attention" (if attention_bias is set), "mlp" (if mlp_bias is
            set), or "qkv" (always).
        chooses_layers: whether layer_types, use_sliding_window and max_window_layers choose the layers with the window.
            False: all layers have the window.
        head_norms: whether queries and keys have norms.
    """

    architecture: str
    kv_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    biases: Literal["none", "qkv", "attention", "attention and mlp"] = "none"
    chooses_layers: bool = False
    head_norms: bool = False


LIKE_LLAMA = {
    "llama": LikeLlama("LlamaForCausalLM", biases="attention and mlp"),
    "mistral": LikeLlama("MistralForCausalLM", kv_heads=8, window=4096),
    "qwen2": LikeLlama("Qwen2ForCausalLM", kv_heads=32, window=4096, biases="qkv", chooses_layers=True),
    "qwen3": LikeLlama("Qwen3ForCausalLM", kv_heads=32, head_size=128, window=4096, biases="attention",
                       chooses_layers=True, head_norms=True),
}  # fmt: skip
"""Llama-like architectures by model_type. Source: the architectures' `configuration_*.py` and `modeling_*.py` in
transformers 5.
"""


def _config_like_llama(given: Mapping[str, Any], kind: LikeLlama) -> GptConfig:
    heads, layers = given["num_attention_heads"], given["num_hidden_layers"]
    _refuse(given, hidden_act="silu")
    attention = given.get("attention_bias", False) if "attention" in kind.biases else False
    base, scaling = scaling_of(given)
    window, window_layers = _window_of(given, kind, layers)
    return GptConfig(
        vocabulary=given["vocab_size"],
        layers=layers,
        width=given["hidden_size"],
        heads=heads,
        kv_heads=given.get("num_key_value_heads", kind.kv_heads) or heads,
        head_size=given.get("head_dim", kind.head_size),
        hidden=given["intermediate_size"],
        positions=given["max_position_embeddings"],
        norm="rms",
        position="rope",
        rope_base=base,
        rope_scaling=scaling,
        activation="swiglu",
        biases=False,
        qkv_biases=attention or kind.biases == "qkv",
        out_biases=attention,
        mlp_biases=given.get("mlp_bias", False) if "mlp" in kind.biases else False,
        head_norms=kind.head_norms,
        window=window,
        window_layers=window_layers,
        tied=given.get("tie_word_embeddings", False),
        attention_dropout=given.get("attention_dropout") or 0.0,
        epsilon=given.get("rms_norm_eps", 1e-6),
    )


FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's names for layers without and with an attention window."""


def _window_of(given: Mapping[str, Any], kind: LikeLlama, layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Read the attention window from Hugging Face's config. Return the window (None: no window), and the layers that
    use it (None: all layers)."""
    window, types = given.get("sliding_window", kind.window), given.get("layer_types")
    if kind.window is None:  # a Llama ignores sliding_window
        window = None
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, SLIDING}:
            raise ValueError(f"layer_types is {types!r}: expected {FULL!r} or {SLIDING!r} for each of {layers} layers")
        if not kind.chooses_layers and len(set(types)) > 1:
            raise ValueError(
                "layer_types mixes layers with and without a window, which this kind of model does not support"
            )
    if not kind.chooses_layers:
        return window, None
    if not given.get("use_sliding_window", False):
        window = None
    if types is None:
        first = given.get("max_window_layers", 28)
        types = [SLIDING if layer >= first else FULL for layer in range(layers)] if window is not None else []
    elif window is None and SLIDING in types:
        raise ValueError(f"layer_types has {SLIDING!r}, but use_sliding_window and sliding_window set no window")
    return window, None if window is None else tuple(layer for layer, each in enumerate(types) if each == SLIDING)


def _refuse(given: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError if a value in Hugging Face's config differs from the expected value. A missing or null value is
    accepted."""
    for name, value in expected.items():
        found = given.get(name)
        if found is not None and found != value:
            raise ValueError(f"{name} is {found!r}, which is not supported: expected {value!r}")


def _refuse_quantized(given: Mapping[str, Any]) -> None:
    """Raise ValueError if Hugging Face's config says that the weights are quantized."""
    for name in ("quantization_config", "compression_config"):
        settings = given.get(name)
        if settings:
            method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
            raise ValueError(
                f"{name} has the quant_method {method!r}, but quantized weights are not supported: give the folder of "
                "the same model in bfloat16, float16 or float32"
            )


SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


def _check_switches(given: Mapping[str, Any]) -> None:
    """Raise ValueError if a switch in Hugging Face's config is neither true nor false. A missing or null value is
    accepted."""
    for name in SWITCHES:
        if not isinstance(given.get(name) or False, bool):
            raise ValueError(f"{name} is {given[name]!r}: expected true or false")


def hugging_face_kind(config: GptConfig) -> str:
    """The model_type of a Hugging Face model that supports this config: "gpt2", or the first match in `LIKE_LLAMA`.

    Raises:
        ValueError: no Hugging Face model supports this config.
    """
    plain = config.activation != "swiglu" and config.biases and config.kv_heads == config.heads
    plain = plain and config.head_size is None and config.has_qkv_biases and config.has_out_bias
    plain = plain and config.has_mlp_biases and not config.head_norms and config.window is None
    if (config.norm, config.position) == ("layer", "learned") and plain:
        return "gpt2"
    if (config.norm, config.position, config.activation) == ("rms", "rope", "swiglu") and config.dropout == 0:
        found = [name for name, kind in LIKE_LLAMA.items() if _has_switches(config, kind)]
        if found:
            return found[0]
    raise ValueError(
        "Hugging Face's Llama has norm 'rms', position 'rope', activation 'swiglu' and no dropout except in "
        "attention. Its Mistral also has a window, its Qwen2 has biases of only queries, keys and values, and its "
        "Qwen3 has head_norms. GPT-2 has norm 'layer', position 'learned', a GELU, biases, and equal kv_heads and "
        f"heads. This config is none of these: {config}"
    )


def _has_switches(config: GptConfig, kind: LikeLlama) -> bool:
    qkv, out, mlp = config.has_qkv_biases, config.has_out_bias, config.has_mlp_biases
    biases = {
        "none": not (qkv or out or mlp),
        "qkv": qkv and not (out or mlp),
        "attention": qkv == out and not mlp,
        "attention and mlp": qkv == out,
    }[kind.biases]
    window = config.window is None or (
        kind.window is not None and (kind.chooses_layers or config.window_layers is None)
    )
    return biases and window and config.head_norms == kind.head_norms


def hugging_face_config(config: GptConfig) -> dict[str, Any]:
    """The `config.json` of a model for Hugging Face; `transformers` 4 and 5 read it.

    Raises:
        ValueError: no Hugging Face model supports this config.
    """
    name = hugging_face_kind(config)
    if name == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocabulary,
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_inner": config.hidden,
            "n_positions": config.positions,
            "activation_function": next(name for name, ours in GELUS.items() if ours == config.activation),
            "tie_word_embeddings": config.tied,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
            "layer_norm_epsilon": config.epsilon,
        }
    kind = LIKE_LLAMA[name]
    found = {
        "architectures": [kind.architecture],
        "model_type": name,
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_features,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.positions,
        **hugging_face_rope(config.rope_base, config.rope_scaling),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.epsilon,
    }
    if "attention" in kind.biases:
        found["attention_bias"] = config.has_qkv_biases
    if "mlp" in kind.biases:
        found["mlp_bias"] = config.has_mlp_biases
    if kind.window is not None:
        found["sliding_window"] = config.window
    if kind.chooses_layers:
        found["use_sliding_window"] = config.window is not None
        found["layer_types"] = [FULL if config.window_of(n) is None else SLIDING for n in range(config.layers)]
        found["max_window_layers"] = next((n for n in range(config.layers) if config.window_of(n)), config.layers)
    return found
