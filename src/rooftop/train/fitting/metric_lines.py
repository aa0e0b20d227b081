"""Write OUT/metrics.jsonl: one line of JSON for each step and each evaluation, also in a resumed training.

    {"step": 3, "epoch": 0.1, "loss": 2.1, "grad_norm": 1.4, "learning_rate": 0.1, ...}
    {"step": 30, "epoch": 1.0, "values": {"loss": 1.2, "accuracy": 0.8}, "best": true}

A resumed training repeats the steps after its checkpoint. So the old lines of the repeated steps are removed, as is a
partial line of a killed process. A number that is not finite is null in the file, and NaN after reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooftop.train.checkpoints.folders import writing_to
from rooftop.train.finite_json import finite, with_nan
from rooftop.train.fitting.records import EvaluationRecord, StepRecord
from rooftop.whole_files import write_whole

METRICS = "metrics.jsonl"


class MetricLines:
    """Appends lines to the metrics file of a run.

    Args:
        path: path of the file.
        after: the step of the loaded checkpoint; lines of later steps are removed. 0: the file starts empty.

    Raises:
        InputError, OSError: the file cannot be written; see `writing_to`.
    """

    def __init__(self, path: Path, after: int) -> None:
        steps, evaluations = read_metrics(path, after) if after else ([], [])
        records: list[StepRecord | EvaluationRecord] = [*steps, *evaluations]
        records.sort(key=lambda record: (record.step, isinstance(record, EvaluationRecord)))
        with writing_to(path):
            write_whole(path, "".join(_line(record) for record in records))
            self._path, self._file = path, path.open("ab", buffering=0)  # unbuffered: a killed process loses no line

    def add(self, records: list[StepRecord] | list[EvaluationRecord]) -> None:
        """Write lines. Call this before the next checkpoint is saved.

        Raises:
            OSError: the lines cannot be written.
        """
        content = memoryview("".join(map(_line, records)).encode())
        try:
            while content.nbytes:
                content = content[self._file.write(content) :]
        except OSError as error:
            raise OSError(f"{self._path} cannot be written ({error.strerror}): make room, then resume") from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, until: int | None = None) -> tuple[list[StepRecord], list[EvaluationRecord]]:
    """Read the records of a file: at most one step record and one evaluation record per step.

    If a step ran twice, the last record counts.

    Args:
        until: the last step to return; None: all.
    """
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvaluationRecord] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
            if until is not None and found["step"] > until:
                continue
            if "values" in found:
                evaluations[found["step"]] = evaluation_of(found)
            else:
                steps[found["step"]] = StepRecord(**with_nan(found))
        except (ValueError, TypeError, KeyError):  # a line was cut off when the process was killed
            continue
    return [steps[step] for step in sorted(steps)], [evaluations[step] for step in sorted(evaluations)]


def plain_of(record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """A record as JSON values."""
    return finite(asdict(record))  # type: ignore[no-any-return]


def evaluation_of(plain: Mapping[str, Any]) -> EvaluationRecord:
    """The inverse of `plain_of`."""
    return EvaluationRecord(**{**plain, "values": with_nan(plain["values"])})


def _line(record: StepRecord | EvaluationRecord) -> str:
    return json.dumps(plain_of(record), allow_nan=False) + "\n"
