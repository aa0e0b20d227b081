"""List all switches of a recipe with default, meaning and source, from the docstrings of `recipe.py`.

print(switches_table())  # the table of docs/train-recipes.md
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

from rooftop.train.recipes.recipe import Recipe

ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
SOURCE = "Source: "


@dataclass(frozen=True)
class Switch:
    """A switch of a recipe.

    Attributes:
        path: section.name.
        default: the default value.
        meaning: the description of the switch's effect.
        source: the publication; "" if there is none.
    """

    path: str
    default: Any
    meaning: str
    source: str


def switches() -> list[Switch]:
    """Return all switches, in the order of the recipe.

    Raises:
        ValueError: a docstring lacks a switch, or has an entry that is not a field.
    """
    found = []
    recipe = Recipe()
    for section in fields(recipe):
        values = getattr(recipe, section.name)
        entries = _entries(type(values))
        named = [each.name for each in fields(values)]
        if list(entries) != named:
            raise ValueError(f"the docstring of {type(values).__name__} has {list(entries)}, the class has {named}")
        for name, text in entries.items():
            meaning, _, source = text.partition(SOURCE)
            meaning, source = meaning.strip().rstrip("."), source.strip().rstrip(".")
            found.append(Switch(f"{section.name}.{name}", getattr(values, name), meaning, source))
    return found


def switches_table() -> str:
    """The switches as a table in Markdown."""
    rows = ["| switch | default | what it does | source |", "|---|---|---|---|"]
    rows += [f"| `{each.path}` | {_shown(each.default)} | {each.meaning} | {each.source} |" for each in switches()]
    return "\n".join(rows) + "\n"


def _entries(section: type) -> dict[str, str]:
    """Map each name in the Attributes section of a docstring to its text."""
    text = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")[2]
    _, *pieces = ENTRY.split(text)
    return {name: " ".join(said.split()) for name, said in zip(pieces[::2], pieces[1::2], strict=True)}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value not in ("", {}) else ('`""`' if value == "" else "`{}`")
