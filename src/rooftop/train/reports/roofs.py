"""The roof of a training step: its minimum time on this machine, from ceilings (peak rates) that were measured earlier.

The flops and bytes of one step (loss, gradients, optimizer) are counted on fake tensors, without computation. Missing
ceilings are not measured here, because the measurement would slow down the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rooftop.analysis.predicting import predict
from rooftop.data.pieces import Made
from rooftop.data.samples import sample
from rooftop.errors import InputError
from rooftop.hardware.measuring import ceilings_history
from rooftop.train.fitting.records import Facts
from rooftop.train.fitting.stepping import AUTOCAST
from rooftop.train.recipes.recipe import Recipe

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "muon": torch.optim.AdamW,  # without Muon's own matrix products, a negligible part of the step
}
"""Stand-ins for the optimizers of a recipe, by name, to count the memory traffic of the optimizer step."""


@dataclass(frozen=True)
class TaskRoof:
    """The limits of this machine for one step of a rank.

    Attributes:
        fused_ms: the minimum time of the step if all operators were fused into one kernel.
        op_ms: the time of the step if every operator ran at its own roof.
        flops: flops of the step.
        samples: samples per step on this rank.
    """

    fused_ms: float
    op_ms: float
    flops: float
    samples: int

    def percent(self, samples_per_s: float) -> float:
        """The percentage of the fused roof that the rank reaches at this many samples per second."""
        return 100 * self.fused_ms / 1e3 * samples_per_s / self.samples


class _Step(nn.Module):
    """A module that computes the loss of a batch."""

    def __init__(self, model: nn.Module, task: Any, precision: str) -> None:
        super().__init__()
        self.model = model
        self._loss = task.loss
        self._dtype = AUTOCAST.get(precision)

    def forward(self, batch: Any) -> Tensor:
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, self._dtype, enabled=self._dtype is not None):
            loss: Tensor = self._loss(self.model, batch)
        return loss


def task_roof(task: Any, model: nn.Module, recipe: Recipe, facts: Facts) -> TaskRoof:
    """Compute the roof of a step of one rank.

    Raises:
        InputError: the ceilings were not measured yet, or the step's Python code needs the values of tensors, which
            fake tensors lack.
        Exception: any error of the task on fake tensors.
    """
    device = next(model.parameters()).device
    history = ceilings_history(device)
    if history is None:
        raise InputError("the ceilings of this machine are not measured yet: run rooftop ceilings once")
    passed = max(1, min(recipe.run.batch, facts.samples) // (facts.ranks * recipe.run.accumulate))
    samples = [sample(task.train, 0, recipe.run.seed, 0)] * passed
    batch = (task.collate_train or task.collate)(samples)
    if task.arrive is not None:
        places = np.arange(passed)
        batch = task.arrive(Made(batch, places, places), device, False).value
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    batch = batch if task.prepare is None else task.prepare(batch)
    step = _Step(model, task, recipe.run.precision).train()
    try:
        report = predict(
            step,
            batch,
            ceilings=history.ceilings(),
            train=True,
            loss=lambda loss: loss,
            optimizer=OPTIMIZERS[recipe.optimizer.name],
        )
    finally:
        step.eval()
    times = recipe.run.accumulate
    found = report.summary
    return TaskRoof(times * found.fused_roof_ms, times * found.op_roof_ms, times * found.flops, times * passed)
