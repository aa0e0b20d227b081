"""Tasks by name: built-in ones or the user's, their defaults, and one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftop.errors import InputError, ModelRunError, TargetError
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import TASKS, Task, find_task
from rooftop.train.tasks.finding import over

OWN = """
from torch import nn
from rooftop.errors import InputError
from rooftop.train.tasks import Task

RECIPE = {"run": {"epochs": 5}, "optimizer": {"name": "adamw", "lr": 1e-3}}
RECIPE_CUDA = {"run": {"batch": 512, "precision": "bf16"}, "optimizer": {"lr": 4e-3}}

def build(data, recipe):
    return Task(model=nn.Linear(2, 2), train=[data, recipe], loss=None)

def nothing(data, recipe): pass
def raises(data, recipe): raise KeyError("there")
def refuses(data, recipe): raise InputError("no such data")
class Cls: pass
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with own_pkg/task.py, which is on no path."""
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "__init__.py").touch()
    (tmp_path / "own_pkg" / "task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield tmp_path
    for name in [each for each in sys.modules if each.partition(".")[0] in ("own_pkg", "wrong", "loose")]:
        del sys.modules[name]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["own_pkg.task:build", "own_pkg/task.py:build"])
def test_a_users_task_is_found_from_the_current_folder(name: str) -> None:
    build, defaults = find_task(name)
    recipe = Recipe.of(defaults)
    assert (recipe.run.epochs, recipe.optimizer.name, recipe.run.precision) == (5, "adamw", "fp32")
    task = build("some data", recipe)
    assert isinstance(task, Task)
    assert list(task.train) == ["some data", recipe]  # type: ignore[call-overload]


@pytest.mark.usefixtures("here")
def test_defaults_for_a_gpu_replace_single_values() -> None:
    recipe = Recipe.of(find_task("own_pkg.task:build", device="cuda")[1])
    assert (recipe.run.epochs, recipe.run.batch, recipe.run.precision) == (5, 512, "bf16")
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("adamw", 4e-3)


def test_values_of_both_are_kept_and_the_later_ones_win() -> None:
    assert over({"a": {"x": 1, "y": 2}, "b": {"z": 3}}, {"a": {"y": 4}, "c": {}}) == {
        "a": {"x": 1, "y": 4}, "b": {"z": 3}, "c": {},
    }  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_pkg.tusk:build", r"no module 'own_pkg\.tusk' here \(.*\) or in this environment"),
        ("other.py:build", r"other\.py: no such file"),
        ("own_pkg.task:biuld", r"has no 'biuld'; it has .*build.* \(did you mean build\?\)"),
        ("own_pkg.task:number", r"is a int: expected a function build\(data, recipe\)"),
        ("own_pkg.task:Cls", r"is a type: expected a function"),
        ("own_pkg.task:", r"expected package\.module:callable, e\.g\. my_pkg\.task:build"),
        ("resent", r"there is no task 'resent' \(did you mean resnet\?\): expected resnet, swin, .*my_pkg\.task:build"),
    ],
)
def test_a_task_that_is_not_there(name: str, problem: str) -> None:
    with pytest.raises(TargetError, match=problem):
        find_task(name)


@pytest.mark.usefixtures("here")
def test_what_a_users_function_does_wrong_is_said_in_one_line() -> None:
    with pytest.raises(TargetError, match=r"returned NoneType: expected a rooftop\.train\.tasks\.Task"):
        find_task("own_pkg.task:nothing")[0](None, Recipe())
    with pytest.raises(ModelRunError, match=r"own_pkg\.task:raises raised KeyError: 'there'"):
        find_task("own_pkg.task:raises")[0](None, Recipe())
    with pytest.raises(InputError, match=r"^no such data$"):
        find_task("own_pkg.task:refuses")[0](None, Recipe())


def test_a_module_that_does_not_load_or_has_no_sections(here: Path) -> None:
    (here / "wrong.py").write_text("import torch\nraise RuntimeError('too early')")
    with pytest.raises(ModelRunError, match="importing 'wrong' raised RuntimeError: too early"):
        find_task("wrong:build")
    (here / "loose.py").write_text("RECIPE = {'lr': 0.1}\ndef build(data, recipe): pass")
    with pytest.raises(TargetError, match=r"RECIPE in its module is \{'lr': 0\.1\}: expected sections with values"):
        find_task("loose:build")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", TASKS)
def test_defaults_of_built_in_tasks_are_recipes(name: str, device: str) -> None:
    for data in (None, "folder"):
        recipe = Recipe.of(find_task(name, data, device)[1])
        assert recipe.run.precision == ("bf16" if device == "cuda" else "fp32")


def test_a_models_name_is_its_task() -> None:
    build, defaults = find_task("resnet50")
    assert build is find_task("resnet")[0]
    assert Recipe.of(defaults).model.name == "resnet50"
    assert find_task("swin_v2_t")[0] is find_task("swin")[0]
    assert find_task("hybrid_s")[0] is find_task("hybrid")[0]
