"""Apply the section `model` of a recipe to a model that a task has built."""

from __future__ import annotations

from rooftop.train.recipes.checks import check_recipe
from rooftop.train.recipes.freezing import freeze
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.recipes.regularizing import regularize
from rooftop.train.recipes.starting import start_from
from rooftop.train.tasks.task import Task


def prepare_model(
    task: Task, recipe: Recipe, *, ranks: int = 1, begins: bool = True, device: str = "cuda"
) -> list[str]:
    """Check the recipe, then load initial weights, switch on dropout and stochastic depth, and freeze modules.

    Args:
        task: the task, whose model is changed. Its metadata may state the model's name and number of classes.
        begins: whether the training starts now; a resumed training loads its weights from a checkpoint.
        device: the type of the training's device: "cuda" or "cpu".

    Returns:
        A description of the changes, for the user.

    Raises:
        InputError: the recipe does not fit the task.
        WeightsError: the weights do not fit the model.
        MissingExtraError: the weights file needs a package that is not installed.
    """
    check_recipe(recipe, task, ranks=ranks, device=device)
    section, model = recipe.model, task.model
    said = []
    if section.weights and begins:
        name = str(task.metadata.get("model", ""))
        said.append(str(start_from(model, section.weights, classes_of(task, recipe), name=name)))
    said += regularize(model, section)
    if section.frozen:
        frozen = freeze(model, section.frozen)
        said.append(f"frozen: {', '.join(frozen[:5])}{', and so on' if len(frozen) > 5 else ''}")
    return said


def classes_of(task: Task, recipe: Recipe) -> int:
    """Number of classes of the model, from the task or the recipe; 0 if neither states the number."""
    options = task.metadata.get("options", {})
    return int(options.get("num_classes") or recipe.model.num_classes or len(task.metadata.get("classes", ())))
