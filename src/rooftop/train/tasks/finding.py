"""Find a task by name: a built-in task such as `resnet`, or the user's own task, `my_pkg.task:build`.

    build, defaults = find_task("resnet", data="digits")
    recipe = Recipe.of(defaults)
    task = build("digits", recipe)

The module of a task has `build(data, recipe)` and optionally:

    RECIPE         default values of the recipe by section and name, on any device
    RECIPE_CUDA    values that replace those of RECIPE on a GPU, e.g. bf16, channels_last, batch size
    defaults(data, cuda)
                   a function instead of RECIPE and RECIPE_CUDA, if the values also depend on the data
    needs(data)    optional packages that the task needs, as `rooftop.doctor.extras.Extra`; nothing by default
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from rooftop.doctor.extras import Extra
from rooftop.errors import InputError, ModelRunError, RooftopError, TargetError
from rooftop.models import builtin_models
from rooftop.train.tasks.task import Build, Task
from rooftop.user_code import found_in, named_module, place_in_user_code
from rooftop.words import did_you_mean

Values = Mapping[str, Mapping[str, Any]]

TASKS = ("resnet", "swin", "hybrid", "detr", "conv_lstm", "sparse_unet")
"""The names of the built-in tasks, which are also the names of their modules."""
OWN = "my_pkg.task:build"


def find_task(name: str, data: str | None = None, device: str = "cpu") -> tuple[Build, Values]:
    """Return the function that builds a task, and the defaults of its recipe.

    Args:
        name: name of a built-in task, or of a model that a task trains, e.g. "resnet50"; or `my_pkg.task:build` or
            `my_pkg/task.py:build`.
        data: the value of --data; defaults may depend on it.
        device: "cpu" or "cuda", the device of the training.

    Raises:
        TargetError: the task, module or function does not exist, or the defaults have a wrong form. The returned
            `build` also raises TargetError if the user's function does not return a `Task`.
        ModelRunError: the import of the user's module raised. The returned `build` also raises ModelRunError if the
            user's function raises.
    """
    cuda = device.startswith("cuda")
    if ":" in name:
        module = named_module(name, OWN)
        build = found_in(module, name)
        if not callable(build) or isinstance(build, type):
            raise TargetError(f"{name!r} is a {type(build).__name__}: expected a function build(data, recipe)")
        return _checked(name, build), _defaults(name, module, data, cuda)
    task = name if name in TASKS else _task_of_model(name)
    module = importlib.import_module(f"rooftop.train.tasks.{task}")
    found = _defaults(name, module, data, cuda)
    return module.build, found if task == name else over(found, {"model": {"name": name}})


def needs_of(build: Build, data: str | None) -> list[Extra]:
    """Return the optional packages that a task needs, from the function `needs` in the module of its `build`."""
    needs = getattr(sys.modules.get(build.__module__), "needs", None)
    return list(needs(data)) if callable(needs) else []


def over(values: Values, others: Values) -> dict[str, dict[str, Any]]:
    """Merge two sets of recipe values by section and name; `others` replace `values`."""
    sections = dict.fromkeys((*values, *others))
    return {section: {**values.get(section, {}), **others.get(section, {})} for section in sections}


def count_of(options: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Return a value of model.options that must be an integer.

    Raises:
        InputError: the value is not an integer, or is below `least`.
    """
    value = options[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"model.options has {name}={value!r}: expected an integer of {least} or more")
    return value


def _task_of_model(name: str) -> str:
    """Find the built-in task that trains a model."""
    entry = builtin_models().get(name)
    task = entry and entry.build.__module__.rpartition(".")[2]
    if task in TASKS:
        return str(task)
    near = did_you_mean(name, [*TASKS, *builtin_models()])
    raise TargetError(f"there is no task {name!r}{near}: expected {', '.join(TASKS)}, or your own function, e.g. {OWN}")


def _defaults(name: str, module: ModuleType, data: str | None, cuda: bool) -> Values:
    if callable(chosen := getattr(module, "defaults", None)):
        return _values(name, "defaults", chosen(data, cuda))
    values = _values(name, "RECIPE", getattr(module, "RECIPE", {}))
    return over(values, _values(name, "RECIPE_CUDA", getattr(module, "RECIPE_CUDA", {}))) if cuda else values


def _values(name: str, where: str, values: Any) -> Values:
    if not isinstance(values, Mapping) or not all(isinstance(each, Mapping) for each in values.values()):
        raise TargetError(
            f"{name!r}: {where} in its module is {values!r}: expected sections with values, e.g. "
            '{"run": {"epochs": 5}, "optimizer": {"name": "adamw", "lr": 1e-3}}'
        )
    return values


def _checked(name: str, build: Build) -> Build:
    """Wrap the user's function with checks of its errors and its result."""

    @wraps(build)
    def checked(data: str | None, recipe: Any) -> Task:
        try:
            built = build(data, recipe)
        except RooftopError:
            raise
        except (Exception, SystemExit) as error:
            place = place_in_user_code(error)
            raise ModelRunError(
                f"{name} raised {type(error).__name__}: {error}{f' ({place})' if place else ''}"
            ) from error
        if not isinstance(built, Task):
            raise TargetError(
                f"{name!r} returned {type(built).__name__}: expected a rooftop.train.tasks.Task, with at least "
                "model, train and loss"
            )
        return built

    return checked
