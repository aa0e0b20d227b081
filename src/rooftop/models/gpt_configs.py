"""What a decoder-only transformer is made of: its sizes and switches, published ones by name, parameters and flops.

    config = gpt_config("llama-7b")
    config.parameters                    # 6738415616
    config.flops_per_token(4096)         # of a training step
    small = replace(config, layers=2)    # dataclasses.replace

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2); Touvron et al. 2023, "Llama 2: Open
Foundation and Fine-Tuned Chat Models"; Zhang et al. 2024, "TinyLlama: An Open-Source Small Language Model"; Zheng et
al. 2023, "CodeGeeX: A Pre-Trained Model for Code Generation with Multilingual Benchmarking on HumanEval-X".

`config_of` and `hugging_face_config` turn the `config.json` of Hugging Face's GPT-2 and Llama into a config and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.errors import TargetError, WeightsError, did_you_mean

CHOICES = {
    "norm": ("layer", "rms"),
    "position": ("learned", "rope"),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
}


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes and switches of a decoder.

    Attributes:
        vocabulary: tokens, V.
        layers: L.
        width: features of a position, W.
        heads: of the queries; they share W evenly.
        kv_heads: of keys and values; they divide `heads`. Fewer than those: grouped-query attention.
        hidden: features inside of the MLP.
        positions: the most that a sequence may have.
        norm: "layer" or "rms", before each sublayer and after the last one.
        position: "learned", a vector for each that is added to the token's; or "rope", rotary embeddings of queries and
            keys, in pairs (i, i + D / 2), without scaling.
        rope_base: of the angles, position / rope_base ** (2 i / D). Ignored where positions are learned.
        activation: of the MLP, "gelu", "gelu_tanh" or "swiglu", which has a gate beside what it lets through.
        biases: of linear layers and layer norms; an RMS norm and the head have none.
        tied: the head's weight is the embedding's.
        dropout: probability, of the embedding and of the result of each sublayer.
        attention_dropout: probability, of the weights of attention, which is then not the kernel but plain PyTorch.
        epsilon: of the norms.

    Raises:
        ValueError: a size that is not a positive int, heads that do not fit, a probability that is none, or a switch
            that there is not.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    positions: int
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rope"] = "learned"
    rope_base: float = 1e4
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    biases: bool = True
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden", "positions"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"GptConfig: {name} must be a positive int, got {size!r}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"GptConfig: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                    f"{did_you_mean(getattr(self, name), known)}"
                )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"GptConfig: {name} must be at least 0 and less than 1, got {getattr(self, name)}")
        for name in ("rope_base", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"GptConfig: {name} must be positive, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"GptConfig: {self.heads} heads do not divide a width of {self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(f"GptConfig: {self.kv_heads} kv_heads do not divide {self.heads} heads")
        if self.position == "rope" and self.head_features % 2:
            raise ValueError(f"GptConfig: rope turns pairs, but a head has {self.head_features} features")

    @property
    def head_features(self) -> int:
        """Features of a head, D."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Features of the keys of a position, and of its values."""
        return self.kv_heads * self.head_features

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of a layer: what each of its tokens is multiplied by."""
        attention = self.width * (2 * self.width + 2 * self.kv_width)
        return attention + self.width * self.hidden * (3 if self.activation == "swiglu" else 2)

    @property
    def parameters(self) -> int:
        """Elements of all parameters; those of a tied head count once."""
        norm = self.width * (2 if self.norm == "layer" and self.biases else 1)
        up = self.hidden * (2 if self.activation == "swiglu" else 1)
        biases = 2 * self.width + 2 * self.kv_width + up + self.width if self.biases else 0
        embeddings = self.vocabulary * (1 if self.tied else 2)
        embeddings += self.positions if self.position == "learned" else 0
        return embeddings * self.width + self.layers * (self.layer_weights + biases + 2 * norm) + norm

    def flops_per_token(self, length: int, training: bool = True) -> int:
        """Of the matrix products of a sequence, divided by its tokens.

        Attention counts the pairs that a causal mask lets through, half of them: (length + 1) / 2 keys for a token. An
        embedding is looked up and counts nothing; recomputation is not counted.

        Args:
            length: tokens of the sequence.
            training: forward and backward, three times the forward pass; or forward only.

        Raises:
            ValueError: a length that is not positive.
        """
        if length < 1:
            raise ValueError(f"flops_per_token: length must be positive, got {length}")
        products = 2 * (self.layers * self.layer_weights + self.vocabulary * self.width)
        attention = self.layers * 2 * self.width * (length + 1)  # 2 flops, 2 products, W, (length + 1) / 2 keys
        return (products + attention) * (3 if training else 1)


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
    # The last of its 40 layers is a "top query layer", whose queries are learned vectors of the following position.
    # Here it is a layer like the others, which has the same matrices; those vectors (2048, 5120) are not there, and
    # its GELU, x sigmoid(1.702 x), is the tanh one. So sizes and speed are CodeGeeX's, its weights do not fit.
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
        TargetError: there is none of that name; the message has those that come close.
    """
    if name not in PRESETS:
        there_are = f"there are {', '.join(PRESETS)}"
        raise TargetError(f"{name!r} is no model of text{did_you_mean(name, PRESETS)}: {there_are}")
    return PRESETS[name]


# ---- Hugging Face --------------------------------------------------------------------------------------------------

GELUS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
"""Their names for an activation, the first of each as it is written."""


def config_of(given: Mapping[str, Any]) -> GptConfig:
    """The config of what a `config.json` of Hugging Face's GPT-2 or Llama holds, of transformers 4 or 5.

    Raises:
        WeightsError: another kind of model, a size that is not there, or a variant that is not modelled here, e.g.
            scaled rotary embeddings.
    """
    kinds = {"gpt2": _config_of_gpt2, "llama": _config_of_llama}
    kind = given.get("model_type")
    if kind not in kinds:
        raise WeightsError(f"config.json is of model_type {kind!r}: expected {' or '.join(map(repr, kinds))}")
    try:
        return kinds[kind](given)
    except KeyError as error:
        raise WeightsError(f"config.json of a {kind} has no {error.args[0]}: the model cannot be built") from error
    except (TypeError, ValueError) as error:
        raise WeightsError(f"config.json of a {kind}: {error}") from error


def _config_of_gpt2(given: Mapping[str, Any]) -> GptConfig:
    _refuse(given, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = given.get("activation_function", "gelu_new")
    if activation not in GELUS:
        raise ValueError(f"activation_function is {activation!r}: expected {', '.join(GELUS)}")
    dropout, embedding_dropout = given.get("resid_pdrop", 0.1), given.get("embd_pdrop", 0.1)
    if dropout != embedding_dropout:
        raise ValueError(f"embd_pdrop is {embedding_dropout}, resid_pdrop {dropout}: expected one probability for both")
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


def _config_of_llama(given: Mapping[str, Any]) -> GptConfig:
    heads, width = given["num_attention_heads"], given["hidden_size"]
    biases = given.get("attention_bias", False)
    _refuse(given, hidden_act="silu", mlp_bias=biases, head_dim=width // heads)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rotary embeddings are scaled or partial, {dict(rope)}: expected rope_type 'default'")
    return GptConfig(
        vocabulary=given["vocab_size"],
        layers=given["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        hidden=given["intermediate_size"],
        positions=given["max_position_embeddings"],
        norm="rms",
        position="rope",
        rope_base=rope.get("rope_theta", given.get("rope_theta", 1e4)),
        activation="swiglu",
        biases=biases,
        tied=given.get("tie_word_embeddings", False),
        attention_dropout=given.get("attention_dropout") or 0.0,
        epsilon=given.get("rms_norm_eps", 1e-6),
    )


def _refuse(given: Mapping[str, Any], **expected: Any) -> None:
    """Raises a ValueError unless what is given is as expected; what is not given, or null, is."""
    for name, value in expected.items():
        found = given.get(name)
        if found is not None and found != value:
            raise ValueError(f"{name} is {found!r}, which is not modelled here: expected {value!r}")


def hugging_face_kind(config: GptConfig) -> Literal["gpt2", "llama"]:
    """Which of Hugging Face's models has these switches.

    Raises:
        ValueError: neither.
    """
    if (config.norm, config.position, config.activation) == ("rms", "rope", "swiglu") and config.dropout == 0:
        return "llama"
    plain = config.activation != "swiglu" and config.biases and config.kv_heads == config.heads
    if (config.norm, config.position) == ("layer", "learned") and plain:
        return "gpt2"
    raise ValueError(
        "Hugging Face's Llama has norm 'rms', position 'rope', activation 'swiglu' and no dropout but that of "
        "attention; its GPT-2 norm 'layer', position 'learned', a GELU, biases and as many kv_heads as heads. "
        f"This is neither: {config}"
    )


def hugging_face_config(config: GptConfig) -> dict[str, Any]:
    """What their `config.json` holds for such a model; `transformers` 4 and 5 read it.

    Raises:
        ValueError: neither a GPT-2 nor a Llama.
    """
    if hugging_face_kind(config) == "gpt2":
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
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.positions,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "hidden_act": "silu",
        "attention_bias": config.biases,
        "mlp_bias": config.biases,
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.epsilon,
    }
