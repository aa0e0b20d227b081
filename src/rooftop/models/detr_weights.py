"""Weights of a DETR from its origins, with the keys of `rooftop.models.detr`.

Known dialects: facebookresearch/detr, whose keys are ours, and Hugging Face's `DetrForObjectDetection`, as transformers
4 and 5 name them, on timm's ResNet or their own. Hugging Face keeps queries, keys and values apart, where ours are
packed, and its mask is the inverse of ours: 1 for image there, True for padding here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rooftop.errors import WeightsError
from rooftop.models.weights import load_into, read_weights

if TYPE_CHECKING:
    from rooftop.models.detr import Detr

# In order: each pattern is replaced wherever it is found.
HUGGING_FACE = [
    (r"^class_labels_classifier\.", "class_embed."),
    (r"^bbox_predictor\.", "bbox_embed."),
    (r"^model\.query_position_embeddings\.", "query_embed."),
    (r"^model\.input_projection\.", "input_proj."),
    (r"^model\.backbone\.(conv_encoder\.)?model\.", "backbone.0.body."),  # with conv_encoder: version 4
    (r"^model\.(encoder|decoder)\.", r"transformer.\1."),
    (r"^transformer\.decoder\.layernorm\.", "transformer.decoder.norm."),
    (r"\.o_proj\.", ".out_proj."),  # version 5; version 4 says out_proj
    (r"\.(mlp\.)?fc([12])\.", r".linear\2."),  # with mlp: version 5
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"^(transformer\.encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(transformer\.decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
    (r"\.encoder_attn\.", ".multihead_attn."),
]
# Hugging Face's own ResNet; numbers count from 0 there and from 1 here.
RESNET = {"convolution": "conv", "normalization": "bn"}


def detr_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any known dialect under the keys of `rooftop.models.detr.Detr`.

    Counts of batches are left out: a frozen norm has none.

    Raises:
        WeightsError: keys of no known dialect, or queries, keys and values that are not there all three.
    """
    tensors = {key: value for key, value in tensors.items() if not key.endswith("num_batches_tracked")}
    if "class_embed.weight" in tensors:
        return tensors
    if "class_labels_classifier.weight" in tensors:
        return _packed({_renamed(key): value for key, value in tensors.items()})
    raise WeightsError(
        f"no weights of a DETR: the keys are {', '.join(list(tensors)[:3]) or 'none'}, and so on. Expected "
        "facebookresearch's, with class_embed.weight, or Hugging Face's, with class_labels_classifier.weight"
    )


def load_detr_weights(model: Detr, path: Path) -> None:
    """Load a file of any known dialect into a DETR; every key must be there, with its shape.

    Raises:
        WeightsError: the file cannot be read, is damaged, belongs to another model or has another number of classes.
    """
    if path.suffix.lower() == ".safetensors":
        raise WeightsError(
            f"{path}: safetensors files are not read; what you read of it: load_state_dict(detr_state_dict(tensors))"
        )
    try:
        tensors = detr_state_dict(read_weights(path))
    except WeightsError as error:
        raise error if str(path) in str(error) else WeightsError(f"{path}: {error}") from error
    classes = len(tensors["class_embed.weight"]) - 1
    if classes != model.num_classes:
        raise WeightsError(
            f"{path} has {classes} classes, the model {model.num_classes}: build it with num_classes={classes}"
        )
    load_into(model, tensors, path)


def _renamed(key: str) -> str:
    for pattern, replacement in HUGGING_FACE:
        key = re.sub(pattern, replacement, key)
    prefix, body, rest = key.partition("backbone.0.body.")
    return prefix + body + _resnet_key(rest) if body else key


def _resnet_key(key: str) -> str:
    """A key of Hugging Face's ResNet as torchvision has it; timm's are torchvision's."""
    if found := re.fullmatch(r"embedder\.embedder\.(convolution|normalization)\.(\w+)", key):
        return f"{RESNET[found[1]]}1.{found[2]}"
    if found := re.fullmatch(r"encoder\.stages\.(\d+)\.layers\.(\d+)\.(.*)\.(convolution|normalization)\.(\w+)", key):
        stage, block, part, kind, name = found.groups()
        if part == "shortcut":
            place = f"downsample.{list(RESNET).index(kind)}"
        else:
            place = f"{RESNET[kind]}{int(part.removeprefix('layer.')) + 1}"
        return f"layer{int(stage) + 1}.{block}.{place}.{name}"
    return key


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q_proj, k_proj and v_proj as one in_proj, in this order."""
    packed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        found = re.fullmatch(r"(.*)\.([qkv])_proj\.(weight|bias)", key)
        if not found:
            packed[key] = value
            continue
        place, _, name = found.groups()
        parts = {each: tensors.get(f"{place}.{each}_proj.{name}") for each in "qkv"}
        if lacking := [each for each, part in parts.items() if part is None]:
            raise WeightsError(f"{place} has {found[2]}_proj.{name} but no {', '.join(lacking)}_proj.{name}")
        packed[f"{place}.in_proj_{name}"] = torch.cat([part for part in parts.values() if part is not None])
    return packed
