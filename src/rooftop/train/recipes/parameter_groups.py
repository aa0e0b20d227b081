"""The parameter groups of a recipe; each group has its own weight decay and learning rate.

    groups = parameter_groups(model, recipe.optimizer)  # for any torch.optim optimizer

A group holds the parameters of one kind (weights, norms, biases) and, with `layer_decay`, of one layer. Layer k of n,
counted from 0, has the learning rate lr * layer_decay^(n - 1 - k), so the last layer has lr (Howard and Ruder 2018,
arXiv:1801.06146; Bao et al. 2021, arXiv:2106.08254). `initial_lr` is the highest learning rate of the group, as in
torch's schedulers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rooftop.train.recipes.layers import layers_of
from rooftop.train.recipes.parameter_kinds import kinds_of
from rooftop.train.recipes.recipe import Optimizer


def parameter_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Group all parameters that are not frozen; each group has a `kind` and a `layer` (None without layer decay).

    Raises:
        InputError: layer_decay is set, but the model's layers are unknown (`layers_of`).
    """
    decays = {
        "weight": optimizer.weight_decay,
        "norm": optimizer.norm_weight_decay,
        "bias": optimizer.bias_weight_decay,
    }
    factors, layers = _factors(model, optimizer.layer_decay)
    groups: dict[tuple[str, int | None], dict[str, Any]] = {}
    kinds = kinds_of(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, layer = kinds[name], layers.get(name)
        rate = optimizer.lr * factors.get(name, 1.0)
        same = {"lr": rate, "initial_lr": rate, "weight_decay": decays[kind], "kind": kind, "layer": layer}
        groups.setdefault((kind, layer), {"params": [], **same})["params"].append(parameter)
    return list(groups.values())


def _factors(model: nn.Module, decay: float) -> tuple[dict[str, float], dict[str, int]]:
    """Map each parameter's name to its factor of the learning rate, and to the number of its layer. Both maps are empty
    without layer decay."""
    if decay == 1:
        return {}, {}
    layers = layers_of(model)
    numbers = {name: number for number, names in enumerate(layers) for name in names}
    return {name: decay ** (len(layers) - 1 - number) for name, number in numbers.items()}, numbers
