"""Report a training in the terminal: a heading, a line for each evaluation, and a summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rooftop.analysis.formats import percent_text
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.histories import History, Pace, pace_of
from rooftop.words import counted


class Terminal:
    """An observer that prints to the terminal.

    Args:
        recipe: recipe of the training.
        say: prints a line of the report.
        warn: prints a note.
        progress: called with (the current activity, fraction done).
    """

    def __init__(
        self,
        recipe: Recipe,
        say: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
        progress: Callable[[str, float], None] = lambda what, fraction: None,
    ) -> None:
        self.history = History(recipe.run.batch)
        self._say, self._warn, self._progress = say, warn, progress
        self._told = 0  # number of steps that were reported in lines
        self._epoch = 0.0  # number of whole epochs at the last line

    def began(self, facts: Facts, task: Any) -> None:
        self.history.began(facts, task)
        for line in heading(facts, task.unit, self.history.batch):
            self._say(line)
        self._epoch = float(facts.before // max(1, facts.steps_per_epoch))

    def stepped(self, records: list[StepRecord]) -> None:
        self.history.stepped(records)
        if not records:
            return
        facts, last = self._facts, records[-1]
        self._progress(f"step {last.step:,} of {facts.steps:,}", last.step / max(1, facts.steps))
        if facts.held_out == 0 and (int(last.epoch) > self._epoch or last.step >= facts.steps):
            self._line(last.epoch, None)

    def evaluated(self, record: EvaluationRecord) -> None:
        self.history.evaluated(record)
        self._line(record.epoch, record)

    def noted(self, note: str) -> None:
        self.history.noted(note)
        self._warn(f"note: {note}")

    def ended(self, fitted: Fitted, model: Any) -> None:
        self.history.ended(fitted, model)
        for line in summary(self.history, fitted):
            self._say(line)

    @property
    def _facts(self) -> Facts:
        assert self.history.facts is not None, "a training begins before its steps"
        return self.history.facts

    def _line(self, epoch: float, record: EvaluationRecord | None) -> None:
        facts, task = self._facts, self.history.task
        pace = pace_of(self.history.steps[self._told :])
        epochs = facts.steps / max(1, facts.steps_per_epoch)
        self._say(line_of(epoch, epochs, pace, record, task.unit))
        self._told, self._epoch = len(self.history.steps), float(int(epoch))


def heading(facts: Facts, unit: str, batch: int) -> list[str]:
    """Describe the model, the data, and how the data are loaded."""
    trained = "" if facts.trained == facts.parameters else f", {facts.trained:,} of them trained"
    held_out = f", {facts.held_out:,} held out" if facts.held_out else ""
    lines = [
        f"{facts.parameters:,} parameters{trained}, on {facts.ranks} x {facts.device}",
        f"{facts.samples:,} {unit}{held_out}; {counted(facts.steps, 'step')} of {batch:,}, "
        f"{facts.steps_per_epoch:,} an epoch",
    ]
    if facts.loading:
        lines.append(f"loading: {facts.loading}")
    if facts.before:
        lines.append(f"continuing after step {facts.before:,}")
    return lines


def line_of(epoch: float, epochs: float, pace: Pace | None, record: EvaluationRecord | None, unit: str) -> str:
    """Format one line: epoch, training loss, evaluation, learning rate, speed and waiting."""
    words = [f"epoch {number_text(epoch)}/{number_text(epochs)}"]
    if pace is not None:
        words.append(f"loss {value_text(pace.loss)}")
    if record is not None:
        named = {"valid loss" if name == "loss" else name: value for name, value in record.values.items()}
        words += [f"{name} {value_text(value)}" for name, value in named.items()]
    if pace is not None:
        words += [f"lr {pace.learning_rate:.2e}", f"{pace.samples_per_s:,.0f} {unit}/s"]
        words.append(f"{percent_text(100 * pace.waiting)} waiting for data")
    if record is not None and record.best:
        words.append("best")
    return "  ".join(words)


def summary(history: History, fitted: Fitted) -> list[str]:
    """Summarize a training: best and last evaluation, and how the time was spent."""
    ended = "done" if fitted.reason == "done" else f"ended ({fitted.reason})"
    lines = [f"{ended}: {counted(fitted.steps, 'step')} in {seconds_text(fitted.seconds)}"]
    task, best = history.task, fitted.best
    name = "valid loss" if task.best == "loss" else task.best
    if best is not None and task.best in best.values:
        told = f"best {name} {value_text(best.values[task.best])} at epoch {number_text(best.epoch)}"
        if fitted.last is not None and task.best in fitted.last.values and fitted.last.step != best.step:
            told += f", last {value_text(fitted.last.values[task.best])}"
        lines.append(told)
    spans = history.spans()
    if spans.all > 0:
        parts = (
            ("steps", spans.steps),
            ("waiting for data", spans.waiting),
            ("evaluation, saving, starting", spans.rest),
        )
        lines.append("time: " + ", ".join(f"{percent_text(100 * part / spans.all)} {what}" for what, part in parts))
    return lines


def value_text(value: float) -> str:
    """Format a value with four significant digits: "0.9722", "12.35", "1.200e-05"."""
    if math.isfinite(value) and value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) >= 1 or value == 0 else f"{value:#.4g}"


def decimals_of(scale: float) -> int:
    """Return the number of decimals with which a number of the size of `scale` has four significant digits. Smaller
    numbers then have fewer."""
    return max(0, 3 - math.floor(math.log10(scale))) if scale > 0 and math.isfinite(scale) else 4


def number_text(value: float) -> str:
    """Format a number: "3", "2.5"."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def seconds_text(seconds: float) -> str:
    """Format a duration: "4.2 s", "3 min 5 s", "2 h 10 min"."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
