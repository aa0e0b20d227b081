"""metrics.jsonl has each step once, in order, even after a training was killed and resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rooftop.train.fitting import EvaluationRecord, StepRecord, read_metrics
from rooftop.train.fitting.metric_lines import MetricLines


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, number / 10, loss, 0.5, 0.1, 100.0, 0.0, 1 << 20)


def evaluation(number: int) -> EvaluationRecord:
    return EvaluationRecord(number, number / 10, {"loss": 0.5, "accuracy": 0.9}, True)


def test_a_resumed_training_cuts_the_lines_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = MetricLines(path, 0)
    lines.add([step(1), step(2)])
    lines.add([evaluation(2)])
    lines.add([step(3)])
    lines.add([evaluation(3)])
    lines.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed here
    resumed = MetricLines(path, 2)
    resumed.add([step(3, 7.0)])
    resumed.close()
    assert read_metrics(path) == ([step(1), step(2), step(3, 7.0)], [evaluation(2)])
    assert len(path.read_text().splitlines()) == 4
    assert read_metrics(path, until=1) == ([step(1)], [])


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = MetricLines(path, 0)
    lines.add([step(1, math.inf)])
    lines.add([replace(evaluation(1), values={"loss": math.nan, "accuracy": 0.5})])
    lines.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    (of_step,), (of_evaluation,) = read_metrics(path)
    assert math.isnan(of_step.loss)
    assert math.isnan(of_evaluation.values["loss"])
    assert of_evaluation.values["accuracy"] == 0.5
    before = path.read_text()
    MetricLines(path, 1).close()
    assert path.read_text() == before


def test_a_training_from_the_start_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("of an earlier training\n")
    MetricLines(path, 0).close()
    assert path.read_text() == ""
    assert read_metrics(tmp_path / "missing") == ([], [])
