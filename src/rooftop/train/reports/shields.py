"""Protect a training from failing observers: the first failure is noted, and the observer gets no further reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord


class Shielded:
    """Wraps an observer. If the observer fails, e.g. on a full disk, the training continues, and a note is printed.

    Args:
        observer: the observer that may fail.
        name: the observer's name for the note, e.g. "the page".
        warn: prints a note.
    """

    def __init__(self, observer: Observer, name: str, warn: Callable[[str], None]) -> None:
        self._observer: Observer | None = observer
        self._name, self._warn = name, warn

    def began(self, facts: Facts, task: Any) -> None:
        self._call("began", facts, task)

    def stepped(self, records: list[StepRecord]) -> None:
        self._call("stepped", records)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._call("evaluated", record)

    def noted(self, note: str) -> None:
        self._call("noted", note)

    def ended(self, fitted: Fitted, model: Any) -> None:
        self._call("ended", fitted, model)

    def _call(self, what: str, *arguments: Any) -> None:
        if self._observer is None:
            return
        try:
            getattr(self._observer, what)(*arguments)
        except Exception as error:
            self._observer = None
            self._warn(f"note: {self._name} ends here, and the training continues: {type(error).__name__}: {error}")
