"""Dialects: the keys that other libraries use for a model's weights, and the conversion to Rooftop's keys and tensors.

A dialect is recognized by one key, its sign, which no other dialect of the same family of models has. The dialect's
renames convert each key of the file to a key of Rooftop. If Rooftop packs tensors that the file stores separately, the
renamed key ends in the name of the part, as in `in_proj_weight[q]`. Parts are joined in the order q, k, v.

Sources of the names: torchvision 0.28, timm 1.0 (`swin_transformer.py`, `swin_transformer_v2.py`), transformers 4 and 5
(`modeling_detr.py`, `modeling_resnet.py`), facebookresearch/detr, MMDetection 2 (`detr_head.py`) and 3 (`detr.py`,
`detr_layers.py`, `detr_head.py`, `channel_mapper.py`), and `transformer.py` of mmcv, which both versions use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rooftop.errors import WeightsError

Rename = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern and its replacement, as for `re.sub`."""

PARTS = "qkv"


@dataclass(frozen=True)
class Dialect:
    """The keys of one library.

    Attributes:
        origin: the library.
        sign: the key by which the dialect is recognized.
        renames: the renames to Rooftop's keys, applied one after another.
        unneeded: a pattern of keys to ignore, because the model computes these tensors itself, or because the tensors
            do not affect the model's results. None: no keys are ignored.
        zero_parts: the parts (q, k or v) that this library omits because they are zero.
    """

    origin: str
    sign: str
    renames: tuple[Rename, ...] = ()
    unneeded: str | None = None
    zero_parts: str = ""


@dataclass(frozen=True)
class Converted:
    """The tensors of a file by Rooftop's keys.

    Attributes:
        origin: the file's library.
        tensors: the tensors by Rooftop's keys.
        sources: maps each of Rooftop's keys to the file's keys that form the tensor.
        left_out: maps each ignored key of the file to (the key after Rooftop's renaming, the tensor). The model
            computes such a tensor itself, or does not use it.
    """

    origin: str
    tensors: dict[str, Tensor]
    sources: dict[str, tuple[str, ...]]
    left_out: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)

    @property
    def unneeded(self) -> tuple[str, ...]:
        """The file's keys that are ignored because the model does not need them."""
        return tuple(self.left_out)


def converted(tensors: Mapping[str, Tensor], dialects: tuple[Dialect, ...], kind: str) -> Converted:
    """Convert the tensors of a file to Rooftop's keys.

    Args:
        tensors: tensors as in the file.
        dialects: dialects of this kind of model; their signs are tested in this order.
        kind: name of the kind of model in errors, e.g. "a DETR".

    Raises:
        WeightsError: no dialect has these keys, a part is missing or has another shape than the other parts, or one key
            has two tensors.
    """
    dialect = next((each for each in dialects if each.sign in tensors), None)
    if dialect is None:
        keys = f"{', '.join(list(tensors)[:3])}{', and so on' if len(tensors) > 3 else ''}" if tensors else "none"
        known = ", or ".join(f"{each.origin}'s, with {each.sign}" for each in dialects)
        raise WeightsError(f"no weights of {kind}: the keys are {keys}. Expected {known}")
    pieces: dict[str, dict[str, str]] = {}  # pieces[our key][part] is the file's key; part "" is the whole tensor
    left_out = {}
    for key in tensors:
        if dialect.unneeded and re.search(dialect.unneeded, key):
            left_out[key] = renamed(key, dialect), tensors[key]
            continue
        ours, _, part = renamed(key, dialect).rstrip("]").partition("[")
        found = pieces.setdefault(ours, {})
        if part in found or (found and "" in (part, *found)):
            raise WeightsError(f"{', '.join(found.values())} and {key} of the file both belong to {ours} of the model")
        found[part] = key
    return Converted(
        dialect.origin,
        {ours: _joined(ours, found, tensors, dialect.zero_parts) for ours, found in pieces.items()},
        {ours: tuple(found.values()) for ours, found in pieces.items()},
        left_out,
    )


def renamed(key: str, dialect: Dialect) -> str:
    """Convert a key of the file to Rooftop's key, which ends in [q], [k] or [v] if the tensor is only that part."""
    for pattern, replacement in dialect.renames:
        key = re.sub(pattern, replacement, key)
    return key


def _joined(ours: str, found: Mapping[str, str], tensors: Mapping[str, Tensor], zero_parts: str) -> Tensor:
    """Return the tensor for the key `ours`: the file's whole tensor, or q, k and v (n, ...) joined to (3 * n, ...)."""
    if "" in found:
        return tensors[found[""]]
    if lacking := [part for part in PARTS if part not in found and part not in zero_parts]:
        keys = ", ".join(found.values())
        raise WeightsError(f"{ours} is made of q, k and v: the file has {keys} but no {', '.join(lacking)}")
    shapes = {key: tuple(tensors[key].shape) for key in found.values()}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
        raise WeightsError(f"{ours} is made of q, k and v of one shape, but the file has {told}")
    zeros = torch.zeros_like(tensors[next(iter(found.values()))])
    return torch.cat([tensors[found[part]] if part in found else zeros for part in PARTS])


def _numbered(pattern: str, prefix: str, suffix: str = "", times: int = 1, plus: int = 0) -> Rename:
    """A rename that changes the number in a key to times * number + plus."""
    return pattern, lambda found: f"{prefix}{times * int(found[1]) + plus}{suffix}"


# Hugging Face's own ResNet numbers stages, blocks and layers from 0; torchvision numbers them from 1.
HUGGING_FACE_RESNET: tuple[Rename, ...] = (
    (r"\.embedder\.embedder\.convolution\.", ".conv1."),
    (r"\.embedder\.embedder\.normalization\.", ".bn1."),
    _numbered(r"\.encoder\.stages\.(\d+)\.layers\.", ".layer", ".", plus=1),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    _numbered(r"\.layer\.(\d+)\.convolution\.", ".conv", ".", plus=1),
    _numbered(r"\.layer\.(\d+)\.normalization\.", ".bn", ".", plus=1),
)

RESNET = (
    Dialect("torchvision or timm", "conv1.weight"),
    Dialect(
        "Hugging Face",
        "resnet.embedder.embedder.convolution.weight",
        (*HUGGING_FACE_RESNET, (r"^resnet\.", ""), (r"^classifier\.1\.", "fc.")),
    ),
)


def _swin(merging: int) -> tuple[Rename, ...]:
    """Rename a Swin Transformer's keys to torchvision's.

    torchvision numbers the patch embedding, the stages and the mergings in one sequence. Stage i has the number
    2 i + 1, and the merging before stage i has the number 2 i.

    Args:
        merging: torchvision's number for layers.0.downsample.
    """
    return (
        (r"^patch_embed\.proj\.", "features.0.0."),
        (r"^patch_embed\.norm\.", "features.0.2."),
        _numbered(r"^layers\.(\d+)\.blocks\.", "features.", ".", times=2, plus=1),
        _numbered(r"^layers\.(\d+)\.downsample\.", "features.", ".", times=2, plus=merging),
        (r"\.mlp\.fc1\.", ".mlp.0."),
        (r"\.mlp\.fc2\.", ".mlp.3."),
        (r"\.attn\.([qkv])_bias$", r".attn.qkv.bias[\1]"),
        (r"^head\.fc\.", "head."),
    )


# Tables to ignore in Microsoft's and timm's files, because Rooftop's model computes them itself. The files'
# `relative_position_index` has shape (N, N), and would not fit: Rooftop's and torchvision's have shape (N * N,). Swin
# V2's table of coordinates is not ignored, because only the shape of this table shows the window size.
SWIN_TABLES = r"\.(relative_position_index|attn_mask)$"

SWIN = (
    Dialect("torchvision", "features.0.0.weight"),
    # layers.0 ends with the patch merging before layers.1. In the other dialects, the first stage has no merging.
    Dialect("Microsoft", "layers.0.downsample.reduction.weight", _swin(merging=2), SWIN_TABLES, zero_parts="k"),
    # each stage but the first begins with the patch merging before it
    Dialect("timm", "patch_embed.proj.weight", _swin(merging=0), SWIN_TABLES, zero_parts="k"),
)

HYBRID = (Dialect("rooftop", "layer3.0.reduction.weight"),)

HUGGING_FACE_DETR: tuple[Rename, ...] = (
    (r"^class_labels_classifier\.", "class_embed."),
    (r"^bbox_predictor\.", "bbox_embed."),
    (r"^model\.query_position_embeddings\.", "query_embed."),
    (r"^model\.input_projection\.", "input_proj."),
    (r"^model\.backbone\.(conv_encoder\.)?model\.", "backbone.0.body."),  # transformers 4 has conv_encoder
    (r"^model\.(encoder|decoder)\.", r"transformer.\1."),
    (r"^transformer\.decoder\.layernorm\.", "transformer.decoder.norm."),
    (r"\.([qkv])_proj\.(weight|bias)$", r".in_proj_\2[\1]"),
    (r"\.o_proj\.", ".out_proj."),  # transformers 5 has o_proj, version 4 out_proj
    (r"\.(mlp\.)?fc([12])\.", r".linear\2."),  # transformers 5 has mlp
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"^(transformer\.encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(transformer\.decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
    (r"\.encoder_attn\.", ".multihead_attn."),
    *HUGGING_FACE_RESNET,  # for Hugging Face's own backbone; timm's backbone has torchvision's keys
)

MMDETECTION_3: tuple[Rename, ...] = (
    (r"^backbone\.", "backbone.0.body."),
    (r"^neck\.convs\.0\.conv\.", "input_proj."),
    (r"^query_embedding\.", "query_embed."),
    (r"^(encoder|decoder)\.", r"transformer.\1."),
    (r"^bbox_head\.fc_cls\.", "class_embed."),
    (r"^bbox_head\.reg_ffn\.layers\.0\.0\.", "bbox_embed.layers.0."),
    (r"^bbox_head\.reg_ffn\.layers\.1\.", "bbox_embed.layers.1."),
    (r"^bbox_head\.fc_reg\.", "bbox_embed.layers.2."),
    (r"\.self_attn\.attn\.", ".self_attn."),
    (r"\.cross_attn\.attn\.", ".multihead_attn."),
    (r"\.ffn\.layers\.0\.0\.", ".linear1."),
    (r"\.ffn\.layers\.1\.", ".linear2."),
    _numbered(r"\.norms\.(\d+)\.", ".norm", ".", plus=1),
    (r"\.post_norm\.", ".norm."),
)

# First rename to the names of MMDetection 3, then to Rooftop's. In (a|b), b is the name before MMDetection 2.12.
MMDETECTION_2: tuple[Rename, ...] = (
    (r"^bbox_head\.transformer\.", ""),
    (r"^bbox_head\.query_embedding\.", "query_embedding."),
    (r"^bbox_head\.input_proj\.", "neck.convs.0.conv."),
    (r"\.attentions\.0\.", ".self_attn."),
    (r"\.(attentions\.1|multihead_attn)\.", ".cross_attn."),
    (r"\.ffns\.0\.", ".ffn."),
    (r"^decoder\.norm\.", "decoder.post_norm."),
    *MMDETECTION_3,
)

COUNTS = r"\.num_batches_tracked$"  # a frozen norm has no such counter

DETR = (
    Dialect("facebookresearch", "query_embed.weight", (), COUNTS),
    Dialect("Hugging Face", "model.query_position_embeddings.weight", HUGGING_FACE_DETR, COUNTS),
    Dialect("MMDetection 3", "query_embedding.weight", MMDETECTION_3, COUNTS),
    Dialect("MMDetection 2", "bbox_head.query_embedding.weight", MMDETECTION_2, COUNTS),
)

NEXT_FRAME = (Dialect("rooftop", "layers.0.recurrent_kernel"),)
