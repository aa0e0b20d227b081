"""Create the optimizer of a recipe: torch.optim's SGD, AdamW or Muon.

SGD and AdamW update many parameters in each kernel: with `fused` if PyTorch supports `fused` for all parameters, or
else with `foreach`.

optimizer = optimizer_of(model, recipe)  # after the model is on its device
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.nn.fused_steps import skips_parameters
from rooftop.train.recipes.muon import MuonAndAdamW
from rooftop.train.recipes.parameter_groups import parameter_groups
from rooftop.train.recipes.recipe import Optimizer, Recipe

FUSED_ON = ("cuda", "cpu")
"""Device types for which PyTorch has fused optimizers, which update all parameters of a group in one kernel."""


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Create the optimizer of all parameters that are not frozen, with its parameter groups.

    Raises:
        InputError: all parameters are frozen, or the recipe does not fit the model.
    """
    given = recipe.optimizer
    groups = parameter_groups(model, given)
    if not groups:
        raise InputError(
            f"no parameter of {type(model).__name__} is left to train: leave some modules out of model.frozen"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    if given.name == "sgd":
        check_momentum(given)
        how = {"foreach": True} if skips_parameters(torch.optim.SGD, parameters) else _implementation(parameters)
        return torch.optim.SGD(groups, lr=given.lr, momentum=given.momentum, nesterov=given.nesterov, **how)
    how = _implementation(parameters)
    if given.name == "adamw":
        return torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps, **how)
    return MuonAndAdamW(model, groups, given, how)


def check_momentum(given: Optimizer) -> None:
    """Check that the momentum is above 0 if Nesterov's momentum is on.

    Raises:
        InputError: the momentum is 0.
    """
    if given.nesterov and not given.momentum:
        raise InputError(
            "optimizer.nesterov needs momentum: set optimizer.momentum above 0, or optimizer.nesterov=false"
        )


def _implementation(parameters: list[torch.Tensor]) -> dict[str, Any]:
    """Choose `fused` if PyTorch supports it for all these parameters, or else `foreach`."""
    fits = all(each.is_floating_point() and each.device.type in FUSED_ON for each in parameters)
    return {"fused": True} if fits else {"foreach": True}
