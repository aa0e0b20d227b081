"""Convert weights of a DETR from other libraries to the keys of `rooftop.models.detr.network`.

Known dialects, the naming schemes of libraries (`rooftop.models.weights.dialects.DETR`): facebookresearch/detr, whose
keys Rooftop uses; Hugging Face's `DetrForObjectDetection`, with the keys of transformers 4 and 5 and timm's or Hugging
Face's ResNet; MMDetection 2 and 3.

Hugging Face stores the weights of queries, keys and values in separate tensors; Rooftop packs them into one tensor.
Hugging Face's mask is 1 inside the image; Rooftop's mask is True in the padding. MMDetection numbers COCO's 80 classes
without gaps; facebookresearch and Hugging Face use COCO's own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rooftop.errors import WeightsError
from rooftop.models.weights.dialects import DETR, converted
from rooftop.models.weights.files import load_into, read_weights
from rooftop.user_paths import user_path

if TYPE_CHECKING:
    from rooftop.models.detr.network import Detr


def detr_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of any known dialect to the keys of `rooftop.models.detr.network.Detr`.

    Batch counters of norms are dropped, because a frozen norm has no counter.

    Raises:
        WeightsError: no known dialect has these keys, or the weights of queries, keys or values are missing.
    """
    return converted(tensors, DETR, "a DETR").tensors


def load_detr_weights(model: Detr, path: str | Path) -> None:
    """Load a file of any known dialect into a DETR; the file must have every key, with the right shape.

    Raises:
        WeightsError: the file cannot be read, is damaged, belongs to another model or has a different number of
            classes.
        MissingExtraError: the file is a .safetensors file, and safetensors is not installed.
    """
    path = user_path(path)
    tensors = read_weights(path)
    try:
        tensors = detr_state_dict(tensors)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    head = tensors.get("class_embed.bias")
    classes = model.num_classes if head is None else len(head) - 1
    if classes != model.num_classes:
        raise WeightsError(
            f"{path} has {classes} classes, the model {model.num_classes}: build it with num_classes={classes}"
        )
    load_into(model, tensors, path)
