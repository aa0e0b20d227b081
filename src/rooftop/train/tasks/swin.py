"""The task `swin`: image classification with a Swin Transformer.

rooftop train swin --data digits
rooftop train swin --data photographs/ --set model.name=swin_s
"""

from __future__ import annotations

from rooftop.train.recipes import Recipe
from rooftop.train.tasks.classification import Family, classification, needed_packages
from rooftop.train.tasks.task import Task

FAMILY = Family(
    usual="swin_t",
    small="swin_t",
    small_options={"patch_size": (2, 2), "window_size": (4, 4)},
    off={"stochastic_depth_prob": 0.0},
    digits={
        "run": {"epochs": 20, "batch": 64},
        "model": {"options": {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12]}},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip": 5.0},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "mix": {"label_smoothing": 0.1},
        "augment": {"size": 16, "shift": 0.125},
    },
    # The recipe of the paper; the paper's learning rate is 0.001 for a batch of 1024 images.
    folders={
        "run": {"epochs": 300, "batch": 64},
        "model": {"stochastic_depth": 0.2},
        "optimizer": {"name": "adamw", "lr": 6.25e-5, "weight_decay": 0.05, "clip": 5.0},
        "schedule": {"name": "cosine", "warmup": 0.07},
        "mix": {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0},
        "augment": {"crop": 0.08, "flip": 0.5, "rand_augment": 2, "erase": 0.25},
    },
    # without channels_last, because a Swin Transformer's feature maps are always channels last
    gpu={"run": {"precision": "bf16"}, "augment": {"rand_augment_on": "gpu"}},
    folders_on_gpu={"run": {"batch": 256}, "optimizer": {"lr": 2.5e-4}},
)

defaults, needs = FAMILY.defaults, needed_packages


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task; see `rooftop.train.tasks.classification` for `data` and errors."""
    return classification(data, recipe, FAMILY)
