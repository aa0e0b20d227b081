"""Photographs with boxes in COCO's format (Lin et al. 2014, "Microsoft COCO"), for training and evaluating a detector.

data = CocoDataset("val2017", "annotations/instances_val2017.json")
loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=as_lists)
for images, targets in loader: ...  # as Detr and SetCriterion expect them
print(average_precision(data, detections)["AP"])
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from rooftop.errors import InputError, MissingExtraError
from rooftop.models.detr.detection import resized
from rooftop.models.detr.losses import Detections
from rooftop.models.images import normalized, read_image
from rooftop.user_paths import user_path

Target = dict[str, Tensor]
FIGURES = (
    *("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large"),
    *("AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large"),
)


class CocoDataset(Dataset[tuple[Tensor, Target]]):
    """The photographs in a folder, with boxes from a JSON file in COCO's format.

    An item is (image, target). The image is (3, H, W) float32, normalized. The image's shorter side has `shorter`
    pixels, unless the longer side would then exceed `longer`. The target is {"labels": int64 (n,), "boxes": float32 (n,
    4)}. A box is (center x, center y, width, height), as fractions of the image's width and height. Crowd annotations
    are ignored, and so are boxes that cover no area of the photograph.

    Args:
        folder: folder of the photographs.
        annotations: the JSON file, or its content: "images" (id, file_name, height, width), "annotations" (image_id,
            category_id, bbox as left, top, width, height in pixels), "categories" (id, name).
        contiguous: whether labels are 0, 1, ... in the order of the category ids. If False, labels are the ids.
        shorter, longer: size of the shorter side, and the limit of the longer side, in pixels.
        normalize: whether images are normalized here. If False, images are (H, W, 3) uint8, which
            `rooftop.data.Normalizer` normalizes on the device.

    Attributes:
        names: the name of each label; "" for an id without a category.

    Raises:
        InputError: a file does not exist or is not JSON in COCO's format; the message names the file and the entry.
        ValueError: `shorter` or `longer` is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        annotations: str | os.PathLike[str] | Mapping[str, Any],
        *,
        contiguous: bool = False,
        shorter: int = 800,
        longer: int = 1333,
        normalize: bool = True,
    ) -> None:
        if min(shorter, longer) < 1:
            raise ValueError(f"CocoDataset: expected shorter and longer of at least 1, got {shorter} and {longer}")
        self.folder, self.shorter, self.longer, self.normalize = user_path(folder), shorter, longer, normalize
        if isinstance(annotations, Mapping):
            source: str | Path = "annotations"
            self.annotations = _checked(annotations, source)
        else:
            source = user_path(annotations)
            self.annotations = _read(source)
        images, categories = self.annotations["images"], self.annotations["categories"]
        self.images: list[Mapping[str, Any]] = sorted(images, key=lambda image: image["id"])
        ids = sorted(category["id"] for category in categories)
        if len(set(ids)) < len(ids) or len({image["id"] for image in images}) < len(images):
            raise InputError(f"{source}: two images or two categories have the same id")
        if not contiguous and ids and ids[0] < 0:
            raise InputError(f"{source}: category id {ids[0]} is below 0 and cannot be a label: pass contiguous=True")
        self.label_of = {each: label if contiguous else each for label, each in enumerate(ids)}
        name_of = {self.label_of[category["id"]]: str(category["name"]) for category in categories}
        self.names = tuple(name_of.get(label, "") for label in range(max(name_of, default=-1) + 1))
        self.boxes_of: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        known = {image["id"] for image in images}
        for place, each in enumerate(self.annotations["annotations"]):
            for key, expected in (("image_id", known), ("category_id", self.label_of)):
                if each[key] not in expected:
                    raise InputError(f"{source}: annotation {place} has {key} {each[key]}, which does not exist")
            self.boxes_of[each["image_id"]].append(each)

    def __len__(self) -> int:
        return len(self.images)

    def picture(self, index: int) -> Image.Image:
        """Read the whole photograph, as RGB.

        Raises:
            InputError: the photograph does not exist or is damaged.
        """
        return read_image(self.folder / self.images[index]["file_name"])

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        """Return the resized photograph, and the labels and boxes of its objects. Raise InputError if the photograph
        does not exist or is damaged."""
        described = self.images[index]
        photo = self.picture(index)
        width, height = photo.size
        labels, boxes = [], []
        for each in self.boxes_of[described["id"]]:
            left, top, right, bottom = _edges(each["bbox"], width, height)
            if not each.get("iscrowd") and right > left and bottom > top:
                labels.append(self.label_of[each["category_id"]])
                center = ((left + right) / 2 / width, (top + bottom) / 2 / height)
                boxes.append((*center, (right - left) / width, (bottom - top) / height))
        small = resized(photo, self.shorter, self.longer)
        image = normalized(small) if self.normalize else torch.from_numpy(np.array(small))
        return image, {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        }


def as_lists(batch: Sequence[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """Collate images and targets to lists, for `Detr` and `SetCriterion` (the `collate_fn` of a DataLoader)."""
    images, targets = zip(*batch, strict=True)
    return list(images), list(targets)


def average_precision(dataset: CocoDataset, detections: Sequence[Detections]) -> dict[str, float]:
    """Compute COCO's twelve metrics with pycocotools; a metric without objects is -1.

    Args:
        detections: the detections of each photograph, in the dataset's order. Boxes are in pixels of the photograph, as
            `to_detections` returns them for the sizes in the file.

    Returns:
        Average precision: "AP" (the mean over IoU 0.5 to 0.95, "mAP"), "AP50", "AP75", and for small, medium and large
            objects. Average recall: with 1, 10 and 100 detections per photograph, and by size.

    Raises:
        ValueError: the numbers of detections and photographs differ, or a detection has a label
            without a category.
        MissingExtraError: pycocotools is not installed.
    """
    if len(detections) != len(dataset):
        raise ValueError(f"got detections for {len(detections)} photographs, but the dataset has {len(dataset)}")
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise MissingExtraError('COCO\'s metrics need pycocotools: pip install "rooftop[detection]"') from error
    category_of = {label: each for each, label in dataset.label_of.items()}
    results = []
    for described, found in zip(dataset.images, detections, strict=True):
        for score, label, box in zip(*(part.tolist() for part in found), strict=True):
            if label not in category_of:
                raise ValueError(f"label {label} is not one of the dataset's {sorted(category_of)}")
            left, top, right, bottom = box
            bbox = [left, top, right - left, bottom - top]
            results.append(
                {"image_id": described["id"], "category_id": category_of[label], "bbox": bbox, "score": score}
            )
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        truth, nothing = COCO(), COCO()
        truth.dataset = {**dataset.annotations, "annotations": _judged(dataset.annotations["annotations"])}
        nothing.dataset = {**dataset.annotations, "annotations": []}
        truth.createIndex()
        nothing.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results) if results else nothing, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(FIGURES, map(float, evaluation.stats), strict=True))


def _judged(annotations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the entries "id", "iscrowd" and "area", which pycocotools needs, to annotations that lack them."""
    return [
        {"id": place, "iscrowd": 0, "area": each["bbox"][2] * each["bbox"][3], **each}
        for place, each in enumerate(annotations, 1)
    ]


def _edges(bbox: Sequence[float], width: int, height: int) -> tuple[float, float, float, float]:
    """Convert a box (left, top, width, height) to left, top, right and bottom, clipped to the photograph."""
    left, top, box_width, box_height = bbox
    right, bottom = left + box_width, top + box_height
    return max(left, 0), max(top, 0), min(right, width), min(bottom, height)


REQUIRED = {
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"image_id": int, "category_id": int, "bbox": list},
    "categories": {"id": int, "name": str},
}


def _read(path: Path) -> Mapping[str, Any]:
    """Read an annotation file in COCO's format, and check the fields that Rooftop uses, as `_checked` does."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    return _checked(found, path)


def _checked(found: Any, path: object) -> Mapping[str, Any]:
    """Check that an annotation file has all fields that Rooftop uses, with the right types. Return `found`, the file's
    content."""
    for part, fields in REQUIRED.items():
        rows = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(rows, list):
            raise InputError(f"{path} has no list {part!r}: expected annotations in COCO's format")
        for place, row in enumerate(rows):
            for field, kind in fields.items():
                given = row.get(field) if isinstance(row, Mapping) else row
                if not isinstance(given, kind) or isinstance(given, bool):
                    raise InputError(f"{path}: {part}[{place}] has {field} {given!r}, expected {kind.__name__}")
            bbox = row.get("bbox", (0, 0, 0, 0))
            if len(bbox) != 4 or not all(isinstance(side, int | float) for side in bbox):
                raise InputError(f"{path}: {part}[{place}] has bbox {bbox}, expected left, top, width, height")
    checked: Mapping[str, Any] = found
    return checked
