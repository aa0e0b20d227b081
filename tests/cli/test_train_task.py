"""`rooftop train NAME`: tasks by name, recipes from three places, folders that hold a run, ablations."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftop.cli import train_task
from rooftop.cli.commands import names
from rooftop.cli.commands.train_task import KNOWN, task_of
from rooftop.cli.main import main
from rooftop.cli.train_task import EVENT_FILES, PLOTLY, SAFETENSORS
from rooftop.parallel import World
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord
from rooftop.train.recipes.recipe import Recipe, published_recipes
from rooftop.train.tasks import finding
from rooftop.train.tasks.finding import find_task, needs_of
from rooftop.train.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]
CIRCLE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from rooftop.train.tasks.task import Task

RECIPE = {"run": {"epochs": 2, "batch": 20}, "optimizer": {"lr": 0.3}, "mix": {"mixup": 0.2}}
RECIPE["loading"] = {"how": "here"}
BUILT = []

def build(data, recipe):
    BUILT.append((data, recipe))
    points = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    inside = (points.norm(dim=1) < 0.75).long()
    return Task(
        model=nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)),
        train=TensorDataset(points[:40], inside[:40]),
        valid=TensorDataset(points[40:], inside[40:]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        best="accuracy",
        maximize=True,
        unit="points",
    )
"""
TRAIN = ["train", "circle.py:build"]


@pytest.fixture(autouse=True)
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a task, without plotly's five megabytes on each page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rooftop.train.reports.page.require_plotly", lambda: "/* plotly */")
    monkeypatch.setattr(train_task, "require_plotly", lambda: "/* plotly */")
    monkeypatch.setattr(train_task, "TensorBoard", lambda folder, recipe: Quiet())
    (tmp_path / "circle.py").write_text(CIRCLE)


class Quiet:
    """An observer that does nothing: TensorBoard takes a second to import."""

    def began(self, facts: Facts, task: Task) -> None: ...
    def stepped(self, records: list[StepRecord]) -> None: ...
    def evaluated(self, record: EvaluationRecord) -> None: ...
    def noted(self, note: str) -> None: ...
    def ended(self, fitted: Fitted, model: Any) -> None: ...


class FitInPlace:
    """A stand-in for `fit` that records each call, makes a step, and ends with an accuracy that depends on the
    recipe."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.reason = "done"

    def __call__(
        self, task: Task, recipe: Recipe, *, device: str, out: Path, resume: bool, observers: Sequence[Observer]
    ) -> Fitted:
        self.recipes.append(recipe)
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        (out / "recipe.toml").write_text(recipe.toml())
        (out / "metrics.jsonl").write_text('{"step": 1}\n')
        (out / "best.safetensors").touch()
        accuracy = 0.8 + (0.05 if recipe.mix.mixup else 0) + 0.001 * recipe.run.seed * (1 + recipe.mix.mixup)
        record = EvaluationRecord(4, 2.0, {"loss": 1.0, "accuracy": accuracy}, True)
        for each in observers:
            each.began(Facts(10, 10, 40, 20, 4, 2, 0, 1, "cpu", ""), task)
            each.stepped([StepRecord(4, 2.0, 1.0, 1.0, 0.1, 20.0, 0.0, 0)])
            each.evaluated(record)
        fitted = Fitted(4, 1.0, self.reason, record, record, out)
        for each in observers:
            each.ended(fitted, task.model)
        return fitted


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> FitInPlace:
    stand_in = FitInPlace()
    monkeypatch.setattr(train_task, "fit", stand_in)
    return stand_in


Said = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """The output since the last call, on both streams."""

    def look() -> str:
        out, err = capsys.readouterr()
        return out + err

    return look


# ---- names and help --------------------------------------------------------------------------------------------------


def test_names_are_those_of_tasks_and_recipes() -> None:
    assert tuple(names.TASKS) == finding.TASKS
    assert tuple(published_recipes()) == names.RECIPES
    assert {section: values.split() for section, values in names.SWITCHES.items()} == {
        section: list(values) for section, values in Recipe().plain().items()
    }


@pytest.mark.parametrize("name", KNOWN)
def test_each_name_finds_the_task_that_help_describes(name: str) -> None:
    build, values = finding.find_task(name)
    assert build.__module__ == f"rooftop.train.tasks.{task_of(name)}"
    Recipe.of(values)


def test_help_of_the_group_lists_tasks_and_ones_own(said: Said) -> None:
    assert main(["train", "--help"]) == 0
    text = said()
    assert all(f"  {name} " in text for name in ("gpt", *names.TASKS, "my_pkg.task:build"))


@pytest.mark.parametrize("name", ["resnet", "swin_t", "detr", "circle.py:build"])
def test_help_of_a_task_teaches(name: str, said: Said) -> None:
    assert main(["train", name, "--help"]) == 0
    text = said()
    for word in (f"rooftop train {name} --data ", "--ablate", "torchrun", "label_smoothing", "page.html", "--resume"):
        assert word in text, word


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("resnte", "No such task 'resnte' (did you mean resnet?)"),
        ("resnet51", "(did you mean resnet50?)"),
        ("convlstm", "(did you mean conv_lstm?)"),
        ("my_pkg.task", "a task of your own is MODULE:FUNCTION: my_pkg.task:build"),
        ("zzzqq", "expected gpt, resnet, swin, hybrid, detr, conv_lstm, sparse_unet or my_pkg.task:build"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name: str, answer: str, said: Said) -> None:
    assert main(["train", name]) == 2
    assert answer in said()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--epochs", "0"], "--epochs"),
        (["--epoch", "3"], "did you mean --epochs"),
        (["--set", "optimizer.rl=1"], "optimizer has no 'rl': expected lr"),
        (["--set", "lr=1"], "expected SECTION.NAME=VALUE"),
        (["--config", "resnet50-v3"], "did you mean resnet50-v2?"),
        (["--repeats", "3"], "expected --ablate"),
        (["--ablate", "mix.mixup,,ema.decay"], "expected switches separated by commas,"),
        (["--ablate", "mix.cutmix"], "turn it on with --set mix.cutmix=VALUE"),
        (["--seed", "1", "--seed", "2"], "given 2 times"),
    ],
)
def test_a_wrong_call_says_what_was_expected(words: list[str], answer: str, said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN, *words]) == 2
    assert answer in said()
    assert not fit.recipes
    assert not Path("runs").exists()


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_options_go_before_set_before_the_file_before_the_task(fit: FitInPlace) -> None:
    Path("recipe.toml").write_text("[optimizer]\nlr = 0.1\nmomentum = 0.5\n[run]\nseed = 1\nsteps = 7\n")
    words = ["--config", "recipe.toml", "--set", "optimizer.momentum=0.6", "--set", "run.seed=2", "--seed", "3"]
    assert main([*TRAIN, *words, "--epochs", "1.5", "--weights", "start.pth", "--num-classes", "3"]) == 0
    recipe = fit.recipes[0]
    assert (recipe.run.batch, recipe.optimizer.lr, recipe.optimizer.momentum) == (20, 0.1, 0.6)
    assert (recipe.run.seed, recipe.run.epochs, recipe.run.steps) == (3, 1.5, 0)
    assert (recipe.model.weights, recipe.model.num_classes) == ("start.pth", 3)


def test_the_printed_recipe_is_a_file_for_config(said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN, "--set", "ema.decay=0.9", "--print-recipe"]) == 0
    Path("recipe.toml").write_text(said())
    assert Recipe.read(Path("recipe.toml")) == Recipe.read(Path("recipe.toml"), Recipe.of({"run": {"batch": 1}}))
    assert Recipe.read(Path("recipe.toml")).ema.decay == 0.9
    assert not fit.recipes


def test_what_data_a_recipe_and_a_training_are_for_is_said(said: Said, fit: FitInPlace) -> None:
    for words, data in (([], " --data digits"), (["--data", "photographs"], " --data photographs")):
        assert main(["train", "resnet50", *words, "--device", "cpu", "--print-recipe"]) == 0
        assert said().startswith(f"# The recipe of rooftop train resnet50{data} on cpu. With other data")
    assert main([*TRAIN, "--print-recipe"]) == 0
    assert said().startswith("# The recipe of rooftop train circle.py:build on cpu.")
    assert main(["train", "resnet", "--device", "cpu"]) == 0
    assert "note: no --data, so this trains on digits" in said()


def test_ranks_begin_with_the_same_weights(fit: FitInPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.Tensor] = []
    stand_in = FitInPlace.__call__

    def noting(self: FitInPlace, task: Task, recipe: Recipe, **options: Any) -> Fitted:
        built.append(next(task.model.parameters()).detach().clone())
        return stand_in(self, task, recipe, **options)

    monkeypatch.setattr(FitInPlace, "__call__", noting)
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        torch.rand(3)
        assert main([*TRAIN, "--out", out, "--seed", seed]) == 0
    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN, "--out", "first"]) == 0
    said()
    assert main([*TRAIN, "--out", "first"]) == 2
    assert "first already holds a run: expected --resume to continue it, or another --out" in said()
    assert len(fit.recipes) == 1


def test_what_failed_before_its_first_step_is_no_run(said: Said, fit: FitInPlace) -> None:
    Path("first").mkdir()
    train_task.begin(Path("first"), train_task.Call("circle.py:build", None), Recipe())
    assert main([*TRAIN, "--out", "first"]) == 0


def test_resume_takes_recipe_and_data_of_the_run(said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN, "--data", "here", "--set", "optimizer.lr=0.7"]) == 0
    assert main([*TRAIN, "--resume"]) == 0
    assert fit.recipes[0] == fit.recipes[1]
    assert json.loads(Path("runs/circle.py/call.json").read_text())["data"] == "here"
    said()
    assert main([*TRAIN, "--resume", "--data", "there"]) == 2
    again = "rooftop train circle.py:build --out runs/circle.py --resume"
    assert f"holds a run of --data here, not there: continue it with `{again}`" in said()
    assert main(["train", "resnet", "--resume", "--out", "runs/circle.py"]) == 2
    assert "holds a run of task circle.py:build, not resnet" in said()
    assert main([*TRAIN, "--resume", "--ablate", "mix.mixup"]) == 2
    assert "holds a training, not an ablation" in said()


def test_resume_of_nothing_begins(fit: FitInPlace) -> None:
    assert main([*TRAIN, "--resume"]) == 0
    assert len(fit.recipes) == 1


def test_one_error_names_all_missing_packages(said: Said, fit: FitInPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sklearn", "safetensors", "plotly", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", "resnet", "--data", "digits"]) == 1
    assert said() == (
        "rooftop: error: rooftop train resnet --data digits needs scikit-learn (the digits) and safetensors (files of "
        "weights); plotly (the page) and tensorboard (event files) are useful: pip install "
        '"rooftop[ladder,weights,report,train]"\n'
    )
    assert not Path("runs").exists()
    assert main([*TRAIN, "--no-page", "--ablate", "mix.mixup"]) == 1
    assert said() == (
        "rooftop: error: rooftop train circle.py:build needs safetensors (files of weights): pip install "
        '"rooftop[weights]"\n'
    )


def test_without_page_and_event_files_it_trains(said: Said, fit: FitInPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plotly", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(TRAIN) == 0
    out = said()
    assert (
        "note: without plotly (the page) and tensorboard (event files), which are not installed: pip install "
        '"rooftop[report,train]"\n'
    ) in out
    assert "page:" not in out
    assert len(fit.recipes) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_task_needs_is_an_extra_that_installs_it(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for data in (None, "digits", "folder"):
        build, _ = find_task(name, data)
        for each in [*needs_of(build, data), SAFETENSORS, PLOTLY, EVENT_FILES]:
            assert any(re.match(rf"{re.escape(each.package)}\b", line) for line in extras[each.name]), each


def test_a_folder_that_cannot_be_made_is_said_in_one_line(said: Said, fit: FitInPlace) -> None:
    Path("file").touch()
    assert main([*TRAIN, "--out", "file/run"]) == 2
    assert "file/run cannot be written (Not a directory): expected a path in a folder with" in said()


# ---- messages --------------------------------------------------------------------------------------------------------


def test_the_end_says_where_all_is_and_how_to_use_it(said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN]) == 0
    text = said()
    assert "page: runs/circle.py/page.html" in text
    assert "weights: runs/circle.py/best.safetensors" in text
    assert "best accuracy 0.8500 at epoch 2" in text
    assert main([*TRAIN, "--out", "quiet", "--no-page"]) == 0
    assert not Path("quiet/page.html").exists()


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("resnet18", "rooftop classify photo.png --model resnet18 --weights w.safetensors"),
        ("detr_resnet50", "rooftop detect photo.png --model detr_resnet50 --weights w.safetensors"),
        ("mine", None),
    ],
)
def test_the_next_command_fits_the_model(model: str, command: str | None) -> None:
    assert train_task.next_command(Path("w.safetensors"), {"model": model}) == command
    assert train_task.next_command(Path("w.safetensors"), {}) is None


@pytest.mark.parametrize(("reason", "status"), [("stopped by SIGTERM", 143), ("stopped by Ctrl-C", 130)])
def test_a_stopped_training_ends_as_its_signal_says(reason: str, status: int, said: Said, fit: FitInPlace) -> None:
    fit.reason = reason
    assert main([*TRAIN]) == status
    assert "next: rooftop train circle.py:build --out runs/circle.py --resume" in said()


def test_only_rank_0_speaks_and_writes(said: Said, fit: FitInPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def second_rank(**options: Any) -> Iterator[World]:
        yield World(1, 2, torch.device("cpu"))

    monkeypatch.setattr(train_task, "join", second_rank)
    assert main([*TRAIN, "--ablate", "mix.mixup", "--repeats", "1"]) == 0
    assert main([*TRAIN, "--out", "other"]) == 0
    assert said() == ""
    assert len(fit.recipes) == 3
    assert not list(Path().rglob("*.html")) + list(Path().rglob("call.json")) + list(Path().rglob("result.json"))


# ---- ablations -------------------------------------------------------------------------------------------------------


def test_an_ablation_is_a_table_files_and_a_page(said: Said, fit: FitInPlace) -> None:
    assert main([*TRAIN, "--ablate", "mix.mixup, optimizer.lr=0.1", "--repeats", "2"]) == 0
    text = said()
    assert "6 runs, 0 of them already finished, in runs/circle.py" in text
    assert re.search(r"without mix\.mixup, seed 1: accuracy 0\.8010 \(\d+\.\d s\)", text)
    row = next(line.split() for line in text.splitlines() if line.startswith("mix.mixup"))
    assert row[:6] == ["mix.mixup", "0.2", "(0.0)", "0.8506", "0.8005", "+0.0501"]
    assert row[7:] == ["helps"]
    folder = Path("runs/circle.py")
    assert {path.name for path in folder.glob("ablation.*")} == {"ablation.csv", "ablation.json", "ablation.html"}
    assert [recipe.run.seed for recipe in fit.recipes] == [0, 0, 0, 1, 1, 1]


def test_a_stopped_ablation_goes_on_where_it_was(said: Said, fit: FitInPlace) -> None:
    fit.reason = "stopped by SIGTERM"
    assert main([*TRAIN, "--ablate", "mix.mixup", "--repeats", "2"]) == 143
    assert "rooftop train circle.py:build --out runs/circle.py --resume continues" in said()
    fit.reason = "done"
    assert main([*TRAIN, "--resume"]) == 0
    assert "helps" in said()
    assert len(fit.recipes) == 5
    assert main([*TRAIN, "--resume", "--repeats", "3"]) == 0
    assert "6 runs, 4 of them already finished," in said()
    assert len(fit.recipes) == 7


def test_a_run_that_diverges_does_not_end_the_ablation(said: Said) -> None:
    pytest.importorskip("safetensors")
    words = ["--device", "cpu", "--no-page", "--set", "mix.mixup=0", "--ablate", "optimizer.lr=1e38", "--repeats", "2"]
    assert main([*TRAIN, *words]) == 0
    text = said()
    assert "note: without optimizer.lr, seed 0 diverged: step" in text
    assert "4 runs, 0 of them" in text
    assert next(line for line in text.splitlines() if line.startswith("optimizer.lr")).endswith("not finite")


# ---- whole runs
# -------------------------------------------------------------------------------------------------------


def test_a_task_of_ones_own_trains_and_resumes(said: Said) -> None:
    """The real loop makes a complete run. The run is resumed at its end, and refused without --resume."""
    pytest.importorskip("safetensors")
    assert main([*TRAIN, "--device", "cpu", "--set", "mix.mixup=0"]) == 0
    text = said()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("epoch")] == ["1/2", "2/2"]
    assert "42 parameters, on 1 x cpu" in text
    folder = Path("runs/circle.py")
    assert {"page.html", "best.safetensors", "recipe.toml", "metrics.jsonl"} <= set(os.listdir(folder))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4 + 2
    assert main([*TRAIN, "--device", "cpu"]) == 2
    assert main([*TRAIN, "--device", "cpu", "--resume"]) == 0
    assert "continuing after step 4" in said()
