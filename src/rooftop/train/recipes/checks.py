"""Check before the first step whether a recipe fits a task, so that no training time is lost."""

from __future__ import annotations

from torch import nn

from rooftop.errors import InputError
from rooftop.train.recipes.freezing import matching
from rooftop.train.recipes.layers import layers_of
from rooftop.train.recipes.muon import check_trained, hidden_matrices
from rooftop.train.recipes.optimizers import check_momentum
from rooftop.train.recipes.rates import check_parts
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task


def check_recipe(recipe: Recipe, task: Task, *, ranks: int = 1, device: str = "cuda") -> None:
    """Check that a task supports the values of a recipe. Neither the task nor the recipe is changed.

    Args:
        device: the type of the training's device: "cuda" or "cpu".

    Raises:
        InputError: a switch of the recipe (such as mix.mixup) does not fit the task, the ranks or the device. The
            message names the switch and a value that fits.
    """
    _check_batch(recipe, ranks)
    _check_mix(recipe, task, ranks)
    _check_model(recipe, task.model)
    _check_replay(recipe, ranks, device)
    check_parts(recipe.schedule)
    if recipe.augment.decode == "gpu" and task.arrive is None:
        raise InputError("augment.decode is gpu, but this task decodes no images on a GPU: set augment.decode=cpu")
    if recipe.augment.rand_augment and recipe.augment.rand_augment_on == "gpu" and device != "cuda":
        raise InputError(
            f"augment.rand_augment_on is gpu, but this training runs on the {device}: set augment.rand_augment_on=cpu"
        )
    if recipe.ema.decay == 1:
        raise InputError("ema.decay is 1: the mean would never follow the weights; set it below 1, e.g. 0.999")
    if recipe.evaluation.patience and task.valid is None:
        raise InputError("evaluation.patience needs validation data, but the task has none: set evaluation.patience=0")


def _check_batch(recipe: Recipe, ranks: int) -> None:
    parts = ranks * recipe.run.accumulate
    if recipe.run.batch % parts:
        nearest = max(1, round(recipe.run.batch / parts)) * parts
        raise InputError(
            f"run.batch is {recipe.run.batch}, with {ranks} ranks and run.accumulate={recipe.run.accumulate}: expected "
            f"a multiple of {parts}, e.g. {nearest}"
        )


def _check_replay(recipe: Recipe, ranks: int, device: str) -> None:
    if not recipe.run.replay:
        return
    if device != "cuda":
        raise InputError(
            f"run.replay is true, but CUDA graphs need a GPU, and this training runs on the {device}: set "
            "run.replay=false"
        )
    if ranks > 1:
        raise InputError(
            f"run.replay is true, but there are {ranks} ranks, which sum gradients during the backward pass: set "
            "run.replay=false, or train on one GPU"
        )


def _check_mix(recipe: Recipe, task: Task, ranks: int) -> None:
    on = [name for name in ("mixup", "cutmix") if getattr(recipe.mix, name)]
    if not on:
        return
    if task.alter is None:
        off = " and ".join(f"mix.{name}=0" for name in on)
        raise InputError(f"mix.{on[0]} mixes images and their classes, which this task does not support: set {off}")
    part = recipe.run.batch // (ranks * recipe.run.accumulate)
    if part % 2:
        raise InputError(
            f"mix.{on[0]} mixes pairs of samples, but one forward pass has {part}: set run.batch to a multiple of "
            f"{2 * ranks * recipe.run.accumulate}"
        )


def _check_model(recipe: Recipe, model: nn.Module) -> None:
    frozen = matching(model, recipe.model.frozen)
    trained = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(name == each or name.startswith(f"{each}.") for each in frozen)
    ]
    if not trained:
        raise InputError(
            f"no parameter of {type(model).__name__} is left to train: leave some modules out of model.frozen"
        )
    given = recipe.optimizer
    if given.layer_decay < 1:
        layers_of(model)
    if given.name == "sgd":
        check_momentum(given)
    if given.name == "muon":
        check_trained(model, hidden_matrices(model), trained)
