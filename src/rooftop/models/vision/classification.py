"""Classify photographs: find the most probable classes with an image model.

model, preprocessing = load_classifier("resnet50")
for photo in classify(model, ["cat.jpg", "holiday/"], preprocessing=preprocessing):
    print(photo.path, photo.guesses[0].name, photo.guesses[0].probability)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor, nn

from rooftop.debugging import memory_error_as
from rooftop.errors import InputError, ModelRunError
from rooftop.media.ahead import usual_threads
from rooftop.models.images import (
    IMAGENET,
    Preprocessing,
    check_images,
    find_images,
    not_finite,
    prepared,
    preprocess,
)
from rooftop.models.registry import model_entry
from rooftop.models.weights.files import HEADS, load_into, options_of, preprocessing_of, read_weights, weights_file
from rooftop.models.weights.trained_files import trained_file
from rooftop.nn.modes import evaluating


@dataclass(frozen=True)
class Guess:
    """A class number, the class's name (None if the names are unknown) and its probability, 0..1."""

    index: int
    name: str | None
    probability: float


@dataclass(frozen=True)
class Classified:
    """A photograph's path and its classes, most probable first."""

    path: Path
    guesses: tuple[Guess, ...]


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The names of the 1000 classes of ImageNet-1k, in the order of the logits."""
    file = files("rooftop.models.vision").joinpath("imagenet_classes.txt")
    return tuple(file.read_text(encoding="utf-8").splitlines())


def load_classifier(name: str, weights: str | Path = "DEFAULT") -> tuple[nn.Module, Preprocessing]:
    """Load a built-in model with weights for inference, and its preprocessing.

    The weights determine the number of classes. A file that `rooftop train` wrote also contains the builder's options.

    Raises:
        TargetError: there is no such model.
        InputError: `weights` is neither a name nor a file, or is a file that `rooftop train` wrote for another model.
        WeightsError: the file cannot be fetched, is damaged, or was written by another program for another model.
    """
    entry = model_entry(name)
    path = weights_file(name, weights)
    trained = trained_file(path)
    if trained is not None and trained.model != name:
        raise InputError(f"{path} has weights of {trained.model}, got the model {name}: pass {trained.model}")
    tensors = read_weights(path)
    head = next((tensors[key] for key in HEADS if key in tensors), None)
    options = options_of(name, weights) | {"num_classes": 1000 if head is None or head.dim() != 1 else len(head)}
    model = entry.build(**options)
    load_into(model, tensors, path)
    return model.eval(), preprocessing_of(name, weights)


def classify(
    model: nn.Module,
    paths: Sequence[str | os.PathLike[str]],
    *,
    preprocessing: Preprocessing = IMAGENET,
    classes: Sequence[str] | None = None,
    top: int = 5,
    batch_size: int = 16,
    on_error: str = "raise",
    progress: Callable[[str, float], None] | None = None,
) -> list[Classified]:
    """Classify photographs and folders of photographs, in the order of `find_images`.

    Args:
        model: maps (B, 3, crop, crop) to logits (B, classes); runs on the device and in the dtype of its parameters.
        classes: class names in the order of the logits. None: ImageNet's names if there are 1000 logits, no names for
            other numbers.
        top: the maximum number of classes for each photograph.
        on_error: "raise" raises InputError if a photograph cannot be read; "skip" leaves it out with a warning.
        progress: called after each batch with (text that names the current activity, fraction of all photographs that
            are done).

    Raises:
        TypeError, ValueError: `top` or `batch_size` is not an int of 1 or more.
        InputError: a path does not exist, a file is not an image (and is not skipped), or the number of names differs
            from the number of logits.
        ModelRunError: the memory is too small for a batch, or the output is not finite or not logits (B, classes).
    """
    check_counts(top, batch_size)
    found = find_images(paths)
    if on_error == "raise":
        check_images(found)
    results: list[Classified] = []
    ahead = max(batch_size, 2 * usual_threads())  # photographs: prepare the next batch while the model computes
    photographs = prepared(found, lambda image: preprocess(image, preprocessing), ahead, on_error)
    done = 0
    while batch := list(itertools.islice(photographs, batch_size)):
        done = batch[-1][0] + 1
        called = [found[number] for number, _ in batch]
        guesses = guessed(model, torch.stack([image for _, image in batch]), called, classes, top, "photographs")
        results += map(Classified, called, guesses)
        if progress is not None:
            progress(f"classified {len(results)} of {len(found)}", done / len(found))
    if progress is not None and done < len(found):  # the last photographs cannot be read
        progress(f"classified {len(results)} of {len(found)}", 1.0)
    return results


def check_counts(top: int, batch_size: int) -> None:
    """Raise TypeError if `top` or `batch_size` is not an int, ValueError if one of them is below 1."""
    if not isinstance(top, Integral) or not isinstance(batch_size, Integral):
        raise TypeError(f"expected top and batch_size to be ints, got {top!r} and {batch_size!r}")
    if top < 1 or batch_size < 1:
        raise ValueError(f"expected top and batch_size of at least 1, got {top} and {batch_size}")


def guessed(
    model: nn.Module, images: Tensor, called: Sequence[object], classes: Sequence[str] | None, top: int, what: str
) -> list[tuple[Guess, ...]]:
    """Find the most probable classes of each image in a preprocessed batch (B, 3, H, W).

    Args:
        called: name of each image for error messages.
        classes, top: as in `classify`.
        what: a plural noun for the images, for error messages.

    Raises:
        InputError, ModelRunError: as in `classify`.
    """
    logits = _logits(model, images, what)  # (B, classes)
    if not (finite := logits.isfinite().all(1)).all():
        raise not_finite(called[finite.tolist().index(False)])
    names = class_names(classes, logits.shape[1])
    best = logits.softmax(1).topk(min(top, logits.shape[1]))
    return [
        tuple(Guess(i, names[i] if names else None, p) for i, p in zip(indices, probabilities, strict=True))
        for probabilities, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


@torch.inference_mode()
def _logits(model: nn.Module, images: Tensor, what: str) -> Tensor:
    """Run the model: (B, 3, H, W) -> logits (B, classes), float32 on the CPU."""
    like = next(model.parameters(), images)
    message = f"{len(images)} {what} at once do not fit into memory"
    with memory_error_as(lambda words: ModelRunError(f"{message} ({words}); use a smaller batch")):
        with evaluating(model):
            logits = model(images.to(like.device, like.dtype))
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(images):
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelRunError(f"the model gave {got} for {len(images)} {what}, expected logits (B, classes)")
        return logits.float().cpu()


def class_names(classes: Sequence[str] | None, count: int) -> Sequence[str] | None:
    """The names of `count` classes: the given names, ImageNet's names if their number matches, or None.

    Raises:
        InputError: the number of given names differs from `count`, or the names are one text.
    """
    if isinstance(classes, str):
        raise InputError(f"expected a list of the names of {count} classes, got the text {classes!r}")
    if classes is None:
        return imagenet_classes() if count == len(imagenet_classes()) else None
    if len(classes) != count:
        raise InputError(f"got {len(classes)} names of classes, but the model has {count} classes")
    return classes
