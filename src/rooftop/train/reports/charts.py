"""Make the curves of a training, as data for the page to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from rooftop.train.fitting.records import EvaluationRecord, StepRecord
from rooftop.train.reports.histories import History

MOST_POINTS = 1000  # maximum number of points of a curve, about one per pixel; with more points, the page would be slow

WIDE = 50
"""A loss is drawn on a logarithmic axis if its largest value is at least this many times its smallest value."""


def curves(history: History) -> list[dict[str, Any]]:
    """Make charts of loss, metrics, learning rate, gradient, speed and waiting; charts without points are left out."""
    steps = [record for record in history.steps if not record.skipped]
    loss = [_of_steps("training", steps, lambda record: record.loss, colour=0)]
    loss.append(_of_evaluations("validation", history.evaluations, "loss"))
    charts = [_chart("loss", "loss", loss, log=_spread(y for each in loss for y in each["y"]) > WIDE)]
    names = dict.fromkeys(name for record in history.evaluations for name in record.values if name != "loss")
    charts += [
        _chart(f"metric{number}", name, [_of_evaluations(name, history.evaluations, name)])
        for number, name in enumerate(names)
    ]
    unit = history.task.unit if history.task is not None else "samples"
    for name, title, options in (
        ("learning_rate", "learning rate", {"zero": True}),
        ("grad_norm", "norm of the gradient", {}),
        ("samples_per_s", f"{unit} per second", {"zero": True}),
        ("waiting", "share of the time spent waiting for data", {"zero": True, "percent": True}),
    ):
        series = _of_steps(title, steps, attrgetter(name))
        charts.append(_chart(name, title, [series], **options))
    return [chart for chart in charts if chart["series"]]


def _spread(values: Iterable[float]) -> float:
    """The largest value divided by the smallest; 1 if there are no values, or a value is not positive."""
    found = list(values)
    return max(found) / min(found) if found and min(found) > 0 else 1.0


def _chart(name: str, title: str, series: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {
        "id": f"chart-{name.replace('_', '-')}",
        "title": title,
        "across": "epoch",
        "series": [each for each in series if each["x"]],
        **options,
    }


def _of_steps(
    name: str, steps: Sequence[StepRecord], value: Callable[[StepRecord], float], colour: int = 0
) -> dict[str, Any]:
    points = thinned([(record.epoch, value(record)) for record in steps])
    return _series(name, points, "lines", colour)


def _of_evaluations(name: str, evaluations: Sequence[EvaluationRecord], key: str) -> dict[str, Any]:
    points = [(record.epoch, record.values[key]) for record in evaluations if key in record.values]
    return _series(name, thinned(points), "lines+markers", 1)


def _series(name: str, points: Sequence[tuple[float, float]], mode: str, colour: int) -> dict[str, Any]:
    finite = [(x, y) for x, y in points if math.isfinite(y)]  # JSON has only finite numbers
    return {
        "name": name,
        "x": [float(f"{x:.6g}") for x, _ in finite],
        "y": [float(f"{y:.6g}") for _, y in finite],
        "mode": mode,
        "colour": colour,
    }


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Reduce a curve to at most this many points.

    Each point stands for the same number of neighbours, the last point possibly for fewer: y is their mean, x is the x
    of the last neighbour.
    """
    each = -(-len(points) // most)
    if each <= 1:
        return list(points)
    groups = [points[start : start + each] for start in range(0, len(points), each)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
