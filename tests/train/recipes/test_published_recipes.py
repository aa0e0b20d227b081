"""Recipes that come with Rooftop agree with torchvision's and Microsoft's training scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rooftop.errors import InputError
from rooftop.models import resnet50, swin_t
from rooftop.train.recipes import Recipe, optimizer_of
from rooftop.train.recipes.rates import rate_factor
from rooftop.train.recipes.recipe import published_recipes

PER_EPOCH = 1_281_167 // 1024


def test_there_are_two_and_each_value_has_a_source() -> None:
    assert list(published_recipes()) == ["resnet50-v2", "swin-t"]
    for path in published_recipes().values():
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.match(r"\w+ = ", line) or "  # " in line or " # " in line, line


def test_resnet50_is_torchvisions() -> None:
    recipe = Recipe.read(Path("resnet50-v2"))
    with torch.device("meta"):
        model = resnet50()
    decays = {len(each["params"]): each["weight_decay"] for each in optimizer_of(model, recipe).param_groups}
    assert decays == {54: 2e-5, 106: 0.0, 1: 2e-5}  # convolutions and fc; 53 norms; the bias of fc
    steps = 600 * PER_EPOCH
    assert rate_factor(recipe.schedule, 5 * PER_EPOCH, steps) == pytest.approx(1, abs=1e-3)
    assert rate_factor(recipe.schedule, 302 * PER_EPOCH + PER_EPOCH // 2, steps) == pytest.approx(0.5, abs=1e-3)
    adjusted = 1 - (1 - 0.99998) * 8 * 128 * 32 / 600
    assert recipe.ema.decay == pytest.approx(adjusted, abs=2e-5)


def test_swin_is_microsofts() -> None:
    recipe = Recipe.read(Path("swin-t"))
    with torch.device("meta"):
        model = swin_t()
    decayed = [each for each in optimizer_of(model, recipe).param_groups if each["weight_decay"]]
    matrices = sum(
        each.dim() > 1 and not name.endswith("relative_position_bias_table") for name, each in model.named_parameters()
    )
    assert [len(each["params"]) for each in decayed] == [matrices]
    steps = 300 * PER_EPOCH
    assert rate_factor(recipe.schedule, 20 * PER_EPOCH, steps) == pytest.approx(1, abs=1e-3)
    assert recipe.optimizer.lr * rate_factor(recipe.schedule, steps, steps) == pytest.approx(1e-5, rel=1e-3)


def test_a_published_recipe_is_whole() -> None:
    """A published recipe replaces the whole recipe of a task, for example its nesterov."""
    task = Recipe.of({"optimizer": {"nesterov": True}, "model": {"options": {"channels": 8}}})
    assert Recipe.read(Path("resnet50-v2"), task) == Recipe.read(Path("resnet50-v2"))


def test_a_file_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swin-t").write_text("[run]\nepochs = 1\n")
    assert Recipe.read("swin-t").run.epochs == 1


def test_names_that_there_are_not() -> None:
    with pytest.raises(InputError, match=r"neither a file nor a published recipe \(did you mean swin-t\?\)"):
        Recipe.read(Path("swin_b"))
    with pytest.raises(InputError, match=r"none\.toml cannot be read"):
        Recipe.read(Path("none.toml"))
