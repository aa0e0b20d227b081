"""The registry of built-in models by name: builders register themselves when `rooftop.models` imports their modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from rooftop.errors import TargetError
from rooftop.words import nearest

Build = TypeVar("Build", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model: builder, shape of one input without the batch, and whether the model returns class logits."""

    build: Callable[..., nn.Module]
    input_shape: tuple[int, ...] = (3, 224, 224)
    classifies: bool = True


_entries: dict[str, ModelEntry] = {}


def register(build: Build) -> Build:
    """Register a builder (decorator): the function's name becomes the model's name."""
    _entries[build.__name__] = ModelEntry(build)
    return build


def builtin_models() -> dict[str, ModelEntry]:
    """All built-in models by name."""
    return dict(_entries)


def model_entry(name: str) -> ModelEntry:
    """The built-in model with that name.

    Raises:
        TargetError: the name is unknown; the message suggests similar names.
    """
    if name not in _entries:
        package, _, attribute = name.rpartition(".")
        meant = nearest(name, _entries) or ([f"{package}:{attribute}"] if package else [])
        hint = f"did you mean {', '.join(meant)}?" if meant else f"there are {', '.join(_entries)}"
        raise TargetError(
            f"{name!r} is neither a built-in model with a known input shape ({hint}) nor package.module:callable, "
            "e.g. my_pkg.net:build"
        )
    return _entries[name]
