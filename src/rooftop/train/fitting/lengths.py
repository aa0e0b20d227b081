"""The length of a training: steps per epoch, steps in total, and the steps after which to evaluate and to save."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.errors import InputError
from rooftop.train.recipes.recipe import Recipe


@dataclass(frozen=True)
class Lengths:
    """The numbers of steps of a run; steps count from 1.

    Attributes:
        batch: samples per step, summed over all ranks: `run.batch`, or the number of samples if there are fewer.
        parts: forward and backward passes per step.
        per_epoch: steps per epoch; the last samples are left out if they do not fill a batch.
        steps: number of steps of the run.
        between_evaluations, between_saves: steps between evaluations, and between saves.
    """

    batch: int
    parts: int
    per_epoch: int
    steps: int
    between_evaluations: int
    between_saves: int

    @classmethod
    def of(cls, recipe: Recipe, samples: int, ranks: int, save_every: int | None = None) -> Lengths:
        """Compute the numbers of steps for a training with this number of samples.

        Raises:
            InputError: there are fewer samples than ranks, a batch cannot be split evenly, or the run is too short for
                one update of the averaged weights.
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
        steps = run.steps or max(1, round(run.epochs * per_epoch))
        if recipe.ema.decay and recipe.ema.every > steps:
            raise InputError(
                f"ema.every is {recipe.ema.every}, but the run has only {steps} steps, so the averaged weights would "
                f"stay the initial weights: set ema.every to at most {steps}, or ema.decay=0"
            )
        return cls(
            batch=batch,
            parts=1 if few else run.accumulate,
            per_epoch=per_epoch,
            steps=steps,
            between_evaluations=max(1, round(recipe.evaluation.every * per_epoch)),
            between_saves=save_every or per_epoch,
        )

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch of a step, number of the step in the epoch), both counted from 0."""
        return divmod(step - 1, self.per_epoch)

    def epochs_after(self, step: int) -> float:
        """Number of passes over the data up to and including a step."""
        return step / self.per_epoch

    def evaluates(self, step: int) -> bool:
        return step % self.between_evaluations == 0 or step == self.steps

    def saves(self, step: int) -> bool:
        return step % self.between_saves == 0 or step == self.steps
