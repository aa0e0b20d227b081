"""A stand-in for `fit` that reports to observers like a training, from formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

PER_EPOCH = 10
STEP_S = 0.5
"""Seconds of a step of the scripted training."""


def small_task(best: str = "accuracy") -> Task:
    """A task that trains a linear model on random numbers, with one example picture."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))

    def examples(model: nn.Module, device: torch.device) -> list[tuple[str, Image.Image]]:
        return [("a <square> & its class", Image.new("RGB", (8, 8), (200, 40, 40)))]

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Task(
        model=nn.Linear(6, 3),
        train=data,
        valid=data,
        loss=loss,
        best=best,
        maximize=best != "loss",
        examples=examples,
        metadata={"model": "resnet18"},
        unit="digits",
    )


def facts_of(task: Task, recipe: Recipe, before: int = 0) -> Facts:
    held_out = len(task.valid) if task.valid is not None else 0
    steps = int(recipe.run.epochs) * PER_EPOCH
    return Facts(21, 21, len(task.train), held_out, steps, PER_EPOCH, before, 1, "cpu", "in the loop")


def step_record(step: int, batch: int) -> StepRecord:
    """The loss falls; a quarter of each step waits for data."""
    return StepRecord(
        step=step,
        epoch=step / PER_EPOCH,
        loss=2 / step**0.5,
        grad_norm=1.0,
        learning_rate=0.1 * (1 + math.cos(math.pi * step / 1000)) / 2,
        samples_per_s=batch / STEP_S,
        waiting=0.25,
        peak_bytes=10**6 + step,
    )


def evaluation_record(epoch: int, values: dict[str, float] | None = None) -> EvaluationRecord:
    values = values or {"loss": 1 / epoch, "accuracy": 1 - 0.5**epoch}
    return EvaluationRecord(epoch * PER_EPOCH, float(epoch), values, best=True)


def scripted_fit(
    task: Task,
    recipe: Recipe,
    observers: Sequence[Observer],
    out: Path | None = None,
    values: dict[str, float] | None = None,
    before: int = 0,
    reason: str = "done",
) -> Fitted:
    """Send the observers the events of a training of `recipe.run.epochs` epochs. A step takes half a second, and the
    whole training takes 1.25 times as long as its steps."""
    facts = facts_of(task, recipe, before)
    for each in observers:
        each.began(facts, task)
    last = None
    for epoch in range(before // PER_EPOCH, int(recipe.run.epochs)):
        steps = [step_record(epoch * PER_EPOCH + place, recipe.run.batch) for place in range(1, PER_EPOCH + 1)]
        for each in observers:
            each.stepped(steps)
        if task.valid is not None:
            last = evaluation_record(epoch + 1, values)
            for each in observers:
                each.evaluated(last)
    steps_s = STEP_S * (facts.steps - before)
    fitted = Fitted(facts.steps, 1.25 * steps_s, reason, last, last, out)
    for each in observers:
        each.ended(fitted, task.model.eval())
    return fitted


@pytest.fixture
def scripted() -> SimpleNamespace:
    """The stand-in, and its events."""
    return SimpleNamespace(
        fit=scripted_fit,
        task=small_task,
        facts=facts_of,
        step=step_record,
        evaluation=evaluation_record,
        per_epoch=PER_EPOCH,
        step_s=STEP_S,
    )
