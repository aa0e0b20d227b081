"""A task of your own: a small network tells two spirals apart.

rooftop train examples/my_task.py:build --out spirals    # curves, checkpoints, --resume, --ablate
python examples/my_task.py                               # the same training from Python
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task

RECIPE = {"run": {"epochs": 30, "batch": 50}, "optimizer": {"name": "adamw", "lr": 0.01}}


def spirals(count: int, seed: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(seed)
    labels, radius = torch.arange(count) % 2, torch.rand(count, generator=chance)
    angle = 7 * radius + torch.pi * labels
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=chance), labels)


def build(data: str | None, recipe: Recipe) -> Task:
    return Task(
        model=nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        train=spirals(1000, seed=0),
        valid=spirals(200, seed=1),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        best="accuracy",
        maximize=True,
    )


if __name__ == "__main__":
    from rooftop.train.fitting import fit

    torch.manual_seed(0)
    recipe = Recipe.of(RECIPE)
    fitted = fit(build(None, recipe), recipe)
    assert fitted.best is not None
    print(f"{fitted.best.values['accuracy']:.1%} of other points after {fitted.steps} steps")
