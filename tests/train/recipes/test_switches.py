"""Every switch of a recipe is explained, listed in the docs, and used."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from rooftop.train.recipes import Recipe
from rooftop.train.recipes import recipe as shape
from rooftop.train.recipes.switches import Switch, switches, switches_table

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "rooftop"
PAGE = ROOT / "docs" / "train-recipes.md"
SECTIONS = {each.name: type(getattr(Recipe(), each.name)).__name__ for each in fields(Recipe)}
WHERE = ("train/recipes", "train/fitting", "train/tasks", "data")
"""The files that implement switches; files that only show or check them do not count."""
SHOWN = ("recipe.py", "checks.py", "switches.py")


def used(path: Path) -> set[str]:
    """Switches that a file reads: `recipe.mix.mixup`, `mix.mixup`, or an attribute of a variable that is a section."""
    tree = ast.parse(path.read_bytes())
    by_class = {kind: name for name, kind in SECTIONS.items()}
    aliases = {name: name for name in SECTIONS}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in by_class:
            aliases[node.arg] = by_class[node.annotation.id]
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            for target, value in pairs:
                both = (target, value)
                if all(isinstance(each, ast.Tuple) for each in both):
                    pairs += zip(target.elts, value.elts, strict=False)  # type: ignore[attr-defined]
                elif isinstance(value, ast.Attribute) and value.attr in SECTIONS:
                    aliases[_last(target)] = value.attr
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (section := aliases.get(_last(node.value))):
            found.add(f"{section}.{node.attr}")
    return found


def _last(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def all_used() -> set[str]:
    files = [path for folder in WHERE for path in (SOURCE / folder).rglob("*.py") if path.name not in SHOWN]
    return set().union(*map(used, files))


def test_no_switch_is_dead() -> None:
    dead = {each.path for each in switches()} - all_used()
    assert not dead, "no code reads these switches"


def test_a_use_is_seen_and_a_mention_is_not(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def f(recipe, given: Optimizer):\n"
        "    'mix.cutmix'\n"
        "    chosen, other = recipe.model, 1\n"
        "    return recipe.ema.decay + given.clip + chosen.weights + other.frozen\n"
    )
    assert used(file) & {each.path for each in switches()} == {"ema.decay", "optimizer.clip", "model.weights"}


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("switches -->\n")[2].partition("<!-- end -->")[0]
    assert table == switches_table(), "put the output of rooftop.train.recipes.switches.switches_table() there"


def test_the_table_has_every_switch_with_its_default_and_source() -> None:
    found = {each.path: each for each in switches()}
    assert found.keys() == {f"{section}.{name}" for section, values in Recipe().plain().items() for name in values}
    assert all(each.meaning for each in found.values())
    assert found["mix.mixup"] == Switch(
        "mix.mixup",
        0.0,
        "alpha of the Beta distribution of mixup; 0: off",
        "Zhang et al. 2018, arXiv:1710.09412",
    )


def test_a_switch_without_an_explanation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape.Ema, "__doc__", "Mean.\n\n    Attributes:\n        decay: of the mean.\n    ")
    with pytest.raises(ValueError, match=r"the docstring of Ema has \['decay'\]"):
        switches()
