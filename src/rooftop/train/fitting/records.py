"""The reports of a training, which observers show in the terminal, in TensorBoard, on the page and in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Facts:
    """The description of a training before its first step.

    Attributes:
        parameters, trained: number of all parameters of the model, and of its parameters that are not frozen.
        samples, held_out: number of training samples, and of validation samples.
        steps, steps_per_epoch: number of steps of the whole run, and of one epoch.
        before: number of steps of earlier runs, up to the loaded checkpoint; 0 without a checkpoint.
        ranks, device: number of ranks, and the device of this rank.
        loading: how samples are loaded, in words, with measurements; "" if the loader has not chosen yet. In this case,
            a later note reports the choice.
    """

    parameters: int
    trained: int
    samples: int
    held_out: int
    steps: int
    steps_per_epoch: int
    before: int
    ranks: int
    device: str
    loading: str


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: number of the step, from 1.
        epoch: number of passes over the data so far, with a fraction.
        loss: mean loss over the whole batch, before the step.
        grad_norm: norm of the gradient before clipping.
        learning_rate: the highest learning rate of all parameter groups.
        samples_per_s: samples per second of all ranks, including the wait for data, averaged over the steps of one
            `stepped` call.
        waiting: fraction of the time in which the loop waited for data, averaged over the same steps.
        peak_bytes: peak memory of this rank so far.
        skipped: whether the step was skipped because its loss or gradient was not finite; the weights stayed unchanged.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    samples_per_s: float
    waiting: float
    peak_bytes: int
    skipped: bool = False


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation on the validation data.

    Attributes:
        values: "loss" and the task's metrics, by name.
        best: whether this evaluation is the best so far.
    """

    step: int
    epoch: float
    values: Mapping[str, float]
    best: bool


@dataclass(frozen=True)
class Fitted:
    """The result of a training.

    Attributes:
        steps: total number of steps, including earlier runs.
        seconds: duration of this run.
        reason: why the training ended: "done", "no improvement for N evaluations", "stopped by SIGTERM", "stopped by
            Ctrl-C", "stopped by the program".
        last, best: the last and the best evaluation; None if there was no evaluation, e.g. without validation data.
        out: folder of the run; None: nothing was written.
    """

    steps: int
    seconds: float
    reason: str
    last: EvaluationRecord | None
    best: EvaluationRecord | None
    out: Path | None


class Observer(Protocol):
    """Receives the reports of a training on rank 0."""

    def began(self, facts: Facts, task: Any) -> None: ...

    def stepped(self, records: list[StepRecord]) -> None: ...

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def noted(self, note: str) -> None:
        """Receive a note, e.g. a change of the model by the recipe, a skipped sample or step, or the way of loading."""

    def ended(self, fitted: Fitted, model: Any) -> None:
        """Receive the end of the training; `model` has the exported last weights and is in evaluation mode."""
