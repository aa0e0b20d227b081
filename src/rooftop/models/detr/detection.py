"""Detect objects and their boxes in photographs with a DETR.

    model = load_detector("detr_resnet50", "detr-r50-e632da11.pth")
    for photo in detect(model, ["street.jpg", "holiday/"]):
        draw_objects(read_image(photo.path), photo.objects).save(f"{photo.path.stem}-objects.png")

Photographs are resized as in training on COCO: the shorter side to 800 pixels, or less if the longer side would exceed
1333.
"""

from __future__ import annotations

import colorsys
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rooftop.debugging import memory_error_as
from rooftop.errors import InputError, ModelRunError
from rooftop.media.pillow_resize import Resize
from rooftop.models.detr.losses import Detections, to_detections
from rooftop.models.detr.network import Detr
from rooftop.models.images import check_images, find_images, normalized, not_finite, prepared
from rooftop.models.loading import load, load_report
from rooftop.nn.modes import evaluating

HEAD = "class_embed.bias"


@dataclass(frozen=True)
class FoundObject:
    """A detected object.

    Attributes:
        label, name: number and name of the class; the name is None if the classes have no known names.
        score: probability of the class, 0..1.
        box: left, top, right, bottom in pixels of the photograph, within its edges.
    """

    label: int
    name: str | None
    score: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Detected:
    """A photograph's path, its size (width, height) in pixels, and its objects, best score first."""

    path: Path
    size: tuple[int, int]
    objects: tuple[FoundObject, ...]


@cache
def coco_classes() -> tuple[str, ...]:
    """The names of COCO's 91 classes by number; "" for the 11 unused numbers."""
    return tuple(files("rooftop.models.detr").joinpath("coco_classes.txt").read_text(encoding="utf-8").splitlines())


def load_detector(name: str, weights: str | Path) -> Detr:
    """Load a DETR for inference, with weights from any known source; the weights determine the number of classes.

    Args:
        name: "detr_resnet50", "detr_resnet101" or "detr_small".
        weights: as in `rooftop.models.load`.

    Raises:
        InputError: `name` is not a detector.
        TargetError, WeightsError: as `rooftop.models.load`.
    """
    report = load_report(name, weights)
    shapes = report.mismatched.get(HEAD)
    model = load(name, weights) if shapes is None else load(name, weights, num_classes=shapes[0][0] - 1)
    if not isinstance(model, Detr):
        raise InputError(f"{name} is not a detector: expected detr_resnet50, detr_resnet101 or detr_small")
    return model.eval()


def detect(
    model: Detr,
    paths: Sequence[str | os.PathLike[str]],
    *,
    threshold: float = 0.7,
    classes: Sequence[str] | None = None,
    shorter: int = 800,
    longer: int = 1333,
    batch_size: int = 4,
    on_error: str = "raise",
    progress: Callable[[str, float], None] | None = None,
) -> list[Detected]:
    """Detect the objects in photographs and folders of photographs, in the order of `find_images`.

    Args:
        model: runs on the device and in the dtype of its parameters.
        threshold: only objects with at least this score are returned.
        classes: names by label. None: COCO's names, if the model has 91 classes (with the unused numbers) or 80
            (without).
        shorter, longer: size of the shorter side of the model's input, and the limit of the longer side, in pixels.
        on_error: "raise" raises InputError if a photograph cannot be read; "skip" leaves it out with a warning.
        progress: called after each batch with (text that names the current activity, fraction of all photographs that
            are done).

    Raises:
        ValueError: the threshold is outside 0..1, or `batch_size`, `shorter` or `longer` is below 1.
        InputError: a path does not exist, or the number of names differs from the number of classes.
        InputError: a file is not an image, and `on_error` is "raise".
        ModelRunError: the memory is too small for a batch, or an output is not finite.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}, expected a score from 0 to 1")
    if min(batch_size, shorter, longer) < 1:
        raise ValueError(f"expected batch_size, shorter and longer of at least 1, got {batch_size, shorter, longer}")
    found = find_images(paths)
    if on_error == "raise":
        check_images(found)
    class_names(classes, model.class_embed.out_features - 1)  # raises before any work
    results: list[Detected] = []
    photographs = prepared(
        found, lambda photo: (photo.size, normalized(resized(photo, shorter, longer))), batch_size, on_error
    )
    done = 0
    while batch := list(itertools.islice(photographs, batch_size)):
        done = batch[-1][0] + 1
        called, sizes = [found[number] for number, _ in batch], [size for _, (size, _) in batch]
        objects = found_objects(model, [image for _, (_, image) in batch], sizes, called, threshold, classes)
        results += map(Detected, called, sizes, objects)
        if progress is not None:
            progress(f"searched {len(results)} of {len(found)}", done / len(found))
    if progress is not None and done < len(found):  # the last photographs cannot be read
        progress(f"searched {len(results)} of {len(found)}", 1.0)
    return results


def found_objects(
    model: Detr,
    inputs: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    called: Sequence[object],
    threshold: float,
    classes: Sequence[str] | None = None,
) -> list[tuple[FoundObject, ...]]:
    """Detect the objects in each photograph of a batch, best score first.

    Args:
        inputs: the images, (3, H, W) each, resized and normalized for the model.
        sizes: original (width, height) of each photograph; boxes are returned in these pixels.
        called: name of each image for error messages.
        threshold, classes: as in `detect`.

    Raises:
        InputError, ModelRunError: as in `detect`.
    """
    names = class_names(classes, model.class_embed.out_features - 1)
    detections = _run(model, inputs, [(height, width) for width, height in sizes], called)
    return [objects_of(each, size, threshold, names) for each, size in zip(detections, sizes, strict=True)]


def draw_objects(image: Image.Image, objects: Sequence[FoundObject]) -> Image.Image:
    """Draw a box and a caption for each object, one colour per class; better scores are drawn on top."""
    drawn = image.convert("RGB")
    draw = ImageDraw.Draw(drawn)
    line = max(2, round(min(drawn.size) / 250))
    font = ImageFont.load_default(size=max(12, min(drawn.size) / 35))
    for each in reversed(objects):
        colour = _colour(each.label)
        draw.rectangle(each.box, outline=colour, width=line)
        caption = f"{each.name or f'class {each.label}'} {each.score:.0%}"
        left, top, right, bottom = draw.textbbox((0, 0), caption, font=font)
        width, height = right - left + 2 * line, bottom - top + 2 * line
        x = min(max(0, each.box[0]), max(0, drawn.width - width))
        y = each.box[1] - height if each.box[1] >= height else each.box[1]
        draw.rectangle((x, y, x + width, y + height), fill=colour)
        draw.text((x + line - left, y + line - top), caption, fill="black", font=font)
    return drawn


def _colour(label: int) -> tuple[int, int, int]:
    """A light colour for a label. From one label to the next, the hue moves by 0.618 of the colour circle, so that the
    colours of few labels differ clearly.
    """
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.55, 1.0))  # type: ignore[return-value]


def resized(image: Image.Image, shorter: int, longer: int) -> Image.Image:
    """Resize the shorter side to `shorter` pixels, or to less if the longer side would exceed `longer`."""
    return resizing(*image.size, shorter, longer).by_pillow(image)


def resizing(width: int, height: int, shorter: int, longer: int) -> Resize:
    """The resize of a photograph of this size, as in `resized`."""
    scale = min(shorter / min(width, height), longer / max(width, height))
    return Resize((max(1, round(width * scale)), max(1, round(height * scale))))


@torch.inference_mode()
def _run(
    model: Detr, inputs: Sequence[Tensor], sizes: list[tuple[int, int]], batch: Sequence[object]
) -> list[Detections]:
    """Run the model on a batch; returns the boxes of all queries on the CPU."""
    like = next(model.parameters())
    message = f"{len(inputs)} photographs at once do not fit into memory"
    with (
        memory_error_as(lambda words: ModelRunError(f"{message} ({words}); use a smaller batch")),
        evaluating(model),
    ):
        predictions = model([image.to(like.device, like.dtype) for image in inputs])
    finite = predictions.logits.isfinite().flatten(1).all(1) & predictions.boxes.isfinite().flatten(1).all(1)
    if not finite.all():
        raise not_finite(batch[finite.tolist().index(False)])
    return [Detections(*(part.cpu() for part in each)) for each in to_detections(predictions, sizes)]


def objects_of(
    detections: Detections, size: tuple[int, int], threshold: float, names: Sequence[str] | None
) -> tuple[FoundObject, ...]:
    """Select the objects of a photograph whose score is at least the threshold, best score first.

    Args:
        detections: detections on the CPU.
        names: names of classes by label, or None.
    """
    edges = torch.tensor((*size, *size), dtype=detections.boxes.dtype)
    scores, labels, boxes = best_first(detections, edges)
    count = int((scores >= threshold).sum())
    return tuple(
        FoundObject(label, (names[label] or None) if names else None, score, (left, top, right, bottom))
        for label, score, (left, top, right, bottom) in zip(
            labels[:count].tolist(), scores[:count].tolist(), boxes[:count].tolist(), strict=True
        )
    )


def best_first(detections: Detections, edges: Tensor) -> Detections:
    """Sort detections by descending score, and clip their boxes to the photograph.

    Args:
        detections: (..., Q), boxes (..., Q, 4).
        edges: (width, height, width, height) of each photograph, (..., 1, 4), or (4,) for all.
    """
    order = detections.scores.argsort(dim=-1, descending=True, stable=True)
    boxes = detections.boxes.clamp(min=0).minimum(edges)
    return Detections(
        detections.scores.gather(-1, order),
        detections.labels.gather(-1, order),
        boxes.gather(-2, order.unsqueeze(-1).expand_as(boxes)),
    )


def class_names(classes: Sequence[str] | None, count: int) -> Sequence[str] | None:
    """The names of `count` classes: the given names, COCO's names if their number matches, or None.

    Raises:
        InputError: the number of given names differs from `count`.
    """
    if classes is None:
        used = tuple(filter(None, coco_classes()))
        return next((names for names in (coco_classes(), used) if len(names) == count), None)
    if len(classes) != count:
        raise InputError(f"got {len(classes)} names of classes, but the model has {count} classes")
    return classes
