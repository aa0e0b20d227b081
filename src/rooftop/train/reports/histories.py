"""Keep all reports of a training, for the page and the summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord


@dataclass
class History:
    """An observer that keeps all reports.

    Attributes:
        batch: samples per step, from the recipe.
        facts, task: the description of the training before its first step, and its task.
        steps, evaluations, notes: the reports so far, including those of an earlier run in the same folder.
        earlier: the number of `steps` from an earlier run.
        peak_bytes: peak memory of rank 0 so far.
        fitted: the result; None while the training runs.
        began_s: start time of this run, by `time.monotonic`.
    """

    batch: int
    facts: Facts | None = None
    task: Any = None
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    earlier: int = 0
    peak_bytes: int = 0
    fitted: Fitted | None = None
    began_s: float = 0.0

    def began(self, facts: Facts, task: Any) -> None:
        self.facts, self.task, self.began_s = facts, task, time.monotonic()

    def stepped(self, records: list[StepRecord]) -> None:
        self.steps += records
        self.peak_bytes = max([self.peak_bytes, *(record.peak_bytes for record in records)])

    def evaluated(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def noted(self, note: str) -> None:
        self.notes.append(note)

    def ended(self, fitted: Fitted, model: Any) -> None:
        self.fitted = fitted

    @property
    def seconds(self) -> float:
        """Seconds since the start of this run, or the whole duration if the run has ended. Earlier runs of a resumed
        training do not count."""
        return self.fitted.seconds if self.fitted is not None else time.monotonic() - self.began_s

    def spans(self) -> Spans:
        """The seconds of this run by activity."""
        batch = self.batch if self.facts is None else min(self.batch, self.facts.samples)
        return spans_of(self.steps[self.earlier :], batch, self.seconds)

    def best(self) -> EvaluationRecord | None:
        """The best evaluation so far; None if there is none."""
        return next((record for record in reversed(self.evaluations) if record.best), None)


@dataclass(frozen=True)
class Spans:
    """How the seconds of a run were spent: training steps (`steps`, without waiting), waiting for data (`waiting`), and
    everything else (`rest`)."""

    steps: float
    waiting: float
    rest: float

    @property
    def all(self) -> float:
        return self.steps + self.waiting + self.rest


def spans_of(steps: list[StepRecord], batch: int, seconds: float) -> Spans:
    """Divide the seconds of a run by activity.

    The duration of a step, including its wait for data, is `batch` divided by the step's samples per second.
    """
    took = [batch / record.samples_per_s if record.samples_per_s > 0 else 0.0 for record in steps]
    waited = sum(second * record.waiting for second, record in zip(took, steps, strict=True))
    stepped = sum(took)
    return Spans(stepped - waited, waited, max(0.0, seconds - stepped))


@dataclass(frozen=True)
class Pace:
    """Averages over several steps: loss, speed, and share of time spent waiting for data. The learning rate is that of
    the last step."""

    loss: float
    samples_per_s: float
    waiting: float
    learning_rate: float


def pace_of(steps: list[StepRecord]) -> Pace | None:
    """Average the records of several steps; None if all steps were skipped, or if there are no steps."""
    counted = [record for record in steps if not record.skipped]
    if not counted:
        return None
    timed = [record for record in counted if record.samples_per_s > 0]
    seconds = sum(1 / record.samples_per_s for record in timed)  # sum over the steps of the seconds per sample
    return Pace(
        loss=sum(record.loss for record in counted) / len(counted),
        samples_per_s=len(timed) / seconds if seconds else 0.0,
        waiting=sum(record.waiting / record.samples_per_s for record in timed) / seconds if seconds else 0.0,
        learning_rate=counted[-1].learning_rate,
    )
