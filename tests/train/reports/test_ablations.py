"""The value of switches: paired seeds, honest noise, and no repeated runs."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rooftop.errors import DivergedError, InputError
from rooftop.train.fitting.records import Fitted
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.ablation_tables import ablation_heading, ablation_page, ablation_table
from rooftop.train.reports.ablations import (
    Ablation,
    Run,
    Switch,
    Worth,
    ablate,
    results_of,
    runs_of,
    switches_of,
    write_ablation,
)

RECIPE = Recipe.of(
    {"run": {"epochs": 1, "seed": 7}, "mix": {"mixup": 0.2, "label_smoothing": 0.1}, "ema": {"decay": 0.9}}
)
NAMES = ["mix.mixup", "ema.decay", "mix.label_smoothing"]


def accuracy_of(recipe: Recipe) -> float:
    """Mixup helps by 0.03, the mean of weights hurts by 0.02, smoothing has no effect; each seed has its own level, and
    each run a little noise."""
    noise = hash((recipe.run.seed, recipe.mix.mixup, recipe.ema.decay, recipe.mix.label_smoothing)) % 1000 / 1e6
    level = 0.8 + 0.02 * (recipe.run.seed % 3)
    return level + (0.03 if recipe.mix.mixup else 0) - (0.02 if recipe.ema.decay else 0) + noise


Trained = Callable[[Run], Fitted]


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def train(scripted: SimpleNamespace, made: list[str]) -> Trained:
    def run_one(run: Run) -> Fitted:
        made.append(run.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        values = {"loss": 1.0, "accuracy": accuracy_of(run.recipe)}
        return scripted.fit(scripted.task(), run.recipe, [], run.folder, values)

    return run_one


def ablated(folder: Path, train: Trained, repeats: int = 3, names: list[str] = NAMES) -> Ablation:
    runs = runs_of(RECIPE, switches_of(RECIPE, names), repeats, folder)
    return ablate(RECIPE, runs, results_of(runs), train, "accuracy", True, lambda *told: None)


def test_each_switch_is_compared_at_the_same_seeds(tmp_path: Path, train: Trained, made: list[str]) -> None:
    found = ablated(tmp_path, train)
    assert len(made) == 3 * 4
    assert made[:4] == ["recipe, seed 7", *(f"without {name}, seed 7" for name in NAMES)]
    assert list(found.values) == [7, 8, 9]
    mixup = found.worths[0]
    assert mixup.with_it == tuple(found.values.values())
    assert mixup.mean == pytest.approx(0.03, abs=0.001)
    # The levels of the seeds differ by more than the effect of a switch, but cancel in the differences.
    assert statistics.stdev(mixup.with_it) > 0.015
    assert mixup.error == pytest.approx(statistics.stdev(mixup.differences) / 3**0.5)
    assert mixup.error < 0.001
    assert [worth.verdict for worth in found.worths] == ["helps", "hurts", "within noise"]


def test_of_a_loss_less_is_better(tmp_path: Path, scripted: SimpleNamespace) -> None:
    runs = runs_of(RECIPE, switches_of(RECIPE, ["mix.mixup"]), 2, tmp_path)

    def train(run: Run) -> Fitted:
        run.folder.mkdir(parents=True)
        loss = (0.5 if run.recipe.mix.mixup else 0.7) + 0.001 * run.seed
        return scripted.fit(scripted.task("loss"), run.recipe, [], run.folder, {"loss": loss})

    found = ablate(RECIPE, runs, {}, train, "loss", False, lambda *told: None)
    assert found.worths[0].mean == pytest.approx(0.2)


def test_off_is_the_default_or_the_value_that_is_given() -> None:
    recipe = RECIPE.updated({"schedule": {"warmup": 0.1}})
    switches = switches_of(recipe, ["mix.mixup", "schedule.warmup=0", "optimizer.betas=[0.8, 0.9]"])
    assert switches == [
        Switch("mix.mixup", 0.2, 0.0),
        Switch("schedule.warmup", 0.1, 0.0),
        Switch("optimizer.betas", (0.9, 0.999), (0.8, 0.9)),
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mix.mixpu"], r"--ablate mix\.mixpu: expected a switch of the recipe.*did you mean mix\.mixup"),
        (["mixup"], "SECTION.NAME"),
        (["run.seed"], "each repeat has its own seed;"),
        (["mix.mixup", "mix.mixup"], "given 2 times, expected once"),
        (["mix.cutmix"], r"mix.cutmix=0.0: turn it on with --set mix\.cutmix=VALUE"),
        (["mix.mixup=0.2"], r"with and without the switch, mix\.mixup=0\.2"),
        (["mix.mixup=lots"], "expected a number"),
    ],
)
def test_what_is_no_switch_is_refused_before_any_run(names: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        switches_of(RECIPE, names)


def test_finished_runs_are_not_made_again(tmp_path: Path, train: Trained, made: list[str]) -> None:
    first = ablated(tmp_path, train, repeats=1, names=NAMES[:1])
    assert [worth.verdict for worth in first.worths] == ["the noise needs more than one repeat"]
    ablated(tmp_path, train, repeats=2, names=NAMES[:2])
    assert made == [
        *("recipe, seed 7", "without mix.mixup, seed 7"),
        *("without ema.decay, seed 7", "recipe, seed 8", "without mix.mixup, seed 8", "without ema.decay, seed 8"),
    ]


def test_a_stopped_run_is_made_again_and_the_same_is_found(
    tmp_path: Path, train: Trained, made: list[str], scripted: SimpleNamespace
) -> None:
    def stops(run: Run) -> Fitted:
        if len(made) < 5:
            return train(run)
        return scripted.fit(scripted.task(), run.recipe, [], run.folder, reason="stopped by SIGTERM")

    half = ablated(tmp_path / "stopped", stops)
    assert (half.finished, half.runs) == (5, 12)
    assert [len(worth.differences) for worth in half.worths] == [1, 1, 1]
    assert ablated(tmp_path / "stopped", train).plain() == ablated(tmp_path / "whole", train).plain()


def test_results_of_another_recipe_are_refused(tmp_path: Path, train: Trained) -> None:
    ablated(tmp_path, train, repeats=1, names=["mix.mixup"])
    other = RECIPE.updated({"optimizer": {"lr": 0.5}})
    with pytest.raises(InputError, match="holds a run of another recipe"):
        results_of(runs_of(other, switches_of(other, ["mix.mixup"]), 1, tmp_path))
    result = tmp_path / "recipe" / "seed-7" / "result.json"
    result.write_text("{}")
    with pytest.raises(InputError, match=r"result\.json is not a result of a training"):
        results_of(runs_of(RECIPE, [], 1, tmp_path))


def test_a_metric_that_no_evaluation_has_is_named(tmp_path: Path, train: Trained) -> None:
    runs = runs_of(RECIPE, [], 1, tmp_path)
    with pytest.raises(InputError, match="compares map on validation data"):
        ablate(RECIPE, runs, {}, train, "map", True, lambda *told: None)


def test_only_the_first_rank_writes(tmp_path: Path, train: Trained) -> None:
    runs = runs_of(RECIPE, [], 1, tmp_path)
    ablate(RECIPE, runs, {}, train, "accuracy", True, lambda *told: None, write=False)
    assert results_of(runs) == {}


# ---- noise -----------------------------------------------------------------------------------------------------------


def worth_of(*differences: float) -> Worth:
    zeros = (0.0,) * len(differences)
    return Worth(Switch("mix.mixup", 0.2, 0.0), differences, zeros, differences)


def test_the_interval_is_students() -> None:
    worth = worth_of(0.01, 0.02, 0.03)
    assert worth.error == pytest.approx(0.01 / 3**0.5)
    assert worth.interval == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert worth.verdict == "within noise"
    assert worth_of(0.019, 0.02, 0.021).verdict == "helps"
    assert worth_of(-0.019, -0.02, -0.021).verdict == "hurts"


def test_equal_differences_prove_nothing() -> None:
    """Of 100 samples, three runs differ by the same sample by chance."""
    assert worth_of(0.01, 0.01, 0.01).verdict == "equal in all repeats: too few to tell"
    assert worth_of(0.0, 0.0, 0.0).verdict == "no effect: does the task use it?"
    assert worth_of(0.01).verdict == "the noise needs more than one repeat"
    assert worth_of(0.01, float("nan")).verdict == "not finite"


@settings(max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.floats(-1, 1))
def test_a_worth_and_its_opposite_have_opposite_verdicts(differences: list[float], shift: float) -> None:
    one = worth_of(*(each + shift for each in differences)).verdict
    other = worth_of(*(-each - shift for each in differences)).verdict
    assert {"helps": "hurts", "hurts": "helps"}.get(one, one) == other


# ---- output ----------------------------------------------------------------------------------------------------------


def test_table_csv_json_and_page_say_the_same(tmp_path: Path, train: Trained) -> None:
    found = ablated(tmp_path, train)
    write_ablation(found, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "ablation.csv").read_text())))
    plain = json.loads((tmp_path / "ablation.json").read_text())
    shown = io.StringIO()
    Console(file=shown, width=110).print(ablation_table(found))
    page = ablation_page(found, "resnet", "/* plotly */")
    for worth, row, each in zip(found.worths, rows, plain["switches"], strict=True):
        assert row["switch"] == each["switch"] == worth.switch.name
        assert float(row["worth"]) == each["worth"] == worth.mean
        assert float(row["standard_error"]) == each["standard_error"] == worth.error
        assert f"{worth.mean:+.4f}" in shown.getvalue()
        assert f"{worth.mean:+.4f}" in page
        assert worth.verdict in shown.getvalue()
    assert "accuracy of the last evaluation, more is better; the whole recipe reaches 0.8" in ablation_heading(found)
    assert 'http-equiv="refresh"' not in page
    assert "12 of 12 runs" in page


def test_a_run_that_diverged_leaves_a_table_and_a_page(tmp_path: Path, scripted: SimpleNamespace) -> None:
    def train(run: Run) -> Fitted:
        run.folder.mkdir(parents=True)
        value = 0.9 if run.recipe.mix.mixup else float("nan")
        return scripted.fit(scripted.task(), run.recipe, [], run.folder, {"loss": 1.0, "accuracy": value})

    found = ablated(tmp_path, train, repeats=2, names=["mix.mixup"])
    write_ablation(found, tmp_path)
    assert json.loads((tmp_path / "ablation.json").read_text())["switches"][0]["worth"] is None
    assert "not finite" in ablation_page(found, "resnet", "")
    assert ablated(tmp_path, train, repeats=2, names=["mix.mixup"]).worths[0].verdict == "not finite"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_recipe_that_diverged_with_one_seed_leaves_a_table_and_a_page(
    wrong: float, tmp_path: Path, scripted: SimpleNamespace
) -> None:
    def train(run: Run) -> Fitted:
        run.folder.mkdir(parents=True)
        values = {7: 0.9, 8: wrong, 9: -wrong}
        return scripted.fit(scripted.task(), run.recipe, [], run.folder, {"accuracy": values[run.seed]})

    found = ablated(tmp_path, train, names=["mix.mixup"])
    write_ablation(found, tmp_path)
    shown = io.StringIO()
    Console(file=shown, width=110).print(ablation_table(found))
    assert "not finite" in shown.getvalue()
    assert "the whole recipe reaches nan" in ablation_heading(found)
    assert "not finite" in ablation_page(found, "resnet", "")


def test_the_other_runs_continue_after_a_run_that_diverges(tmp_path: Path, train: Trained, made: list[str]) -> None:
    def diverges(run: Run) -> Fitted:
        fitted = train(run)
        if run.switch is not None and run.seed == 7:
            raise DivergedError("step 3: the loss is nan")
        return fitted

    found = ablated(tmp_path, diverges, repeats=2, names=["mix.mixup"])
    assert (found.finished, found.worths[0].verdict) == (4, "not finite")
    assert ablated(tmp_path, train, repeats=2, names=["mix.mixup"]).finished == len(made) == 4
    result = (tmp_path / "without-mix.mixup" / "seed-7" / "result.json").read_text()
    assert json.loads(result, parse_constant=pytest.fail)["value"] is None
