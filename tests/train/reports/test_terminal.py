"""The terminal output of a training: a line for each evaluation, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rooftop.train.fitting.records import StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.histories import pace_of, spans_of
from rooftop.train.reports.terminal import Terminal, decimals_of, seconds_text, value_text

RECIPE = Recipe.of({"run": {"epochs": 3, "batch": 20}})


Said = Callable[..., tuple[list[str], list[tuple[str, float]]]]


@pytest.fixture
def said_by(scripted: SimpleNamespace) -> Said:
    """Lines and movements of the bar of a scripted training."""

    def run(valid: bool = True, **options: object) -> tuple[list[str], list[tuple[str, float]]]:
        lines: list[str] = []
        bar: list[tuple[str, float]] = []
        terminal = Terminal(RECIPE, lines.append, lines.append, lambda what, fraction: bar.append((what, fraction)))
        task = scripted.task()
        task.valid = task.valid if valid else None
        scripted.fit(task, RECIPE, [terminal], **options)
        return lines, bar

    return run


def test_each_evaluation_has_one_line_with_loss_metrics_rate_and_waiting(said_by: Said) -> None:
    lines, _ = said_by()
    rows = [line for line in lines if line.startswith("epoch")]
    mean = sum(2 / step**0.5 for step in range(1, 11)) / 10
    assert len(rows) == 3
    assert rows[0] == (
        f"epoch 1/3  loss {mean:.4g}  valid loss 1  accuracy 0.5000  lr 1.00e-01  "
        "40 digits/s  25% waiting for data  best"
    )


def test_the_summary_has_the_best_evaluation_and_where_the_time_went(said_by: Said) -> None:
    """The training took 1.25 times as long as its steps, and a quarter of the steps' time was waiting."""
    lines, _ = said_by()
    assert lines[-3:] == [
        "done: 30 steps in 18.8 s",
        "best accuracy 0.8750 at epoch 3",
        "time: 60% steps, 20% waiting for data, 20% evaluation, saving, starting",
    ]


def test_a_stopped_training_says_why(said_by: Said) -> None:
    lines, _ = said_by(reason="stopped by SIGTERM")
    assert "ended (stopped by SIGTERM): 30 steps in 18.8 s" in lines


def test_without_validation_data_each_epoch_has_its_line(said_by: Said) -> None:
    lines, _ = said_by(valid=False)
    rows = [line for line in lines if line.startswith("epoch")]
    assert [row.split()[1] for row in rows] == ["1/3", "2/3", "3/3"]
    assert not any("valid" in row for row in rows)


def test_a_resumed_training_tells_of_its_own_steps(said_by: Said) -> None:
    lines, bar = said_by(before=10)
    assert "continuing after step 10" in lines
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["2/3", "3/3"]
    assert bar == [("step 20 of 30", 2 / 3), ("step 30 of 30", 1.0)]


def test_a_note_is_passed_on() -> None:
    lines: list[str] = []
    terminal = Terminal(RECIPE, warn=lines.append)
    terminal.noted("cat.png cannot be read: skipped")
    assert lines == ["note: cat.png cannot be read: skipped"]


def test_skipped_steps_count_for_no_mean(scripted: SimpleNamespace) -> None:
    good = scripted.step(1, 20)
    skipped = replace(good, skipped=True, loss=float("nan"))
    pace = pace_of([good, skipped])
    assert pace is not None
    assert pace.loss == good.loss
    assert pace_of([skipped]) is None


@settings(max_examples=20)
@given(
    rates=st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 1)), min_size=1, max_size=5),
    more=st.floats(0, 100),
)
def test_the_parts_of_the_time_add_up(rates: list[tuple[float, float]], more: float) -> None:
    steps = [StepRecord(1, 0.1, 1.0, 1.0, 0.1, rate, waiting, 0) for rate, waiting in rates]
    stepped = sum(20 / rate for rate, _ in rates)
    spans = spans_of(steps, 20, stepped + more)
    assert spans.all == pytest.approx(stepped + more)
    assert min(spans.steps, spans.waiting, spans.rest) >= -1e-9


@settings(max_examples=50)
@example(0.03125)
@given(st.floats(-1e300, 1e300))
def test_a_value_keeps_its_first_digits(value: float) -> None:
    text = value_text(value)
    fixed = 5.1e-5 if 1e-3 <= abs(value) < 1 else 1e-300  # four decimals
    assert float(text) == pytest.approx(value, rel=1e-3, abs=fixed)
    assert len(re.sub(r"[-+.e]", "", text)) <= 8


def test_times_and_decimals_read_well() -> None:
    assert [seconds_text(each) for each in (4.24, 185, 7805)] == ["4.2 s", "3 min 5 s", "2 h 10 min"]
    assert [seconds_text(each) for each in (59.96, 179.7, 3599.7)] == ["1 min 0 s", "3 min 0 s", "1 h 0 min"]
    assert [decimals_of(scale) for scale in (0.97, 12.3, 4567, 1.0, 0.0)] == [4, 2, 0, 3, 4]
