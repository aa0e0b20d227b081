"""The task `hybrid`: image classification with convolutions in early stages and attention in late stages.

rooftop train hybrid --data digits
rooftop train hybrid --data photographs/ --set model.name=hybrid_s
"""

from __future__ import annotations

from rooftop.doctor.extras import Extra
from rooftop.train.recipes import Recipe
from rooftop.train.tasks.classification import Family, classification, defaults_by_data, needed_packages
from rooftop.train.tasks.finding import Values
from rooftop.train.tasks.swin import FOLDERS, FOLDERS_ON_GPU
from rooftop.train.tasks.task import Task

FAMILY = Family(
    "hybrid_s",
    "hybrid_t",
    {"small_images": True, "window_size": (4, 4)},
    off={"stochastic_depth_prob": 0.0},
)

DIGITS: Values = {
    "run": {"epochs": 10, "batch": 64},
    "model": {"options": {"channels": 16, "depths": [2, 2, 2, 1], "num_heads": [2, 4]}},
    "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip": 5.0},
    "schedule": {"name": "cosine", "warmup": 0.1},
    "mix": {"label_smoothing": 0.1},
    "augment": {"size": 16, "shift": 0.125},
}


def defaults(data: str | None, cuda: bool) -> Values:
    """Return the recipe values that this task uses by default.

    For folders, the defaults are the same as for a Swin Transformer, because both models have attention layers.
    """
    return defaults_by_data(data, cuda, of_digits=DIGITS, of_folders=FOLDERS, of_folders_on_gpu=FOLDERS_ON_GPU)


def needs(data: str | None) -> list[Extra]:
    """The optional packages that the task needs."""
    return needed_packages(data)


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task; see `rooftop.train.tasks.classification` for `data` and errors."""
    return classification(data, recipe, FAMILY)
