"""The task `hybrid`: image classification with convolutions in early stages and attention in late stages.

rooftop train hybrid --data digits
rooftop train hybrid --data photographs/ --set model.name=hybrid_s
"""

from __future__ import annotations

from rooftop.train.recipes import Recipe
from rooftop.train.tasks import swin
from rooftop.train.tasks.classification import GPU, Family, classification, needed_packages
from rooftop.train.tasks.task import Task

FAMILY = Family(
    usual="hybrid_s",
    small="hybrid_t",
    small_options={"small_images": True, "window_size": (4, 4)},
    off={"stochastic_depth_prob": 0.0},
    digits={
        "run": {"epochs": 10, "batch": 64},
        "model": {"options": {"channels": 16, "depths": [2, 2, 2, 1], "num_heads": [2, 4]}},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip": 5.0},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "mix": {"label_smoothing": 0.1},
        "augment": {"size": 16, "shift": 0.125},
    },
    gpu=GPU,
    # the same as for a Swin Transformer, because both models have attention layers
    folders=swin.FAMILY.folders,
    folders_on_gpu=swin.FAMILY.folders_on_gpu,
)

defaults, needs = FAMILY.defaults, needed_packages


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task; see `rooftop.train.tasks.classification` for `data` and errors."""
    return classification(data, recipe, FAMILY)
