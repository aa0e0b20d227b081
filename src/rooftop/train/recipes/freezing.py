"""Freeze the modules of a model that training must not change."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from rooftop.errors import InputError
from rooftop.train.recipes.parameter_kinds import is_norm
from rooftop.words import did_you_mean


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze modules and parameters whose names match a shell pattern, e.g. "layer1", "features.[0-3]", "*norm*".

    Frozen parameters get no gradient. Norms in frozen modules stay in evaluation mode, even after `model.train()`, so
    their statistics stay the same. Call `freeze` after `convert_sync_batchnorm`, which replaces norms.

    Returns: The matching names, in the model's order. If a module matches, names inside this module are left out.

    Raises:
        InputError: a pattern matches nothing.
    """
    modules, parameters = _names(model)
    matched = matching(model, patterns)
    for name in matched:
        if name in modules:
            _freeze_module(modules[name])
        else:
            parameters[name].requires_grad_(False)
    return matched


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names that `freeze` would return, but freeze nothing. Raises the errors of `freeze`."""
    modules, parameters = _names(model)
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in (*modules, *parameters) if fnmatchcase(name, pattern)]
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            raise InputError(
                f"model.frozen: {pattern!r} matches no module of {type(model).__name__}"
                f"{did_you_mean(pattern, modules)}: it has {children or 'none'}"
            )
        matched.update(found)
    return [name for name in (*modules, *parameters) if name in matched and not _within(name, matched)]


def _names(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    return {name: module for name, module in model.named_modules() if name}, dict(model.named_parameters())


def _within(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts)))


def _freeze_module(module: nn.Module) -> None:
    module.requires_grad_(False)
    for part in module.modules():
        if is_norm(part):
            part.eval()
            part.train = partial(_stay, part)  # type: ignore[method-assign]


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """Replacement for the `train` method of frozen norms, which changes nothing.

    `_stay` is a module-level function, so that frozen norms can be copied and pickled.
    """
    return norm
