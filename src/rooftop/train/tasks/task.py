"""The task of `rooftop train`: a model, its loss, its data and its metrics.

# my_pkg/task.py: rooftop train my_pkg.task:build --data FOLDER
RECIPE = {"run": {"epochs": 5}, "optimizer": {"name": "adamw", "lr": 1e-3}}

def build(data: str | None, recipe: Recipe) -> Task:
    return Task(
        model=nn.Linear(10, 3),
        train=TensorDataset(x, y),
        valid=TensorDataset(x_held_out, y_held_out),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        best="accuracy",
        maximize=True,
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from rooftop.data.device_images import DecodingChoice
from rooftop.data.samples import Samples


@dataclass
class Task:
    """A model to train, with its loss, data and metrics.

    Attributes:
        model: the model, on the CPU in float32. The loop applies the recipe's section `model`, and moves the model to
            the device.
        train: the training data; `train[i]` is a sample. If the data have a method `draw(index, generator)`, the loader
            calls `draw` instead, with a `numpy.random.Generator` seeded by (seed, epoch, index). So augmentation is the
            same for any number of workers. For repeated copies (augment.repeats), the number of the copy is also part
            of the seed.
        loss: (model, batch on the device) -> mean loss over the samples, (). During training, the model is in training
            mode; during validation, the model is in evaluation mode, and gradients are off.
        valid: samples for evaluation; None: no evaluation.
        metrics: (model in evaluation mode, batch on the device) -> dict from name to values of the samples, (N,). The
            loop computes the mean over all samples. The name "loss" is reserved for the validation loss.
        judge: computes metrics of the whole validation data that are not means over samples, e.g. COCO's AP; called on
            rank 0.
        best: the metric that selects the best checkpoint; "loss" is the validation loss.
        maximize: whether a higher value of `best` is better.
        collate: makes a batch from a list of samples.
        collate_train: replaces `collate` for training samples, if training samples have a different type than
            validation samples.
        arrive: changes training batches before they are on the device, as in `rooftop.data.Loader`.
        prepare: the first change to each batch on the device, in training and evaluation, e.g. to normalize uint8
            images.
        alter: (batch, places, generator_of) -> batch: changes a training batch on the device, e.g. mixup. `places`,
            (N,) int64 on the CPU, holds each sample's position in the whole batch of the step. `generator_of(place)`
            returns a NumPy generator seeded by (seed, step, place). So the change does not depend on the number of
            ranks.
        settle: called with the model after the last step, before the last evaluation.
        examples: (model, device) -> (caption, picture) of each example picture for the page.
        metadata: metadata of exported weights, e.g. {"model": "resnet18", "classes": ...}.
        decoding: measures which device decodes the training images faster, for a recipe with augment.decode="auto".
        unit: word for samples in reports, in the plural, such as "images".
    """

    model: nn.Module
    train: Samples
    loss: Callable[[nn.Module, Any], Tensor]
    valid: Samples | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Tensor]] | None = None
    judge: Callable[[nn.Module, torch.device], Mapping[str, float]] | None = None
    best: str = "loss"
    maximize: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    collate_train: Callable[[list[Any]], Any] | None = None
    arrive: Callable[..., Any] | None = None
    prepare: Callable[[Any], Any] | None = None
    alter: Callable[..., Any] | None = None
    settle: Callable[[nn.Module], None] | None = None
    examples: Callable[[nn.Module, torch.device], list[tuple[str, Image.Image]]] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    decoding: Callable[[torch.device], DecodingChoice] | None = None
    unit: str = "samples"


Build = Callable[[str | None, Any], Task]
"""The type of `build(data, recipe)` in a task's module; `data` is the value of --data."""
