"""A recipe that does not fit a task is refused before the first step, with the value that would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rooftop.errors import InputError
from rooftop.models import resnet18
from rooftop.train.recipes import Recipe
from rooftop.train.recipes.checks import check_recipe
from rooftop.train.recipes.mixing import mixer
from rooftop.train.recipes.recipe import Mix
from rooftop.train.tasks.task import Task


def network() -> nn.Module:
    with torch.device("meta"):
        return resnet18(num_classes=2)


def task(model: nn.Module | None = None, **fields: Any) -> Task:
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    return Task(model=model or network(), train=data, loss=lambda model, batch: batch, **fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ema.decay=.9", r"expected a number: write 0\.9$"),
        ("optimizer.lr=5.", r"expected a number: write 5\.0$"),
        ("run.batch=1e3", r"expected an integer: write 1000$"),
        ("run.batch=1.5", r"expected an integer$"),
        ("run.replay=True", r"expected true or false: write true$"),
        ("ema.decay=much", r"expected a number$"),
        ("run.seed=100000000000000000000", r"expected an integer from 0 to 2\*\*63 - 1$"),
        ("model.options={num_classes=7}", r"expected no 'num_classes' here: set model\.num_classes$"),
        ("model.options={size={since=2020-01-01}}", r"model\.options\.size is .*, which a recipe cannot store"),
        ("model.options={rate=nan}", r"model\.options\.rate is nan, which a recipe cannot store"),
    ],
)
def test_a_value_of_a_wrong_type_is_an_error_with_the_right_value(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe().with_values([text])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"frozen": ["layr1"]}}, r"'layr1' matches no module.*layer1"),
        ({"model": {"frozen": ["*"]}}, r"left to train: leave some modules out of model\.frozen"),
        ({"mix": {"cutmix": 1.0}}, r"mix\.cutmix mixes .* which this task does not support: set mix\.cutmix=0$"),
        ({"mix": {"mixup": 0.1, "cutmix": 1.0}}, r"set mix\.mixup=0 and mix\.cutmix=0$"),
        ({"run": {"batch": 10, "accumulate": 4}}, r"run\.batch is 10.*multiple of 4, e\.g\. 8"),
        ({"schedule": {"name": "wsd", "warmup": 0.9}}, r"schedule\.warmup \(0\.9\).*at most 1"),
        ({"ema": {"decay": 1.0}}, r"ema\.decay is 1.*0\.999"),
        ({"augment": {"decode": "gpu"}}, r"decodes no images on a GPU: set augment\.decode=cpu"),
        ({"evaluation": {"patience": 3}}, r"evaluation\.patience=0"),
        ({"run": {"replay": True}}, r"run\.replay is true.*need a GPU.*runs on the cpu: set run\.replay=false"),
        (
            {"augment": {"rand_augment": 2, "rand_augment_on": "gpu"}},
            r"rand_augment_on is gpu.*runs on the cpu: set augment\.rand_augment_on=cpu",
        ),
        ({"optimizer": {"nesterov": True, "momentum": 0.0}}, r"nesterov needs momentum"),
        ({"optimizer": {"name": "muon"}, "model": {"frozen": ["conv1", "layer*"]}}, r"optimizer\.name=adamw"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_recipe(Recipe.of(values), task(), device="cpu")


def test_a_replay_has_one_rank() -> None:
    recipe = Recipe.of({"run": {"replay": True}})
    check_recipe(recipe, task())
    with pytest.raises(InputError, match=r"there are 2 ranks.*set run\.replay=false, or train on one GPU"):
        check_recipe(recipe, task(), ranks=2)


def test_layer_decay_needs_layers() -> None:
    with pytest.raises(InputError, match=r"no consecutive layers.*optimizer\.layer_decay=1"):
        check_recipe(Recipe.of({"optimizer": {"layer_decay": 0.5}}), task(nn.Linear(3, 2)))


def test_pairs_must_be_in_one_forward_pass() -> None:
    mixing = task(alter=mixer(Mix(mixup=0.2), 2))
    recipe = Recipe.of({"mix": {"mixup": 0.2}, "run": {"batch": 12, "accumulate": 2}})
    check_recipe(recipe, mixing)
    with pytest.raises(InputError, match=r"forward pass has 3.*multiple of 8"):
        check_recipe(recipe, mixing, ranks=2)


def test_what_fits_changes_nothing() -> None:
    fitting = task(valid=TensorDataset(torch.zeros(2, 3)), alter=mixer(Mix(mixup=0.2), 2))
    optimizer = {"name": "muon", "layer_decay": 0.5}
    values = {"optimizer": optimizer, "model": {"frozen": ["layer1"]}, "mix": {"mixup": 0.2}, "ema": {"decay": 0.9}}
    check_recipe(Recipe.of({**values, "evaluation": {"patience": 2}}), fitting)
    assert all(each.requires_grad for each in fitting.model.parameters())
    assert fitting.model.layer1.training
