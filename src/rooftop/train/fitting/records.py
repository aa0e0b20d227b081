"""The reports of a training, for the terminal, TensorBoard, the page and metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Facts:
    """The facts known before the first step.

    Attributes:
        parameters: parameters of the model; trained: the parameters that are not frozen.
        samples: samples of the training data; held_out: samples of the validation data.
        steps: steps of the whole run; steps_per_epoch: steps of one pass.
        before: steps that the checkpoint already contains.
        ranks, device: number of ranks, and their device.
        loading: the way in which samples are read, in words, with its measurement; "" if the ways are still to be
            timed. In that case a note reports the choice later.
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
        step: the step, from 1.
        epoch: passes over the data so far, with a fraction.
        loss: mean over the whole batch, before the step.
        grad_norm: before clipping.
        learning_rate: the highest of all groups.
        samples_per_s: rate of all ranks, and waiting: fraction of the time in which the loop waited for data; both over
            the steps that were read together.
        peak_bytes: peak memory of this rank so far.
        skipped: whether the weights stayed unchanged, because a number was not finite.
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
    """A training that has ended.

    Attributes:
        steps: total number of steps.
        seconds: duration of this run.
        reason: "done", "no better for N evaluations", "stopped by SIGTERM", "stopped by Ctrl-C".
        last, best: the last and the best evaluation; None without validation data.
        out: folder of the run; None: nothing was written.
    """

    steps: int
    seconds: float
    reason: str
    last: EvaluationRecord | None
    best: EvaluationRecord | None
    out: Path | None


class Observer(Protocol):
    """Receives the reports of a training, on rank 0."""

    def began(self, facts: Facts, task: Any) -> None: ...

    def stepped(self, records: list[StepRecord]) -> None: ...

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def noted(self, note: str) -> None:
        """Receive a note: a change of the model by the recipe, or a skipped sample or step."""

    def ended(self, fitted: Fitted, model: Any) -> None:
        """The training has ended; `model` has the exported last weights, in evaluation mode."""
