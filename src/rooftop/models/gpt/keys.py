"""Map the parameters of a `Gpt` to Hugging Face's tensor names; recognize other tensors that a file may contain.

Hugging Face's tensors and Rooftop's tensors differ in packing and transposition. In Hugging Face, GPT-2's matrices are
(in, out). In Hugging Face, the weights of Llama's queries, keys and values are separate matrices, and so are gate and
up; Rooftop concatenates the rows of such matrices in one matrix. Rotary pairs are (i, i + D / 2) in both libraries, so
rows keep their order. A tied head needs no tensor of its own in a file.

The names come from transformers 4 and 5: `modeling_gpt2.py`, `modeling_llama.py` and `modeling_qwen3.py`. Mistral and
Qwen2 have Llama's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from rooftop.errors import WeightsError
from rooftop.models.gpt.blocks import rotary_frequencies
from rooftop.models.gpt.configs import hugging_face_config, hugging_face_kind
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.switches import GptConfig


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensors that form one tensor of Rooftop.

    Attributes:
        keys: the keys of these tensors; our tensor is their concatenation along the rows.
        rows: the number of rows of our tensor that each of these tensors forms.
        transposed: whether the Hugging Face tensors are (in, out), and so are transposed before the concatenation.
    """

    keys: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False


OUTSIDE = {
    "gpt2": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    "llama": {
        "embedding.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
}
"""Our names and Hugging Face's names of the modules outside the layers."""

LAYER: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    "llama": {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
}
"""Our names and Hugging Face's names of the modules within a layer."""

HEAD_NORMS = {"attention.query_norm": ("self_attn.q_norm",), "attention.key_norm": ("self_attn.k_norm",)}
"""Names of the additional modules in a layer whose queries and keys have norms."""

LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
"""The prefix of Hugging Face's keys before the number of a layer."""

HEAD = "lm_head.weight"
"""Hugging Face's name for the head's weight, even if it is tied."""

FOLLOWING = re.compile(r"\.attn\.bias$|\.attn\.masked_bias$|\.rotary_emb\.inv_freq$")
"""Keys of causal masks and rotary frequencies in older files; the config determines these tensors."""


def sources(config: GptConfig) -> dict[str, Source]:
    """Map each key of the whole model to its source.

    Raises:
        ValueError: no Hugging Face model supports this config.
    """
    kind = names_of(config)
    found = {}
    for ours, theirs in OUTSIDE[kind].items():
        rows = {"embedding.tokens": config.vocabulary, "embedding.positions": config.positions,
                "head.norm": config.width, "head.output": config.vocabulary}[ours]  # fmt: skip
        if ours == "head.output" and config.tied:
            theirs = OUTSIDE[kind]["embedding.tokens"]
        found[f"{ours}.weight"] = Source((f"{theirs}.weight",), (rows,))
        if ours == "head.norm" and kind == "gpt2":
            found[f"{ours}.bias"] = Source((f"{theirs}.bias",), (rows,))
    for layer in range(config.layers):
        for ours, names in (LAYER[kind] | (HEAD_NORMS if config.head_norms else {})).items():
            keys = [f"{LAYERS[kind]}.{layer}.{name}" for name in names]
            norm = ours.endswith("norm")
            rows_of_parts = _rows(ours, config) if len(names) > 1 else (sum(_rows(ours, config)),)
            for parameter in ("weight", "bias") if _has_bias(ours, config) else ("weight",):
                found[f"layers.{layer}.{ours}.{parameter}"] = Source(
                    tuple(f"{key}.{parameter}" for key in keys),
                    rows_of_parts,
                    transposed=kind == "gpt2" and parameter == "weight" and not norm,
                )
    return found


def names_of(config: GptConfig) -> Literal["gpt2", "llama"]:
    """The family, "gpt2" or "llama", whose tensor names a model of this config has.

    Raises:
        ValueError: no Hugging Face model supports this config.
    """
    return "gpt2" if hugging_face_kind(config) == "gpt2" else "llama"


def _has_bias(ours: str, config: GptConfig) -> bool:
    """Whether the module `ours` (its name within a layer) has a bias."""
    if ours.endswith("norm"):
        return config.norm == "layer" and config.biases
    if ours.startswith("mlp"):
        return config.has_mlp_biases
    return config.has_qkv_biases if ours == "attention.qkv" else config.has_out_bias


def _rows(ours: str, config: GptConfig) -> tuple[int, ...]:
    """The number of rows of each part of the module `ours` in a layer. For example, the parts of a packed module are
    queries, keys and values."""
    if ours == "attention.qkv":
        return config.query_width, config.kv_width, config.kv_width
    if ours.startswith("attention.") and ours.endswith("norm"):
        return (config.head_features,)
    if ours == "mlp.up":
        return (config.hidden,) * (2 if config.activation == "swiglu" else 1)
    return (config.width,)


# ---- the tensors of a file -----------------------------------------------------------------------------------------


class Tensors(Protocol):
    """Named tensors, in files or in memory."""

    def keys(self) -> Iterable[str]:
        """The names of all tensors."""

    def shape_and_kind(self, key: str) -> tuple[tuple[int, ...], bool]:
        """Shape of a tensor, and whether it is floating point with at least 16 bits."""

    def part(self, key: str, rows: tuple[int, int], columns: tuple[int, int] | None, transposed: bool) -> Tensor:
        """Return a range of rows and columns of a tensor, or of its transpose if `transposed` is set."""

    def whole(self, key: str) -> Tensor:
        """A whole tensor."""


@dataclass(frozen=True)
class InMemory:
    """A state dict as `Tensors`."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape_and_kind(self, key: str) -> tuple[tuple[int, ...], bool]:
        tensor = self.tensors[key]
        return tuple(tensor.shape), tensor.is_floating_point() and tensor.itemsize > 1

    def part(self, key: str, rows: tuple[int, int], columns: tuple[int, int] | None, transposed: bool) -> Tensor:
        whole = self.tensors[key].T if transposed else self.tensors[key]
        return whole[slice(*rows)] if columns is None else whole[slice(*rows), slice(*columns)]

    def whole(self, key: str) -> Tensor:
        return self.tensors[key]


@dataclass(frozen=True)
class Match:
    """The match of a file's keys with the model.

    Attributes:
        given: maps Hugging Face's name of each needed tensor to its key in the file.
        following: ignored keys of tensors that the config determines, such as causal masks.
        tied_head: the key of the head in the file, if the config ties the head to the embedding; None: the file has no
            such key.
    """

    given: dict[str, str]
    following: tuple[str, ...]
    tied_head: str | None


def matched(keys: Iterable[str], config: GptConfig) -> Match:
    """Match keys with the tensors that a model of this config needs.

    Keys may lack the prefix of a model with a head ("transformer.", "model."). A tied weight may have the key of the
    embedding, the key of the head, or both keys.

    Raises:
        WeightsError: keys are missing, unexpected or repeated.
        ValueError: no Hugging Face model supports this config.
    """
    wanted = {key for source in sources(config).values() for key in source.keys}
    prefix = LAYERS[names_of(config)].partition(".")[0] + "."
    found: dict[str, str] = {}
    unexpected, following, head = [], [], None
    for key in keys:
        name = key if key in wanted else f"{prefix}{key}"
        if name in found:
            raise WeightsError(f"{found[name]} and {key} both stand for {name}: expected one of them")
        if name in wanted:
            found[name] = key
        elif FOLLOWING.search(key):
            following.append(key)
        elif config.tied and key == HEAD:
            head = key
        else:
            unexpected.append(key)
    embedding = f"{OUTSIDE[names_of(config)]['embedding.tokens']}.weight"
    if head is not None and embedding not in found:
        found[embedding], head = head, None
    missing = sorted(wanted - set(found))
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}{', and so on' if len(names) > 3 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise WeightsError(f"the keys do not fit the config: {'; '.join(problems)}. Expected {_named(config)}")
    return Match(found, tuple(following), head)


def _named(config: GptConfig) -> str:
    kind = hugging_face_config(config)["architectures"][0]
    return f"a {kind} of {config.layers} layers, {'tied' if config.tied else 'with a separate head'}"


def shape_of_part(source: Source, part: int, ours: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one part in Hugging Face's layout; `ours` is the shape of Rooftop's whole tensor."""
    shape = (source.rows[part], *ours[1:])
    return shape[::-1] if source.transposed else shape


def shapes_of(config: GptConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of Rooftop's tensors in the whole model."""
    return {key: tuple(value.shape) for key, value in Gpt(config, device="meta").state_dict().items()}


def check_tensor(key: str, tensors: Tensors, expected: tuple[int, ...]) -> None:
    """Raise WeightsError if the tensor has a different shape or is quantized."""
    shape, floating = tensors.shape_and_kind(key)
    if shape != expected:
        raise WeightsError(f"{key} has shape {shape}, the config expects {expected}")
    if not floating:
        raise WeightsError(
            f"{key} holds integers or 8-bit floats: quantized weights are not supported; save them as float16, "
            "bfloat16, float32 or float64"
        )


# ---- ignored tensors -----------------------------------------------------------------------------------------------

ROWS_AT_ONCE = 4096
"""The number of rows that are compared at a time. For a width of 8,192, this many rows of bfloat16 take 67 MB."""


def with_own_head(config: GptConfig, tensors: Tensors) -> GptConfig:
    """Return the config; untied if the head differs from the embedding, because transformers loads such files untied.

    Raises:
        WeightsError: keys are missing, unexpected or repeated.
    """
    match = matched(tensors.keys(), config)
    if match.tied_head is None or _head_is_the_embedding(match, config, tensors):
        return config
    return replace(config, tied=False)


def check_tied_head(match: Match, config: GptConfig, tensors: Tensors) -> None:
    """Raise a WeightsError if a tied model would lose a head that differs from the embedding."""
    if match.tied_head is not None and not _head_is_the_embedding(match, config, tensors):
        raise WeightsError(
            f"{match.tied_head} differs from the embedding, but the config ties them, so one of them would be lost: "
            "build the model with tied=False (dataclasses.replace(config, tied=False)), or leave the wrong one out"
        )


def _head_is_the_embedding(match: Match, config: GptConfig, tensors: Tensors) -> bool:
    assert match.tied_head is not None
    embedding = match.given[f"{OUTSIDE[names_of(config)]['embedding.tokens']}.weight"]
    (shape, _), (other, _) = tensors.shape_and_kind(match.tied_head), tensors.shape_and_kind(embedding)
    if shape != other:
        return False
    pieces = ((start, min(start + ROWS_AT_ONCE, shape[0])) for start in range(0, shape[0], ROWS_AT_ONCE))
    return all(
        equal(tensors.part(match.tied_head, rows, None, False), tensors.part(embedding, rows, None, False))
        for rows in pieces
    )


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, even in different dtypes.

    For meta tensors: whether the shapes are equal.
    """
    if one.shape != other.shape:
        return False
    if one.is_meta or other.is_meta or one is other:
        return True
    wide = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(wide), other.to(one.device, wide))


def differing(match: Match, config: GptConfig, tensors: Tensors) -> list[str]:
    """List the ignored keys whose tensors differ from the values that the config determines, such as rotary
    frequencies."""
    return [key for key in match.following if not _follows(key, tensors.whole(key), config)]


def _follows(key: str, given: Tensor, config: GptConfig) -> bool:
    """Whether an ignored tensor has the values that the config determines, such as rotary frequencies."""
    if given.is_meta:
        return True
    if key.endswith("inv_freq"):
        expected = rotary_frequencies(config)
        # tolerance: casting a model to a narrow dtype also rounds its frequencies
        return given.shape == expected.shape and torch.allclose(given.float().cpu(), expected, rtol=4e-3, atol=0)
    # masked_bias is the score of masked pairs: a large negative number, rounded to the model's dtype
    if key.endswith("masked_bias"):
        return given.numel() == 1 and given.item() <= -9984
    return given.dim() >= 2 and torch.equal(given != 0, torch.ones_like(given, dtype=torch.bool).tril())
