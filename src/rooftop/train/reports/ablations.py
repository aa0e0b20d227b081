"""Measure the effect of each switch of a recipe: train the recipe with and without the switch, once for each seed.

For each seed, the whole recipe is trained once. Then the recipe is trained once per switch with this switch off, i.e.
at its default in `Recipe` or at a given value. The worth of a switch is the metric with the switch minus the metric
without the switch, averaged over the seeds. The sign is reversed if a lower metric is better, so a positive worth means
that the switch helps. Both runs of a pair have the same seed, so initial values, sample order and augmentation are the
same unless the switch changes them. Each worth has the standard error of the mean difference over the pairs. A worth
whose 95% interval (Student's t) contains 0 is within noise.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.errors import DivergedError, InputError
from rooftop.train.checkpoints.folders import writing_to
from rooftop.train.finite_json import finite
from rooftop.train.fitting.records import Fitted
from rooftop.train.recipes.recipe import Recipe
from rooftop.whole_files import write_whole
from rooftop.words import did_you_mean

RESULT = "result.json"
"""Name of the result file in the folder of each finished run."""
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5% quantiles of Student's t with 1, 2, ... degrees of freedom. For more degrees of freedom than this list has, the
last quantile is used, which makes intervals slightly too wide.
"""


@dataclass(frozen=True)
class Switch:
    """A switch that is on in the recipe.

    Attributes:
        name: "section.name".
        on, off: value of the switch in the recipe, and its value when it is off.
    """

    name: str
    on: Any
    off: Any


@dataclass(frozen=True)
class Run:
    """One training of the ablation.

    Attributes:
        switch: the switch that is off; None: no switch is off.
        seed, recipe: seed and recipe of the run.
        folder: folder of the run.
    """

    switch: Switch | None
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        """Name of the run, such as "recipe, seed 0" or "without mix.mixup, seed 0"."""
        return f"{f'without {self.switch.name}' if self.switch else 'recipe'}, seed {self.seed}"


@dataclass(frozen=True)
class Worth:
    """The effect of one switch.

    Attributes:
        with_it, without_it: metrics with and without the switch, for the seeds whose two runs have finished.
        differences: difference of the two metrics for each seed; positive if the switch helps.
    """

    switch: Switch
    with_it: tuple[float, ...]
    without_it: tuple[float, ...]
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean_of(self.differences)

    @property
    def error(self) -> float | None:
        """Standard error of the mean difference; None for one seed."""
        count = len(self.differences)
        return deviation_of(self.differences) / math.sqrt(count) if count > 1 else None

    @property
    def interval(self) -> float | None:
        """Half the width of the 95% interval of the mean difference; None for one seed."""
        free = len(self.differences) - 1
        return None if self.error is None else STUDENT[min(free, len(STUDENT)) - 1] * self.error

    @property
    def verdict(self) -> str:
        """ "helps", "hurts", "within noise", or the reason why there is no verdict."""
        interval = self.interval
        if not math.isfinite(self.mean):
            return "not finite"
        if not any(self.differences):
            return "no effect: does the task use it?"
        if interval is None:
            return "the noise needs more than one repeat"
        if interval == 0:
            return "equal in all repeats: too few to tell"
        if abs(self.mean) <= interval:
            return "within noise"
        return "helps" if self.mean > 0 else "hurts"


@dataclass(frozen=True)
class Ablation:
    """The results of an ablation: a recipe and the effects of its switches.

    Attributes:
        metric: the metric by which runs are compared.
        maximize: whether a higher metric is better.
        values: metric of the whole recipe by seed, for finished runs.
        worths: worth of each switch that has at least one finished pair of runs.
        finished, runs: number of finished runs, and of all runs.
    """

    recipe: Recipe
    metric: str
    maximize: bool
    values: dict[int, float]
    worths: tuple[Worth, ...]
    finished: int
    runs: int

    def plain(self) -> dict[str, Any]:
        """The ablation as JSON values."""
        plain = {
            "metric": self.metric,
            "maximize": self.maximize,
            "finished": self.finished,
            "runs": self.runs,
            "recipe": self.recipe.plain(),
            "values": {str(seed): value for seed, value in self.values.items()},
            "switches": [
                {
                    "switch": worth.switch.name,
                    "on": worth.switch.on,
                    "off": worth.switch.off,
                    "with": worth.with_it,
                    "without": worth.without_it,
                    "worth": worth.mean,
                    "standard_error": worth.error,
                    "interval": worth.interval,
                    "verdict": worth.verdict,
                }
                for worth in self.worths
            ],
        }
        return finite(plain)  # type: ignore[no-any-return]

    def csv(self) -> str:
        """The ablation as CSV, with a row for each switch."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["switch", "on", "off", "metric", "with", "without", "worth", "standard_error", "repeats", "verdict"]
        )
        for worth in self.worths:
            means = [mean_of(worth.with_it), mean_of(worth.without_it), worth.mean]
            head = [worth.switch.name, json.dumps(worth.switch.on), json.dumps(worth.switch.off), self.metric]
            error = "" if worth.error is None else worth.error
            writer.writerow([*head, *means, error, len(worth.differences), worth.verdict])
        return file.getvalue()


# ---- before the runs -------------------------------------------------------------------------------------------------


def switches_of(recipe: Recipe, texts: Sequence[str]) -> list[Switch]:
    """Parse switches, "section.name" or "section.name=value"; in the second form, this value counts as off.

    Raises:
        InputError: a switch does not exist, is given twice, names the seed, or is already off in the recipe.
    """
    known = [f"{section}.{name}" for section, values in recipe.plain().items() for name in values]
    names = [text.partition("=")[0].strip() for text in texts]
    found = []
    for text, name in zip(texts, names, strict=True):
        if name not in known:
            near = did_you_mean(name, known) or ", e.g. mix.mixup"
            raise InputError(f"--ablate {name}: expected a switch of the recipe, SECTION.NAME{near}")
        if name == "run.seed":
            raise InputError("--ablate run.seed: each repeat has its own seed; give a switch of the recipe")
        if names.count(name) > 1:
            raise InputError(f"--ablate {name}: given {names.count(name)} times, expected once")
        without = recipe.with_values([text]) if "=" in text else Recipe()
        on, off = _value_of(recipe, name), _value_of(without, name)
        if on == off:
            raise InputError(
                f"--ablate {text}: with and without the switch, {name}={json.dumps(off)}: turn it on with --set "
                f"{name}=VALUE, or name another value to compare with, --ablate {name}=VALUE"
            )
        found.append(Switch(name, on, off))
    return found


def runs_of(recipe: Recipe, switches: Sequence[Switch], repeats: int, folder: Path) -> list[Run]:
    """List all runs, seed by seed, so that an ablation that stops early has complete pairs for the first seeds."""
    runs = []
    for seed in range(recipe.run.seed, recipe.run.seed + repeats):
        seeded = recipe.updated({"run": {"seed": seed}})
        runs.append(Run(None, seed, seeded, folder / "recipe" / f"seed-{seed}"))
        for switch in switches:
            section, _, key = switch.name.partition(".")
            without = seeded.updated({section: {key: switch.off}})
            runs.append(Run(switch, seed, without, folder / f"without-{switch.name}" / f"seed-{seed}"))
    return runs


def results_of(runs: Sequence[Run]) -> dict[Path, float]:
    """Read the metric of each finished run, by its folder.

    Raises:
        InputError: a folder has the result of another recipe, or an invalid result file.
    """
    found = {}
    for run in runs:
        path = run.folder / RESULT
        if not path.exists():
            continue
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            recipe, value = result["recipe"], result["value"]
            value = math.nan if value is None else float(value)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a result of a training: remove it, and the run is repeated") from error
        if recipe != _as_json(run.recipe):
            raise InputError(f"{run.folder} holds a run of another recipe: expected another --out for this one")
        found[run.folder] = value
    return found


# ---- the runs --------------------------------------------------------------------------------------------------------


def ablate(
    recipe: Recipe,
    runs: Sequence[Run],
    results: dict[Path, float],
    train: Callable[[Run], Fitted],
    metric: str,
    maximize: bool,
    told: Callable[[Run, float, float, Ablation], None],
    write: bool = True,
) -> Ablation:
    """Train the unfinished runs, and report after each one.

    Args:
        recipe: the whole recipe.
        runs: the result of `runs_of`.
        results: the result of `results_of`. With several ranks, all ranks must read the results before any rank trains,
            so that all ranks train the same runs.
        train: trains one run, and may resume an interrupted run. If it raises DivergedError, the metric of the run is
            NaN.
        metric: name of the metric by which runs are compared; its value in the last evaluation counts.
        maximize: whether a higher metric is better.
        told: called after each run, with the run, its metric, its seconds, and the ablation so far.
        write: whether this process writes results; with several ranks, only the first rank does.

    Returns:
        The ablation. If a run was stopped (`Fitted.reason`), the ablation is incomplete, and the same call later
        continues with that run.

    Raises:
        InputError: the evaluation of a run does not report `metric`.
    """
    for run in runs:
        if run.folder in results:
            continue
        began = time.monotonic()
        try:
            fitted = train(run)
        except DivergedError:
            value = math.nan
        else:
            if fitted.reason.startswith("stopped"):
                break
            if fitted.last is None or metric not in fitted.last.values:
                raise InputError(f"an ablation compares {metric} on validation data, but the task does not report it")
            value = fitted.last.values[metric]
        seconds = time.monotonic() - began
        results[run.folder] = value
        if write:
            result = {"value": finite(value), "seconds": seconds, "recipe": _as_json(run.recipe)}
            with writing_to(run.folder / RESULT):
                write_whole(run.folder / RESULT, json.dumps(result, indent=1) + "\n")
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # a finished run needs no checkpoints
        told(run, value, seconds, compared(recipe, runs, results, metric, maximize))
    return compared(recipe, runs, results, metric, maximize)


def compared(recipe: Recipe, runs: Sequence[Run], results: dict[Path, float], metric: str, maximize: bool) -> Ablation:
    """Compute the worth of each switch from the finished runs."""
    whole = {run.seed: results[run.folder] for run in runs if run.switch is None and run.folder in results}
    worths = []
    for switch in dict.fromkeys(run.switch.name for run in runs if run.switch is not None):
        mine = [run for run in runs if run.switch is not None and run.switch.name == switch]
        pairs = [(whole[run.seed], results[run.folder]) for run in mine if run.seed in whole and run.folder in results]
        if pairs and mine[0].switch is not None:
            with_it, without_it = zip(*pairs, strict=True)
            sign = 1 if maximize else -1
            differences = tuple(sign * (one - other) for one, other in pairs)
            worths.append(Worth(mine[0].switch, with_it, without_it, differences))
    return Ablation(recipe, metric, maximize, whole, tuple(worths), len(results), len(runs))


def mean_of(values: Sequence[float]) -> float:
    """The mean of the values; NaN if a value is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def deviation_of(values: Sequence[float]) -> float:
    """The sample standard deviation (divisor n - 1) of two or more values; NaN if a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def write_ablation(ablation: Ablation, folder: Path) -> None:
    """Write ablation.json and ablation.csv, each atomically."""
    for name, text in (("json", json.dumps(ablation.plain(), indent=1) + "\n"), ("csv", ablation.csv())):
        with writing_to(folder / f"ablation.{name}"):
            write_whole(folder / f"ablation.{name}", text)


def _value_of(recipe: Recipe, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key)


def _as_json(recipe: Recipe) -> Any:
    return json.loads(json.dumps(recipe.plain()))
