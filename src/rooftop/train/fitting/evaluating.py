"""Validation: mean loss and metrics over the samples of all ranks. Each sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.parallel import World, others_wait
from rooftop.train.fitting.feeding import in_memory_format, loader_of
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.calls import batches_of, calling, judged_by, loss_of, metrics_of
from rooftop.train.tasks.task import Task
from rooftop.words import did_you_mean


class Evaluator:
    """Evaluates a model on the validation data of its task.

    Args:
        batch: batch size, summed over all ranks.
        autocast: makes the context manager of the model's precision.
        gathered: gathers a value from each rank, in the order of ranks; all ranks must call it.

    Attributes:
        loader: loader of the validation data.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        batch: int,
        world: World,
        autocast: Callable[[], AbstractContextManager[Any]],
        gathered: Callable[[Any], Sequence[Any]],
    ) -> None:
        assert task.valid is not None
        self.task, self.recipe, self.world = task, recipe, world
        self.autocast, self.gathered = autocast, gathered
        self.batch = min(batch, max(1, len(task.valid)))
        self.loader = loader_of(task.valid, self.batch, task, recipe, world, training=False)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and the metrics, the same on all ranks. The model stays in evaluation mode.

        Raises:
            InputError: the task's best metric is not among the metrics, or a function of the task returns a wrong type.
            ModelRunError: a function of the task raises.
        """
        self.task.model.eval()
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for loaded in batches_of("valid", self.loader.batches(0)):
            count = len(loaded.places)
            if count == 0:  # this rank has no sample: the last batch is small, or its samples are damaged
                continue
            with calling("prepare"):
                batch = loaded.value if self.task.prepare is None else self.task.prepare(loaded.value)
            if self.recipe.run.channels_last:
                batch = in_memory_format(batch, torch.channels_last)
            with self._whole_or_uncompiled(count), self.autocast():
                found = {"loss": loss_of(self.task, batch) * count}
                metrics = metrics_of(self.task, batch)
            for name, values in {**found, **metrics}.items():
                sums[name] = sums.get(name, 0) + values.double().sum()
                counts[name] = counts.get(name, 0) + (count if name == "loss" else values.numel())
        return self._checked({**self._means(sums, counts), **self._judged()})

    def _whole_or_uncompiled(self, count: int) -> AbstractContextManager[Any]:
        """Switch compilation off for batches smaller than usual, because each new batch size would compile the model
        again."""
        smaller = self.recipe.run.compile and count * self.world.size < self.batch
        return torch.compiler.set_stance("force_eager") if smaller else nullcontext()

    def _means(self, sums: dict[str, Tensor], counts: dict[str, int]) -> dict[str, float]:
        totals = torch.stack(list(sums.values())).tolist() if sums else []  # waits for the device
        own = {name: (total, counts[name]) for name, total in zip(sums, totals, strict=True)}
        means = {}
        ranks = self.gathered(own)
        for name in dict.fromkeys(name for each in ranks for name in each):
            there = [each[name] for each in ranks if name in each]
            means[name] = sum(total for total, _ in there) / max(1, sum(count for _, count in there))
        return means

    def _judged(self) -> dict[str, float]:
        if self.task.judge is None:
            return {}
        found: dict[str, float] = {}
        if self.world.rank == 0:
            with others_wait("evaluating"):
                found = judged_by(self.task, self.task.model, self.world.device)
        return self.gathered(found)[0]  # type: ignore[no-any-return]

    def _checked(self, values: dict[str, float]) -> dict[str, float]:
        if self.task.best not in values:
            raise InputError(
                f"the task's best metric is {self.task.best!r}, but the evaluation returned "
                f"{', '.join(values) or 'none'}{did_you_mean(self.task.best, values)}"
            )
        return values
