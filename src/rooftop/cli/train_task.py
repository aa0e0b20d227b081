"""`rooftop train NAME|my_pkg.task:build`: train a task, or measure the effect of the switches of its recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from rooftop.analysis.page import require_plotly
from rooftop.cli.commands import names
from rooftop.cli.commands.train_task import usual_data
from rooftop.cli.consoles import output_console
from rooftop.cli.progress import progress_bar
from rooftop.cli.trained_models import seeded
from rooftop.data.device_images import DecodingChoice
from rooftop.doctor.extras import Extra, check_extras, missing
from rooftop.errors import DivergedError, InputError, ModelRunError
from rooftop.parallel import World, join, others_wait
from rooftop.train.checkpoints.folders import writing_to
from rooftop.train.checkpoints.locks import locked
from rooftop.train.fitting.loop import fit
from rooftop.train.fitting.metric_lines import METRICS, read_metrics
from rooftop.train.fitting.records import Facts, Fitted, Observer, StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.ablation_tables import ablation_heading, ablation_page, ablation_table
from rooftop.train.reports.ablations import Ablation, Run, ablate, results_of, runs_of, switches_of, write_ablation
from rooftop.train.reports.page import Page
from rooftop.train.reports.shields import Shielded
from rooftop.train.reports.tensorboard import TensorBoard
from rooftop.train.reports.terminal import Terminal, seconds_text, value_text
from rooftop.train.stopping import INTERRUPTED_STATUS, STOPPED_STATUS
from rooftop.train.tasks.finding import find_task, needs_of
from rooftop.train.tasks.task import Build, Task
from rooftop.whole_files import write_whole

RUNS = Path("runs")
RECIPE, CALL, PAGE, ABLATION_PAGE = "recipe.toml", "call.json", "page.html", "ablation.html"
HOLDS = (METRICS, "checkpoints/step-*", f"*/seed-*/{METRICS}")
"""Files that show that a folder contains a run: a training, alone or in an ablation, that has made at least one
step."""
REPEATS = 3
SAFETENSORS = Extra("weights", "safetensors", "safetensors", "files of weights")
PLOTLY = Extra("report", "plotly", "plotly", "the page")
EVENT_FILES = Extra("train", "tensorboard", "tensorboard", "event files")


@dataclass(frozen=True)
class Call:
    """The arguments of the command that are not in the recipe. A file in the run's folder stores these arguments for
    --resume.

    Attributes:
        task: the task's name.
        data: the value of --data.
        ablate: the switches; empty for a single training.
        repeats: number of seeds for each recipe.
    """

    task: str
    data: str | None
    ablate: tuple[str, ...] = ()
    repeats: int = REPEATS


def train_task(
    *,
    name: str,
    data: str | None,
    config: Path | None,
    values: tuple[str, ...],
    out: Path | None,
    resume: bool,
    device: str | None,
    epochs: float | None,
    seed: int | None,
    weights: str | None,
    num_classes: int | None,
    ablate: tuple[str, ...],
    repeats: int | None,
    page: bool,
    print_recipe: bool,
) -> int:
    """Run the command that `rooftop.cli.commands.train_task:task_command` describes. Returns the exit status."""
    if repeats is not None and not (ablate or resume):
        raise click.UsageError("--repeats counts the seeds of an ablation: expected --ablate SECTION.NAME,...")
    folder = out or RUNS / re.sub(r"[^\w.-]+", "-", name.removesuffix(":build"))
    before = None if print_recipe else earlier_call(folder, resume)
    call = call_of(Call(name, data, ablate, repeats or REPEATS), before, folder, repeats_given=repeats is not None)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    build, defaults = find_task(name, call.data, kind)
    short: dict[str, dict[str, Any]] = {
        "run": {"epochs": epochs, "seed": seed},
        "model": {"weights": weights, "num_classes": num_classes},
    }
    recipe = recipe_of(name, defaults, config, values, short, folder / RECIPE if before is not None else None)
    if print_recipe:
        known = call.data or usual_data(name)
        words = f" --data {known}" if known else ""
        click.echo(f"# The recipe of rooftop train {name}{words} on {kind}. With other data, the recipe may differ.")
        click.echo(recipe.toml())
        return 0
    drawn = [PLOTLY] if page else []
    useful = drawn if call.ablate else [*drawn, EVENT_FILES]
    words = f"rooftop train {name}{'' if call.data is None else f' --data {call.data}'}"
    note = check_extras(words, [*needs_of(build, call.data), SAFETENSORS], useful)
    runs = runs_of(recipe, switches_of(recipe, call.ablate), call.repeats, folder) if call.ablate else []
    results = results_of(runs)
    settings = {"task": name, "data": call.data, "recipe": recipe.toml(), "folder": str(folder), "ablate": call.ablate}
    with join(settings=settings, device=kind) as world, locked(folder) if world.rank == 0 else nullcontext():
        if world.rank == 0:
            begin(folder, call, recipe)
            if note:
                _warn(f"note: {note}")
            if call.data is None and (usual := usual_data(name)):
                _warn(f"note: no --data, so this trains on {usual}")
        training = _Training(build, call, folder, world, page)
        return training.ablated(recipe, runs, results) if runs else training.trained(recipe)


# ---- before the work -------------------------------------------------------------------------------------------------


def earlier_call(folder: Path, resume: bool) -> Call | None:
    """Return the call whose run is in the folder; None if the folder contains no run.

    Raises:
        InputError: the folder contains a run but --resume is not given, or the file of the call is damaged.
    """
    found = [path for each in HOLDS for path in folder.glob(each)]
    if not any(path.is_dir() or path.stat().st_size for path in found):
        return None
    if not resume:
        raise InputError(f"{folder} already holds a run: expected --resume to continue it, or another --out")
    path = folder / CALL
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Call(found["task"], found["data"], tuple(found["ablate"]), found["repeats"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so the run cannot continue: {error}") from error


def call_of(given: Call, before: Call | None, folder: Path, *, repeats_given: bool) -> Call:
    """Return the call to make, from the given arguments. Missing arguments come from the earlier run.

    Raises:
        InputError: the folder contains a run of another task or of other data, or --ablate is given, but the folder
            contains a training.
    """
    if before is None:
        return given
    again = f"rooftop train {before.task} --out {folder} --resume"
    for what, here, there in (("task", given.task, before.task), ("--data", given.data, before.data)):
        if here is not None and here != there:
            raise InputError(
                f"{folder} holds a run of {what} {there}, not {here}: continue it with `{again}`, or choose another "
                "--out"
            )
    if given.ablate and not before.ablate:
        raise InputError(f"{folder} holds a training, not an ablation: expected another --out")
    repeats = given.repeats if repeats_given else before.repeats
    return Call(before.task, before.data, given.ablate or before.ablate, repeats)


def recipe_of(
    name: str,
    defaults: Mapping[str, Any],
    config: Path | None,
    values: Sequence[str],
    short: Mapping[str, Mapping[str, Any]],
    saved: Path | None,
) -> Recipe:
    """Return the recipe of the task or of the resumed run, changed by --config, --set and short options.

    Raises:
        InputError: a value is invalid.
    """
    recipe = Recipe().updated(defaults, f"the recipe of {name}")
    if saved is not None and saved.is_file():
        recipe = Recipe.read(saved)
    if config is not None:
        recipe = Recipe.read(config, recipe)
    recipe = recipe.with_values(values)
    for section, each in short.items():
        given = {key: value for key, value in each.items() if value is not None}
        if "epochs" in given:
            given["steps"] = 0  # a recipe's steps would take precedence over the given epochs
        recipe = recipe.updated({section: given}, "the options")
    return recipe


def begin(folder: Path, call: Call, recipe: Recipe) -> None:
    """Write the files of the run that --resume needs.

    Raises:
        InputError, OSError: the folder cannot be written; see `writing_to`.
    """
    kept = {"task": call.task, "data": call.data, "ablate": list(call.ablate), "repeats": call.repeats}
    with writing_to(folder):
        write_whole(folder / CALL, json.dumps(kept, indent=1) + "\n")
        if call.ablate:  # without --ablate, the training itself writes its recipe
            write_whole(folder / RECIPE, recipe.toml())


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Training:
    """What all runs of one `rooftop train` command share: the task, the command's options, the output folder and the
    ranks.
    """

    build: Build
    call: Call
    folder: Path
    world: World
    page: bool

    def trained(self, recipe: Recipe) -> int:
        """Train once, and print the result and the next commands."""
        with progress_bar(self._first) as progress:
            recipe, task = self._decided(recipe)
            observers = self._observers(recipe, progress) if self._first else []
            fitted = self._fit(task, recipe, self.folder, observers)
        if self._first:
            for line in told_at_the_end(fitted, self.call.task, self.folder, task.metadata):
                click.echo(line)
        return status_of(fitted)

    def ablated(self, recipe: Recipe, runs: Sequence[Run], results: dict[Path, float]) -> int:
        """Run the unfinished runs of an ablation, and show the results of all runs."""
        if recipe.augment.decode == "auto":
            raise InputError("an ablation needs the same decoding in all runs: expected augment.decode cpu or gpu")
        task = self._task(recipe)
        plotly = require_plotly() if self._first and self.page and not missing([PLOTLY]) else None
        if self._first:
            click.echo(f"{len(runs)} runs, {len(results)} of them already finished, in {self.folder}")
        fitted: Fitted | None = None  # of the last run that did not diverge

        def told(run: Run, value: float, seconds: float, ablation: Ablation) -> None:
            if self._first:
                click.echo(f"{run.name}: {task.best} {value_text(value)} ({seconds_text(seconds)})")
                self._write(ablation, plotly)

        with progress_bar(self._first) as progress:

            def train(run: Run) -> Fitted:
                nonlocal fitted
                done = (len(results), len(runs), run.name)
                observers: list[Observer] = [_RunProgress(progress, *done)] if self._first else []
                try:
                    fitted = self._fit(self._task(run.recipe), run.recipe, run.folder, observers)
                except DivergedError as error:
                    if self._first:
                        _warn(f"note: {run.name} diverged: {error}")
                    raise
                except ModelRunError as error:
                    raise ModelRunError(f"{run.name}: {error}") from error
                return fitted

            ablation = ablate(recipe, runs, results, train, task.best, task.maximize, told=told, write=self._first)
        stopped = fitted if ablation.finished < ablation.runs else None
        if self._first:
            self._write(ablation, plotly)
            click.echo(f"\n{ablation_heading(ablation)}")
            output_console(highlight=False).print(ablation_table(ablation))
            click.echo(f"\n{', '.join(str(path) for path in sorted(self.folder.glob('ablation.*')))}")
            if stopped is not None:
                click.echo(f"{stopped.reason}; {resumed_by(self.call.task, self.folder)} continues", err=True)
        return 0 if stopped is None else status_of(stopped)

    @property
    def _first(self) -> bool:
        return self.world.rank == 0

    def _task(self, recipe: Recipe) -> Task:
        with seeded(recipe.run.seed):  # same initial values on all ranks
            return self.build(self.call.data, recipe)

    def _decided(self, recipe: Recipe) -> tuple[Recipe, Task]:
        """Return the recipe and its task, with augment.decode=auto replaced by the device that is faster on rank 0. A
        resumed run reads this choice from its recipe.toml."""
        task = self._task(recipe)
        if recipe.augment.decode != "auto":
            return recipe, task
        choice = DecodingChoice("cpu", "this task does not decode images on a GPU")
        if self._first and task.decoding is not None:
            with others_wait("measuring the decoding of images"):
                choice = task.decoding(self.world.device)
        if self.world.size > 1:
            choices = [choice]
            dist.broadcast_object_list(choices, 0)
            choice = choices[0]
        if self._first:
            click.echo(f"images are decoded by the {choice.device.upper()}: {choice.why}")
        recipe = recipe.updated({"augment": {"decode": choice.device}}, "the measurement")
        return recipe, task if choice.device == "cpu" else self._task(recipe)

    def _fit(self, task: Task, recipe: Recipe, folder: Path, observers: Sequence[Observer]) -> Fitted:
        return fit(task, recipe, device=self.world.device.type, out=folder, resume=True, observers=observers)

    def _observers(self, recipe: Recipe, progress: Callable[[str, float], None]) -> list[Observer]:
        """Create the observers for the terminal, for TensorBoard if it is installed, and for the HTML page (`PAGE`) if
        it is wanted and Plotly is installed."""
        observers: list[Observer] = [Terminal(recipe, click.echo, _warn, progress)]
        if not missing([EVENT_FILES]):
            observers.append(Shielded(TensorBoard(self.folder / "tensorboard", recipe), "TensorBoard", _warn))
        if self.page and not missing([PLOTLY]):
            lines = self.folder / METRICS
            page = Page(self.folder / PAGE, self.call.task, recipe, lambda step: read_metrics(lines, step))
            observers.append(Shielded(page, "the page", _warn))
        return observers

    def _write(self, ablation: Ablation, plotly: str | None) -> None:
        write_ablation(ablation, self.folder)
        if plotly is not None:
            with writing_to(self.folder / ABLATION_PAGE):
                write_whole(self.folder / ABLATION_PAGE, ablation_page(ablation, self.call.task, plotly))


class _RunProgress:
    """An observer that updates the progress bar of an ablation."""

    def __init__(self, progress: Callable[[str, float], None], finished: int, runs: int, name: str) -> None:
        self._progress, self._finished, self._runs, self._name = progress, finished, runs, name
        self._steps = 1

    def began(self, facts: Facts, task: Any) -> None:
        self._steps = max(1, facts.steps)

    def stepped(self, records: list[StepRecord]) -> None:
        if records:
            self._progress(self._name, (self._finished + records[-1].step / self._steps) / self._runs)

    def evaluated(self, record: Any) -> None: ...

    def noted(self, note: str) -> None:
        _warn(f"note: {self._name}: {note}")

    def ended(self, fitted: Fitted, model: Any) -> None: ...


def _warn(line: str) -> None:
    click.echo(line, err=True)


# ---- afterwards ------------------------------------------------------------------------------------------------------


def told_at_the_end(fitted: Fitted, task: str, folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """Return lines that name the result files and the next commands."""
    lines = [f"page: {folder / PAGE}"] if (folder / PAGE).is_file() else []
    if (folder / "tensorboard").is_dir():
        lines.append(f"curves: tensorboard --logdir {folder.parent}")
    if fitted.reason.startswith("stopped"):
        return [*lines, f"next: {resumed_by(task, folder)}"]
    found = [path for path in (folder / "best.safetensors", folder / "last.safetensors") if path.is_file()]
    if found:
        lines.append(f"weights: {found[0]}")
        if command := next_command(found[0], metadata):
            lines.append(f"next: {command}")
    return lines


def next_command(weights: Path, metadata: Mapping[str, Any]) -> str | None:
    """Return the command that uses the weights of a model; None for a model that no command runs."""
    model = metadata.get("model")
    if model in names.CLASSIFIERS:
        return f"rooftop classify photo.png --model {model} --weights {weights}"
    if model in names.DETECTORS:
        return f"rooftop detect photo.png --model {model} --weights {weights}"
    if isinstance(model, str) and "next_frame" in model:
        return f"rooftop predict-video clip.mp4 --weights {weights}"
    return None


def resumed_by(task: str, folder: Path) -> str:
    """The shell command that continues an interrupted training from its output folder."""
    return f"rooftop train {task} --out {folder} --resume"


def status_of(fitted: Fitted) -> int:
    """The exit status: 0, or the status of the signal that interrupted the training."""
    if fitted.reason == "stopped by SIGTERM":
        return STOPPED_STATUS
    return INTERRUPTED_STATUS if fitted.reason.startswith("stopped") else 0
