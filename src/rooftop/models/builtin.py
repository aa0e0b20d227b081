"""The models that the command line knows by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rooftop.errors import TargetError
from rooftop.models import resnet


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model: its builder, the shape of one example (no batch), and whether it gives class logits."""

    build: Callable[..., nn.Module]
    input_shape: tuple[int, ...] = (3, 224, 224)
    classifies: bool = True


_BUILDERS: tuple[Callable[..., nn.Module], ...] = (
    *(resnet.resnet18, resnet.resnet34, resnet.resnet50, resnet.resnet101, resnet.resnet152),
    *(resnet.resnext50_32x4d, resnet.resnext101_32x8d, resnet.resnext101_64x4d),
    *(resnet.wide_resnet50_2, resnet.wide_resnet101_2),
)


def builtin_models() -> dict[str, ModelEntry]:
    """All built-in models by name."""
    return {build.__name__: ModelEntry(build) for build in _BUILDERS}


def model_entry(name: str) -> ModelEntry:
    """The built-in model of that name.

    Raises:
        TargetError: there is none; the message has the names that come close.
    """
    entries = builtin_models()
    if name not in entries:
        close = difflib.get_close_matches(name, entries, n=3) or list(entries)
        raise TargetError(
            f"{name!r} is no built-in model (did you mean {', '.join(close)}?) "
            "and not package.module:callable, e.g. my_pkg.net:build"
        )
    return entries[name]
