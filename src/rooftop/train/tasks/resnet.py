"""The task `resnet`: image classification with a ResNet, ResNeXt or Wide ResNet.

rooftop train resnet --data digits
rooftop train resnet --data photographs/ --set model.name=resnet50
"""

from __future__ import annotations

from rooftop.train.recipes import Recipe
from rooftop.train.tasks.classification import GPU, Family, classification, needed_packages
from rooftop.train.tasks.task import Task

FAMILY = Family(
    usual="resnet50",
    small="resnet18",
    small_options={"small_images": True},
    off={},
    digits={
        "run": {"epochs": 20, "batch": 64},
        "model": {"options": {"channels": 16}},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "mix": {"label_smoothing": 0.1},
        "augment": {"size": 16, "shift": 0.125},
    },
    # After Goyal et al. 2017, whose learning rate is 0.1 for 256 images per batch. Different from the paper: a cosine
    # schedule, half the weight decay, label smoothing, and crops of at least a quarter of the image.
    folders={
        "run": {"epochs": 90, "batch": 64},
        "optimizer": {"name": "sgd", "lr": 0.025, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-5},
        "schedule": {"name": "cosine", "warmup": 0.05},
        "mix": {"label_smoothing": 0.1},
        "augment": {"crop": 0.25, "flip": 0.5},
    },
    gpu=GPU,
    folders_on_gpu={"run": {"batch": 256}, "optimizer": {"lr": 0.1}},
)

defaults, needs = FAMILY.defaults, needed_packages


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task; see `rooftop.train.tasks.classification` for `data` and errors."""
    return classification(data, recipe, FAMILY)
