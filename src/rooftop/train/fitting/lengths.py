"""The length of a training: steps per epoch and in total, and the steps after which it is evaluated and saved."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.errors import InputError
from rooftop.train.recipes.recipe import Recipe


@dataclass(frozen=True)
class Lengths:
    """Steps of a run; steps count from 1.

    Attributes:
        batch: samples of a step, over all ranks: as in the recipe, or all samples if there are fewer.
        parts: forward and backward passes of a step.
        per_epoch: steps per epoch; samples that do not fill a last batch are left out.
        steps: number of steps of the run.
        between_evaluations, between_saves: steps.
    """

    batch: int
    parts: int
    per_epoch: int
    steps: int
    between_evaluations: int
    between_saves: int

    @classmethod
    def of(cls, recipe: Recipe, samples: int, ranks: int, save_every: int | None = None) -> Lengths:
        """Lengths of a training on a number of samples.

        Raises:
            InputError: there are no samples for each rank, or a batch cannot be split evenly.
        """
        run = recipe.run
        if samples < ranks:
            raise InputError(
                f"the training data have {samples} samples: expected at least one for each of {ranks} ranks"
            )
        if run.batch <= samples and run.batch % (ranks * run.accumulate):
            raise InputError(
                f"run.batch is {run.batch}: expected a multiple of {ranks * run.accumulate}, which is {ranks} ranks x "
                f"run.accumulate={run.accumulate}"
            )
        few = samples < run.batch
        batch = samples if few else run.batch
        repeats, passed = recipe.augment.repeats, batch // (1 if few else run.accumulate)
        if passed % repeats:
            most = passed // repeats * repeats * (1 if few else run.accumulate)
            instead = f", or e.g. run.batch={most}" if most and most % (ranks * run.accumulate) == 0 else ""
            raise InputError(
                f"augment.repeats is {repeats}: expected a number that divides the {passed} samples of a forward pass "
                f"over all ranks{instead}"
            )
        per_epoch = samples // batch
        return cls(
            batch=batch,
            parts=1 if few else run.accumulate,
            per_epoch=per_epoch,
            steps=run.steps or max(1, round(run.epochs * per_epoch)),
            between_evaluations=max(1, round(recipe.evaluation.every * per_epoch)),
            between_saves=save_every or per_epoch,
        )

    def epoch_of(self, step: int) -> tuple[int, int]:
        """(epoch of a step, from 0; number of the step in the epoch, from 0)."""
        return divmod(step - 1, self.per_epoch)

    def epochs_after(self, step: int) -> float:
        """Passes over the data up to and including a step."""
        return step / self.per_epoch

    def evaluates(self, step: int) -> bool:
        return step % self.between_evaluations == 0 or step == self.steps

    def saves(self, step: int) -> bool:
        return step % self.between_saves == 0 or step == self.steps
