"""The task `detr`: detect objects in pictures with a DETR.

--data is one of

    shapes       eight pictures of coloured shapes to memorize: a test that network, losses and boxes fit together
    new-shapes   new pictures of shapes at each step, and separate pictures for evaluation; intended for a GPU
    a folder     in COCO's format: annotations/instances_train*.json and instances_val*.json, and folders of photographs
                 named like these files (train2017/, val2017/)
    a folder     with instances.json and photographs; a tenth of the photographs is held out

For shapes, the model is a small network with random initial weights; for a folder, a DETR on a ResNet-50. `judge`
returns COCO's metrics; the best checkpoint has the highest "AP".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rooftop.data.pixels import Normalizer
from rooftop.data.samples import Samples
from rooftop.doctor.extras import Extra
from rooftop.errors import InputError
from rooftop.models import CocoDataset, FoundObject, as_lists, average_precision, detr_resnet50, detr_resnet101
from rooftop.models.detr.detection import draw_objects
from rooftop.models.detr.losses import Detections, Matcher, SetCriterion, Target, corners, to_detections
from rooftop.models.detr.network import Detr
from rooftop.models.detr.small import detr_small
from rooftop.models.images import MEAN, STD
from rooftop.train.recipes import Recipe
from rooftop.train.tasks.finding import Values, over
from rooftop.train.tasks.generated import shapes
from rooftop.train.tasks.task import Task
from rooftop.user_paths import user_path
from rooftop.words import counted

BY_HEART, NEW = "shapes", "new-shapes"
SCIPY = Extra("detection", "scipy", "scipy", "matching objects")
COCO = Extra("detection", "pycocotools", "pycocotools", "COCO's metrics")
PICTURES = 8  # pictures to memorize
PASS = 12_800  # number of new pictures per epoch
JUDGED = 256  # number of new pictures that are held out
FIRST_SEED = 1 << 32  # first seed of the held-out pictures; training pictures have lower seeds
SIDE = 64  # side of a picture of shapes, in pixels
SHORTER, LONGER = 800, 1333  # size of a photograph's shorter side, and maximum size of its longer side, in pixels
HELD_OUT = 10  # if the folder has no instances_val, one in this many photographs is held out
SHOWN, SHOWN_SIDE, SURE = 8, 256, 0.5  # number of examples; their shorter side in pixels; minimum score of drawn boxes

BUILDERS = {build.__name__: build for build in (detr_small, detr_resnet50, detr_resnet101)}

SHAPES: Values = {
    "run": {"steps": 500, "batch": 8},
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 1e-4, "clip": 1.0},
    "schedule": {"name": "cosine", "warmup": 0.1},
    "evaluation": {"every": 100},
    "loading": {"how": "here"},
}
NEW_SHAPES: Values = {"run": {"steps": 6000, "batch": 128}, "schedule": {"warmup": 0.03}, "evaluation": {"every": 10}}
FOLDERS: Values = {
    "run": {"epochs": 300, "batch": 4},
    "model": {"dropout": 0.1},
    "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 1e-4, "clip": 0.1},
    "schedule": {"name": "wsd", "warmup": 0.01, "decay": 0.33, "least": 0.1},
    "augment": {"flip": 0.5},
    "evaluation": {"every": 5},
}
"""The recipe of Carion et al. 2020, except for the schedule: in the paper, the learning rate drops to a tenth after two
thirds of the epochs.
"""
GPU: Values = {"run": {"precision": "bf16"}}
FOLDERS_ON_GPU: Values = {"run": {"batch": 16}}


def defaults(data: str | None, cuda: bool) -> Values:
    """Return the recipe values that this task uses by default."""
    gpu = GPU if cuda else {}
    if data in (None, BY_HEART):
        return over(SHAPES, gpu)
    if data == NEW:
        return over(over(SHAPES, NEW_SHAPES), over(gpu, {"loading": {"how": "auto"}}))
    return over(over(FOLDERS, gpu), FOLDERS_ON_GPU if cuda else {})


def needs(data: str | None) -> list[Extra]:
    """The optional packages that the task needs."""
    return [SCIPY, COCO]


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task.

    Raises:
        InputError: the folder does not exist, the annotations are not in COCO's format, or the recipe does not fit the
            model or the data.
        MissingExtraError: scipy or pycocotools is needed and not installed.
    """
    generated = data in (None, BY_HEART, NEW)
    found = _shapes(data == NEW, recipe) if generated else _folder(user_path(str(data)), recipe)
    model, told = _model(recipe, found, generated)
    criterion = SetCriterion(model.num_classes, no_object=0.3 if generated else 0.1)
    return Task(
        model=model,
        train=found.train,
        valid=found.valid,
        loss=DetectionLoss(criterion),
        judge=partial(judged, found, recipe.evaluation.batch or recipe.run.batch),
        best="AP",
        maximize=True,
        collate=as_lists,
        prepare=partial(_normalized, Normalizer(MEAN, STD)),
        examples=partial(_examples, found),
        metadata=told,
        unit="pictures",
    )


def _normalized(
    normalizer: Normalizer, batch: tuple[Sequence[Tensor], Sequence[Target]]
) -> tuple[list[Tensor], Sequence[Target]]:
    """Normalize the uint8 images of a batch; other images are already normalized."""
    images, targets = batch
    return [image if image.is_floating_point() else normalizer.image(image) for image in images], targets


@dataclass(frozen=True)
class DetectionLoss:
    """The weighted sum of a DETR's losses for images (3, H, W) and their targets."""

    criterion: SetCriterion

    def __call__(self, model: nn.Module, batch: tuple[Sequence[Tensor], Sequence[Target]]) -> Tensor:
        images, targets = batch
        device = images[0].device
        # in training, the criterion communicates with the other ranks; in validation, a rank may have no batch
        criterion = self.criterion.to(device).train(model.training)
        criterion.matcher = Matcher(batched=device.type == "cuda")  # `batched` does not wait for the GPU
        one_size = all(image.shape == images[0].shape for image in images)
        predictions = model(torch.stack(list(images)) if one_size else list(images))
        return criterion.total(criterion(predictions, targets))


# ---- data ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pictures:
    """Pictures with boxes.

    Attributes:
        valid: held-out images and targets, as in a `CocoDataset`.
        names: names of the labels.
        sides: size of the shorter side, and the limit of the longer side, in pixels.
    """

    train: Samples
    valid: CocoDataset
    names: tuple[str, ...]
    sides: tuple[int, int]


class NewShapes:
    """Pictures of shapes as (image, target), like a `CocoDataset`; each epoch has new pictures."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self._drawn(index)

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        return self._drawn(int(generator.integers(FIRST_SEED)))

    def _drawn(self, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = shapes.draw(1, self.side, seed)
        mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
        target = {name: value.clone() for name, value in drawn.targets()[0].items()}
        return (drawn.images[0] - mean) / std, target


class DrawnShapes(CocoDataset):
    """A fixed set of pictures of shapes, kept in memory.

    Args:
        count, side: number of pictures, and side of a picture in pixels.
        seed: seed of all pictures; the same seed gives the same pictures.
    """

    def __init__(self, count: int, side: int, seed: int) -> None:
        drawn = shapes.draw(count, side, seed)
        pixels = (drawn.images * 255).round().byte()
        self.pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
        super().__init__(Path(), shapes.coco_annotations(drawn), shorter=side, longer=side)

    def picture(self, index: int) -> Image.Image:
        return self.pictures[index]


class MirroredPictures:
    """Training pictures of a `CocoDataset` (a COCO data set), each mirrored horizontally with a given probability."""

    def __init__(self, pictures: CocoDataset, probability: float) -> None:
        self.pictures, self.probability = pictures, probability

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.pictures[index]

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        image, target = self.pictures[index]
        if generator.random() >= self.probability:
            return image, target
        boxes = target["boxes"].clone()
        boxes[:, 0] = 1 - boxes[:, 0]
        return image.flip(2 if image.is_floating_point() else 1), {**target, "boxes": boxes}


def _shapes(new: bool, recipe: Recipe) -> _Pictures:
    side = recipe.augment.size or SIDE
    valid = DrawnShapes(JUDGED if new else PICTURES, side, FIRST_SEED if new else 0)
    train = NewShapes(PASS, side) if new else valid
    return _Pictures(train, valid, shapes.NAMES, (side, side))


def _folder(folder: Path, recipe: Recipe) -> _Pictures:
    if not folder.is_dir():
        raise InputError(f"--data {folder} is not a folder: expected shapes, new-shapes, or a folder in COCO's format")
    shorter = recipe.augment.size or SHORTER
    sides = shorter, round(shorter * LONGER / SHORTER)
    found = {part: sorted(folder.glob(f"annotations/instances_{part}*.json")) for part in ("train", "val")}
    if found["train"] and found["val"]:
        train, valid = (
            CocoDataset(
                _photographs(folder, found[part][-1]),
                found[part][-1],
                shorter=sides[0],
                longer=sides[1],
                normalize=part == "val",
            )
            for part in ("train", "val")
        )
    elif (folder / "instances.json").is_file():
        whole = CocoDataset(folder, folder / "instances.json", shorter=sides[0], longer=sides[1])
        train, valid = _parted(whole)
    else:
        raise InputError(
            f"{folder} has neither annotations/instances_train*.json and instances_val*.json nor instances.json: "
            "expected COCO's format"
        )
    return _Pictures(MirroredPictures(train, recipe.augment.flip), valid, train.names, sides)


def _photographs(folder: Path, annotations: Path) -> Path:
    """Find the folder of photographs that belongs to an annotation file, such as train2017/ for
    instances_train2017.json."""
    name = annotations.stem.removeprefix("instances_")
    places = [folder / name, folder / "images" / name, folder]
    return next(place for place in places if place.is_dir())


def _parted(whole: CocoDataset) -> tuple[CocoDataset, CocoDataset]:
    """Split photographs into training photographs and a held-out tenth, which is the same for all seeds of a recipe."""
    if len(whole) < 2:
        raise InputError(
            f"{whole.folder} has {counted(len(whole), 'photograph')}: expected at least 2, as one is held out"
        )
    order = np.random.default_rng(0).permutation(len(whole)).tolist()
    out = set(order[: max(1, len(whole) // HELD_OUT)])
    parts = copy.copy(whole), copy.copy(whole)
    for part, held in zip(parts, (False, True), strict=True):
        part.images = [each for number, each in enumerate(whole.images) if (number in out) == held]
        known = {each["id"] for each in part.images}
        boxes = [each for each in whole.annotations["annotations"] if each["image_id"] in known]
        part.normalize = held
        part.annotations = {**whole.annotations, "images": part.images, "annotations": boxes}
    return parts


# ---- the model -------------------------------------------------------------------------------------------------


def _model(recipe: Recipe, found: _Pictures, generated: bool) -> tuple[Detr, dict[str, Any]]:
    """Build the model, and the metadata of its exported weights."""
    name = recipe.model.name or ("detr_small" if generated else "detr_resnet50")
    if name not in BUILDERS:
        raise InputError(f"model.name is {name!r}: expected {', '.join(BUILDERS)}")
    classes = recipe.model.num_classes or len(found.names)
    if classes < len(found.names):
        raise InputError(f"model.num_classes is {classes}, but the data have labels up to {len(found.names) - 1}")
    options = {"dropout": 0.0, **recipe.model.options, "num_classes": classes}
    try:
        model = BUILDERS[name](**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be built with model.options {dict(recipe.model.options)}: {error}") from error
    names = [*found.names, *(f"class {number}" for number in range(len(found.names), classes))]
    return model, {"model": name, "options": options, "classes": names, "sides": list(found.sides)}


# ---- detected objects ------------------------------------------------------------------------------------------


def judged(found: _Pictures, batch: int, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Compute COCO's detection metrics on the held-out pictures. Metrics of an object size (small, medium, large)
    without any objects are left out."""
    figures = average_precision(found.valid, find(model, found.valid, range(len(found.valid)), batch, device))
    return {name: value for name, value in figures.items() if value >= 0 or name == "AP"}


@torch.inference_mode()
def find(
    model: nn.Module, pictures: CocoDataset, numbers: Sequence[int], batch: int, device: torch.device
) -> list[Detections]:
    """Detect objects in each picture with a network in evaluation mode. Boxes are on the CPU, in pixels of the file."""
    found: list[Detections] = []
    for start in range(0, len(numbers), batch):
        those = numbers[start : start + batch]
        images = [pictures[number][0].to(device) for number in those]
        sizes = [(int(pictures.images[n]["height"]), int(pictures.images[n]["width"])) for n in those]
        found += [Detections(*(part.cpu() for part in each)) for each in to_detections(model(images), sizes)]
    return found


def _examples(found: _Pictures, model: nn.Module, device: torch.device) -> list[tuple[str, Image.Image]]:
    """Draw some held-out pictures, with their true boxes on the left and the detected boxes on the right."""
    numbers = range(min(SHOWN, len(found.valid)))
    detections = find(model, found.valid, numbers, SHOWN, device)
    return [
        (f"{sum((each.scores >= SURE).tolist())} found, {len(found.valid[number][1]['labels'])} there",
         side_by_side(found.valid, number, each, found.names))
        for number, each in zip(numbers, detections, strict=True)
    ]  # fmt: skip


def side_by_side(pictures: CocoDataset, number: int, found: Detections, names: Sequence[str]) -> Image.Image:
    """Draw a picture twice: left with its true boxes, right with detected boxes of score `SURE` or more."""
    photo, target = pictures.picture(number), pictures[number][1]
    edges = torch.tensor([photo.width, photo.height] * 2)
    true = Detections(torch.ones(len(target["labels"])), target["labels"], corners(target["boxes"]) * edges)
    scale = SHOWN_SIDE / min(photo.size)
    size = (round(photo.width * scale), round(photo.height * scale))
    sheet = Image.new("RGB", (2 * size[0], size[1]))
    for place, each in enumerate((true, found)):
        rows = zip(each.scores.tolist(), each.labels.tolist(), (each.boxes * scale).tolist(), strict=True)
        objects = [
            FoundObject(label, names[label] if label < len(names) else None, score, (box[0], box[1], box[2], box[3]))
            for score, label, box in rows
            if score >= SURE
        ]
        sheet.paste(draw_objects(photo.resize(size), objects), (place * size[0], 0))
    return sheet
