"""Convert weights of a DETR from other libraries to the keys of `rooftop.models.detr.network`.

Known dialects (`rooftop.models.weights.dialects.DETR`): facebookresearch/detr, whose keys are ours; Hugging Face's
`DetrForObjectDetection`, as transformers 4 and 5 name them, on timm's ResNet or their own; MMDetection 2 and 3.

Hugging Face stores queries, keys and values in separate tensors; ours are packed. Its mask is the inverse of ours:
there 1 means image, here True means padding. MMDetection numbers COCO's 80 classes without gaps; the others use COCO's
own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rooftop.errors import WeightsError
from rooftop.models.weights.dialects import DETR, converted
from rooftop.models.weights.files import load_into, read_weights

if TYPE_CHECKING:
    from rooftop.models.detr.network import Detr


def detr_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any known dialect under the keys of `rooftop.models.detr.network.Detr`.

    Batch counters are ignored: a frozen norm has none.

    Raises:
        WeightsError: no known dialect has these keys, or one of queries, keys and values is missing.
    """
    return converted(tensors, DETR, "a DETR").tensors


def load_detr_weights(model: Detr, path: Path) -> None:
    """Load a file of any known dialect into a DETR; every key must be there, with its shape.

    Raises:
        WeightsError: the file cannot be read, is damaged, belongs to another model or has another number of classes.
        MissingExtraError: a .safetensors file, and safetensors is not installed.
    """
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
