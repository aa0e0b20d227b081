"""The losses of a DETR and the decoding of its output: match predictions to objects, and convert boxes to pixels.

Carion et al. 2020, section 3.1. Each object of an image is matched to its own query, with the lowest total cost.
Unmatched queries learn to predict "no object". Each decoder layer has its own matches and losses.

    criterion = SetCriterion(model.num_classes)
    losses = criterion(model(images), targets)
    criterion.total(losses).backward()

A target is {"labels": int64 (n,), "boxes": (n, 4)} for one image; n may be 0. A box is (center x, center y, width,
height), as fractions of the image without its padding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rooftop.models.detr.assignment import assign_batched, assign_on_host
from rooftop.models.detr.network import Predictions

Target = Mapping[str, Tensor]
OUTSIDE = 1e-3  # an edge may lie outside by this share of the image's width or height: half precision rounds boxes


class PaddedTargets(NamedTuple):
    """The objects of B images, padded to M, the largest number of objects in an image.

    Attributes:
        labels: int64 (B, M), 0 in the padding.
        boxes: (B, M, 4); in the padding, a box is the whole image.
        valid: bool (B, M), True for an object, False in the padding.
        objects: the total number of objects, on the host.
    """

    labels: Tensor
    boxes: Tensor
    valid: Tensor
    objects: int


def pad_targets(targets: Sequence[Target], num_classes: int) -> PaddedTargets:
    """Combine the targets of all images into three tensors, without waiting for the GPU.

    Raises:
        TypeError: labels or boxes are not a tensor.
        ValueError: there are no images, or a shape or dtype is wrong.
        ValueError: a label is outside of 0..num_classes - 1, or a box has no area or is not completely inside the image
            (up to `OUTSIDE`). Labels and boxes on a GPU are checked only with ROOFTOP_CHECK=1 in the environment,
            because the check waits for the GPU.
    """
    if not targets:
        raise ValueError("got targets of zero images: a batch needs at least one")
    for image, target in enumerate(targets):
        _check_target(image, target, num_classes)
    labels = pad_sequence([target["labels"].long() for target in targets], batch_first=True, padding_value=-1)
    boxes = pad_sequence([target["boxes"] for target in targets], batch_first=True, padding_value=-1.0)
    valid = labels >= 0
    whole = (torch.arange(4, device=boxes.device) >= 2) * 0.5 + 0.5  # (0.5, 0.5, 1, 1)
    boxes = torch.where(valid[..., None], boxes, whole.to(boxes.dtype))
    return PaddedTargets(labels.clamp(min=0), boxes, valid, sum(len(target["labels"]) for target in targets))


def corners(boxes: Tensor) -> Tensor:
    """Convert boxes from (center x, center y, width, height) to (left, top, right, bottom), along the last axis."""
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat((center - size / 2, center + size / 2), dim=-1)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Generalized IoU (Rezatofighi et al. 2019): intersection / union - (hull - union) / hull, in -1..1.

    Args:
        a, b: boxes (..., 4) as (left, top, right, bottom), of broadcastable shapes. In each pair, at least one box
            must have an area above 0.

    Returns:
        The generalized IoU of each pair, (...).
    """
    area_a, area_b = (_area(x[..., 2:] - x[..., :2]) for x in (a, b))
    shared = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    shared = _area(shared.clamp(min=0))
    union = area_a + area_b - shared
    hull = _area(torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2]))
    return shared / union - (hull - union) / hull


def _area(sides: Tensor) -> Tensor:
    """Multiply width and height, the last axis of `sides` (..., 2). Backward of `prod` would wait for the GPU."""
    return sides[..., 0] * sides[..., 1]


@dataclass(frozen=True)
class Matcher:
    """Assigns each object of an image its own query, at the lowest total cost.

    The cost of a pair is -class_cost * probability + box_cost * L1 - giou_cost * generalized IoU. A pair with a
    non-finite cost (overflow in half precision) is assigned only if no assignment avoids it.

    Attributes:
        class_cost, box_cost, giou_cost: weights of the three terms of the cost.
        batched: match in PyTorch on the device, without a wait for the GPU. If False, match with scipy on the host
            (`models/detr/assignment.py`). Both methods find the same total cost.

    Raises:
        ValueError: all weights are 0.
    """

    class_cost: float = 1.0
    box_cost: float = 5.0
    giou_cost: float = 2.0
    batched: bool = False

    def __post_init__(self) -> None:
        if not (self.class_cost or self.box_cost or self.giou_cost):
            raise ValueError("class_cost, box_cost and giou_cost are all 0, expected one above 0")

    @torch.no_grad()
    def __call__(self, predictions: Predictions, targets: PaddedTargets) -> Tensor:
        """Return the index of the query that is matched with each object, int64 (B, M). It is -1 in the padding, or if
        no query is left because there are more objects than queries."""
        assign = assign_batched if self.batched else assign_on_host
        return assign(self.costs(predictions, targets), targets.valid)

    @torch.no_grad()
    def costs(self, predictions: Predictions, targets: PaddedTargets) -> Tensor:
        """The cost of each pair of object and query, (B, M, Q), in float32 or wider."""
        logits, boxes = _wide(predictions.logits), _wide(predictions.boxes)
        probability = logits.softmax(-1).transpose(1, 2)  # (B, K + 1, Q)
        labels = targets.labels[..., None].expand(-1, -1, boxes.shape[1])  # (B, M, Q)
        found, wanted = boxes[:, None], targets.boxes.to(boxes.dtype)[:, :, None]  # (B, 1, Q, 4), (B, M, 1, 4)
        distance = (found - wanted).abs().sum(-1)
        overlap = generalized_iou(corners(found), corners(wanted))
        return -self.class_cost * probability.gather(1, labels) + self.box_cost * distance - self.giou_cost * overlap


class SetCriterion(nn.Module):
    """The losses of a DETR: match each object with a query, then compare the pairs.

    Args:
        num_classes: number of classes K of the network.
        matcher: assigns a query to each object.
        no_object: weight of "no object" in the class loss; small, because most queries have no object.
        class_weight, box_weight, giou_weight: weights of the three losses in `total`.
    """

    class_weights: Tensor

    def __init__(
        self,
        num_classes: int,
        matcher: Matcher | None = None,
        no_object: float = 0.1,
        class_weight: float = 1.0,
        box_weight: float = 5.0,
        giou_weight: float = 2.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.matcher = matcher or Matcher()
        self.weights = {"loss_ce": class_weight, "loss_bbox": box_weight, "loss_giou": giou_weight}
        self.register_buffer("class_weights", torch.tensor([1.0] * num_classes + [no_object]), persistent=False)

    def forward(self, predictions: Predictions, targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute the losses of all decoder layers, as scalars in float32 or wider.

        Returns:
            loss_ce, loss_bbox (L1), loss_giou and cardinality_error (the error in the number of objects, without a
            gradient). The names for earlier decoder layers end in _0, _1, ... The box losses are divided by the number
            of objects in the batch, or by 1 if there are none. In training, the number of objects is averaged over the
            processes of torch.distributed.

        Raises:
            TypeError, ValueError: a target is invalid, or the number of images or classes does not match.
        """
        _check_predictions(predictions, targets, self.num_classes)
        padded = pad_targets(targets, self.num_classes)
        layers = (predictions, *predictions.auxiliary)
        matched = self._match(layers, padded)
        count = _mean_count(padded.objects, predictions.boxes.device) if self.training else max(1.0, padded.objects)
        losses: dict[str, Tensor] = {}
        for index, (layer, queries) in enumerate(zip(layers, matched, strict=True)):
            suffix = f"_{index - 1}" if index else ""
            losses |= {name + suffix: loss for name, loss in self._losses(layer, queries, padded, count).items()}
        return losses

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of all losses, of the last layer and of earlier layers. Losses without a weight do
        not count."""
        weights = {name: self.weights.get(name.rstrip("0123456789").rstrip("_")) for name in losses}
        return torch.stack([weight * losses[name] for name, weight in weights.items() if weight is not None]).sum()

    def _match(self, layers: Sequence[Predictions], targets: PaddedTargets) -> Sequence[Tensor]:
        """Match all layers at once, with at most one wait for the GPU; returns the queries (B, M) of each layer."""
        logits = torch.cat([layer.logits for layer in layers]).detach()  # (layers * B, Q, K + 1)
        boxes = torch.cat([layer.boxes for layer in layers]).detach()  # (layers * B, Q, 4)
        labels, wanted, valid = (torch.cat([part] * len(layers)) for part in targets[:3])
        many = PaddedTargets(labels, wanted, valid, targets.objects * len(layers))
        return self.matcher(Predictions(logits, boxes), many).chunk(len(layers))

    def _losses(
        self, predictions: Predictions, queries: Tensor, targets: PaddedTargets, count: Tensor | float
    ) -> dict[str, Tensor]:
        logits, boxes = _wide(predictions.logits), _wide(predictions.boxes)
        hit = queries >= 0  # (B, M)
        index = queries.clamp(min=0)
        # Objects without a query are written to an additional last column, which is then cut off.
        classes = torch.full_like(logits[:, :, 0], self.num_classes, dtype=torch.int64)  # (B, Q)
        classes = F.pad(classes, (0, 1)).scatter(1, torch.where(hit, queries, classes.shape[1]), targets.labels)[:, :-1]
        found = boxes.gather(1, index[..., None].expand(-1, -1, 4))  # (B, M, 4)
        wanted = targets.boxes.to(boxes.dtype)
        distance = (found - wanted).abs().sum(-1)
        loose = 1 - generalized_iou(corners(found), corners(wanted))
        with torch.no_grad():
            said = (logits.argmax(-1) != self.num_classes).sum(1)
            error = (said - targets.valid.sum(1)).abs().to(logits.dtype).sum() / max(1, len(said))
        return {
            "loss_ce": _weighted_cross_entropy(logits, classes, self.class_weights.to(logits.dtype)),
            "loss_bbox": torch.where(hit, distance, 0).sum() / count,
            "loss_giou": torch.where(hit, loose, 0).sum() / count,
            "cardinality_error": error,
        }


class Detections(NamedTuple):
    """The objects found on one image, in the order of the queries.

    Attributes:
        scores: (n,), probability of each label, 0..1.
        labels: int64 (n,), never "no object".
        boxes: (n, 4) as (left, top, right, bottom), in pixels of the image.
    """

    scores: Tensor
    labels: Tensor
    boxes: Tensor


@torch.no_grad()
def to_detections(
    predictions: Predictions, sizes: Sequence[tuple[int, int]] | Tensor, threshold: float = 0.0
) -> list[Detections]:
    """Convert predictions to boxes in pixels, each with its most probable label, for each image.

    Args:
        predictions: predictions for B images.
        sizes: (height, width) of each image without padding; boxes are returned in these pixels.
        threshold: only objects with at least this score are returned. With 0, one box per query is returned, and the
            host does not wait for the GPU.

    Raises:
        ValueError: the numbers of sizes and images differ, or a size is not positive.
    """
    found = [Detections(*each) for each in zip(*batch_of_detections(predictions, sizes), strict=True)]
    if threshold <= 0:
        return found
    return [Detections(*(part[each.scores >= threshold] for part in each)) for each in found]


@torch.no_grad()
def batch_of_detections(predictions: Predictions, sizes: Sequence[tuple[int, int]] | Tensor) -> Detections:
    """Convert the predictions of all images at once: scores and labels (B, Q), boxes (B, Q, 4); see `to_detections`."""
    logits, boxes = _wide(predictions.logits), _wide(predictions.boxes)
    pixels = torch.as_tensor(sizes)
    if pixels.shape != (len(logits), 2):
        raise ValueError(f"got sizes {tuple(pixels.shape)}, expected (height, width) for each of {len(logits)} images")
    if pixels.device.type == "cpu" and not (pixels > 0).all():
        raise ValueError(f"heights and widths must be positive, got {pixels.tolist()}")
    scale = pixels.to(boxes, non_blocking=True).flip(1).repeat(1, 2)  # (B, 4): width, height, width, height
    scores, labels = logits.softmax(-1)[..., :-1].max(-1)
    return Detections(scores, labels, corners(boxes) * scale[:, None])


def _wide(x: Tensor) -> Tensor:
    """Convert half precision to float32; other dtypes stay unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def _weighted_cross_entropy(logits: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of logits (B, Q, C), as in PyTorch, but 0 instead of NaN if all weights are 0."""
    total = F.cross_entropy(logits.transpose(1, 2), classes, weights, reduction="sum")
    weight = weights[classes].sum()
    return total / torch.where(weight == 0, 1.0, weight)


def _mean_count(count: int, device: torch.device) -> Tensor | float:
    """The number of objects per process, averaged over the processes; at least 1."""
    if not (dist.is_available() and dist.is_initialized()):
        return max(float(count), 1.0)
    everywhere = torch.full((), float(count), device=device)
    dist.all_reduce(everywhere)
    return (everywhere / dist.get_world_size()).clamp(min=1)


def _check_predictions(predictions: Predictions, targets: Sequence[Target], num_classes: int) -> None:
    if len(targets) != len(predictions.logits):
        raise ValueError(f"got targets for {len(targets)} images, but predictions for {len(predictions.logits)}")
    if predictions.logits.shape[-1] != num_classes + 1:
        raise ValueError(
            f"predictions have {predictions.logits.shape[-1]} classes, expected {num_classes + 1}: {num_classes} of "
            'the criterion, and one for "no object"'
        )


def _check_target(image: int, target: Target, num_classes: int) -> None:
    if lacking := {"labels", "boxes"} - target.keys():
        raise ValueError(f"target {image} has no {' and no '.join(sorted(lacking))}, only {', '.join(target)}")
    labels, boxes = target["labels"], target["boxes"]
    if not (isinstance(labels, Tensor) and isinstance(boxes, Tensor)):
        raise TypeError(
            f"target {image} has labels of type {type(labels).__name__} and boxes of type {type(boxes).__name__}: "
            "expected tensors"
        )
    if labels.dim() != 1 or boxes.shape != (len(labels), 4):
        raise ValueError(
            f"target {image} has labels {tuple(labels.shape)} and boxes {tuple(boxes.shape)}, expected (n,) and (n, 4)"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool or not boxes.is_floating_point():
        raise ValueError(
            f"target {image} has labels of {labels.dtype} and boxes of {boxes.dtype}: expected int64, float"
        )
    if labels.device.type != "cpu" and os.environ.get("ROOFTOP_CHECK") != "1":
        return
    if ((labels < 0) | (labels >= num_classes)).any():
        raise ValueError(f"target {image} has labels {labels.min()} to {labels.max()}, expected 0 to {num_classes - 1}")
    edges = corners(boxes)
    inside = (edges >= -OUTSIDE).all(1) & (edges <= 1 + OUTSIDE).all(1) & (boxes[:, 2:] > 0).all(1)
    if not inside.all():
        number = int((~inside).nonzero()[0])
        raise ValueError(
            f"box {number} of target {image} is {boxes[number].tolist()}: expected (center x, center y, width, "
            "height) of a box with area inside the image, as fractions of the image's width and height"
        )
